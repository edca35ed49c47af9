// Communicator: collectives over the ranks of one mesh axis. MPI on host memory (mpi_communicator.h), NCCL on a GPU's
// (nccl_communicator.h); a group of one rank does nothing. Every rank of the group makes the same calls in the same
// order.
//
// On a planning stream nothing is sent, but bytes are counted: so a rehearsal tells what a step sends on each axis.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/stream.h"

namespace palimpsest {

enum class ReduceOp : uint8_t { kSum, kMax };

// A tensor of which each rank has an equal part: numel(whole) = size * numel(part).
struct Parts {
  Tensor whole, part;
};

// A collective under way. Its tensors must not be touched before wait() returns.
class Pending {
 public:
  virtual ~Pending() = default;
  // Returns when it is done, or on a GPU when what the stream is given from here on comes after it: the host goes on.
  // When the deadline passes, the job ends with exit status 3 (see watchdog.h).
  virtual void wait() = 0;
  // Moves it on, where that takes calls of this process, and returns at once.
  virtual void advance() {}
};

class Communicator {
 public:
  // The group of this rank alone.
  explicit Communicator(std::string axis) : axis_(std::move(axis)) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const std::string& axis() const { return axis_; }  // "data", "sequence", "tensor", "replica", "world"
  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  // x = op over the ranks, in place. Contiguous; f32, f64, i32 or i64, on a GPU bf16 too. The result is the same bits
  // on every rank.
  void all_reduce(Stream& stream, Tensor x, ReduceOp op);
  // out = the ranks' `in` one after the other: numel(out) = size * numel(in). Any dtype, contiguous. `in` may be this
  // rank's part of `out`.
  void all_gather(Stream& stream, Tensor out, const Tensor& in);
  // out = this rank's part of the sum over the ranks: numel(in) = size * numel(out). f32 or f64, on a GPU bf16 too,
  // contiguous. On a GPU `out` may be this rank's part of `in`.
  void reduce_scatter(Stream& stream, Tensor out, const Tensor& in);
  // x of rank `root` to all. Any dtype, contiguous.
  void broadcast(Stream& stream, Tensor x, int64_t root);
  // Sends `out` to one rank and receives `in` from another at the same time. A rank of -1: nothing that way.
  void send_receive(Stream& stream, const Tensor& out, int64_t to, Tensor in, int64_t from);
  void barrier(Stream& stream);  // of the hosts

  // The same, under way while the caller goes on.
  std::unique_ptr<Pending> start_all_reduce(Stream& stream, Tensor x, ReduceOp op);
  std::unique_ptr<Pending> start_all_reduce(Stream& stream, std::vector<Tensor> tensors, ReduceOp op);
  // Of several tensors at once: each whole from its part, each part from its whole.
  std::unique_ptr<Pending> start_all_gather(Stream& stream, std::vector<Parts> tensors);
  std::unique_ptr<Pending> start_reduce_scatter(Stream& stream, std::vector<Parts> tensors);
  std::unique_ptr<Pending> start_send_receive(Stream& stream, const Tensor& out, int64_t to, Tensor in, int64_t from);
  // Around the ring: `out` to the rank that is `by` further on, `in` from the one that is as far back. All of the same
  // size, by in 1 .. size - 1.
  std::unique_ptr<Pending> start_shift(Stream& stream, const Tensor& out, Tensor in, int64_t by);

  // Bytes that this rank has sent, as a ring would send them: all_gather (size - 1) parts, reduce_scatter the same,
  // all_reduce both.
  int64_t bytes_sent() const { return bytes_sent_; }
  void reset_bytes_sent() { bytes_sent_ = 0; }

  // Memory beside the tensors that reduce_scatter takes, at most, for what was asked of it so far, rehearsed or not.
  int64_t workspace_bytes() const { return workspace_bytes_; }
  // Takes that memory. Every rank of the group calls it when all is rehearsed, and nothing is under way; a
  // reduce_scatter that needs more is a fault until the next call.
  virtual void take_workspace();
  // Leaves the other ranks' memory alone from here on, and returns when they do so too: a rank must not free what
  // another has mapped. Every rank of the group calls it; what they send each other later maps it anew.
  virtual void leave_others_memory() noexcept;

  // What a user should know of the ways that tensors take; empty where they take the usual ones.
  virtual std::string notice() const;

  // For the line that is printed when a deadline passes.
  virtual void set_step(int64_t step);

 protected:
  Communicator(std::string axis, int64_t rank, int64_t size) : axis_(std::move(axis)), rank_(rank), size_(size) {}

  // What a backend provides; only called with size() > 1, and with non-empty tensors, at least one.
  virtual std::unique_ptr<Pending> launch_all_reduce(Stream& stream, std::span<const Tensor> tensors, ReduceOp op);
  virtual std::unique_ptr<Pending> launch_all_gather(Stream& stream, std::span<const Parts> tensors);
  virtual std::unique_ptr<Pending> launch_reduce_scatter(Stream& stream, std::span<const Parts> tensors);
  virtual std::unique_ptr<Pending> launch_broadcast(Stream& stream, const Tensor& x, int64_t root);
  virtual std::unique_ptr<Pending> launch_send_receive(Stream& stream, const Tensor& out, int64_t to, const Tensor& in,
                                                       int64_t from);
  virtual std::unique_ptr<Pending> launch_shift(Stream& stream, const Tensor& out, const Tensor& in, int64_t by);
  virtual std::unique_ptr<Pending> launch_barrier(Stream& stream);
  virtual int64_t workspace_of_reduce_scatter(std::span<const Parts> tensors) const;  // bytes, the same on all ranks

 private:
  template <class Copy>
  bool prepare(const char* what, Stream& stream, std::vector<Parts>& tensors, Copy&& copy_of);

  std::string axis_;
  int64_t rank_ = 0;
  int64_t size_ = 1;
  int64_t bytes_sent_ = 0;
  int64_t workspace_bytes_ = 0;
};

}  // namespace palimpsest
