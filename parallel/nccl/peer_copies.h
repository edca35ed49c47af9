// Collectives between the GPUs of one host as copies from memory to memory, by the engines that GPUs have for that: no
// processor takes part but for sums, so that products beside them keep all of them.
//
// Every rank maps the others' memory. A rank says in its queue that its tensors may be written to, waits until the
// others have said so, writes, says that it has written, and waits until the others have.
#pragma once

#include <cuda_runtime.h>
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/nccl/cuda_driver.h"
#include "parallel/nccl/peer_memory.h"

namespace palimpsest {

class PeerCopies {
 public:
  // Why there are none, where there are none; on all ranks the same.
  enum class Obstacle : uint8_t { kNone, kSeveralHosts, kDriver, kNotMapped, kNotArrived };
  static const char* text_of(Obstacle obstacle);

  struct Made;
  // Over the current GPU of each rank of `comm`, where all of them are on one host and can map each other's memory,
  // which is tried. Every rank of `comm` calls it, as all of this. `comm` and `axis`, which is for messages, must
  // outlive it. For collectives of this many bytes or more.
  static Made make(MPI_Comm comm, const std::string& axis, int64_t least_bytes);
  ~PeerCopies();  // nothing may be under way
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  // Memory that a reduce_scatter of these takes on each rank: 0 of what does not go as copies.
  int64_t workspace_bytes(std::span<const Parts> tensors) const;
  // Takes it for the largest, before anything is under way. Where a rank cannot, none are summed here.
  void reserve(int64_t workspace_bytes);
  // Maps nothing of the others' tensors any more, when nothing is under way. All ranks have done so when it returns.
  void unmap_tensors() noexcept { tensors_.unmap(); }
  // The same of all memory, before this ends.
  void unmap_all() noexcept;

  // Each is false, on all ranks, where these tensors cannot go this way: too small, not mapped, of a kind that is not
  // summed.
  bool all_gather(cudaStream_t queue, std::span<const Parts> tensors);
  // Sums in the order of the ranks, in f32 (f64 of f64), rounded once.
  bool reduce_scatter(cudaStream_t queue, std::span<const Parts> tensors);
  bool shift(cudaStream_t queue, const Tensor& out, const Tensor& in, int64_t by);

 private:
  struct MemoryDeleter {
    void operator()(void* memory) const noexcept { cudaFree(memory); }
  };
  using Memory = std::unique_ptr<void, MemoryDeleter>;

  PeerCopies(MPI_Comm comm, const std::string& axis, int64_t least_bytes);

  Obstacle map_flags();
  // Whether what each rank writes to each other's memory arrives there.
  bool try_flags();
  bool suit_sums(std::span<const Parts> tensors) const;

  // Calls body(rank) for the others, beginning behind this one.
  template <class Body>
  void for_each_other(Body&& body) const {
    for (int i = 1; i < size_; ++i) body((rank_ + i) % size_);
  }
  // Both sides of a meeting of the ranks' queues; `which` is one of the two kinds.
  enum class Meeting : uint8_t { kBefore, kAfter };
  void meet(cudaStream_t queue, Meeting which);
  uint32_t* flag(std::byte* flags, Meeting which, int of) const {
    return reinterpret_cast<uint32_t*>(flags) + (which == Meeting::kBefore ? 0 : size_) + of;
  }
  // In `flags`, behind the flags: a word of the rank's own, and places for what the others try to write.
  uint32_t* own_word(std::byte* flags) const { return reinterpret_cast<uint32_t*>(flags) + int64_t{2} * size_; }
  std::byte* trial_place(std::byte* flags, int from) const;
  int64_t flag_bytes() const;
  // A rank's staging memory has a row for each of the others.
  std::byte* row_of(int rank, int from) const {
    return staging_of_[static_cast<size_t>(rank)] + (from < rank ? from : from - 1) * row_bytes_;
  }

  MPI_Comm comm_;
  int64_t least_bytes_;
  int rank_ = 0, size_ = 1;
  CudaDriver driver_;
  PeerMemory mapped_flags_, mapped_staging_, tensors_;
  Memory flags_;                      // written by the others, but for the own word
  std::vector<std::byte*> flags_of_;  // by rank
  Memory staging_;                    // [size - 1, row_bytes_]
  int64_t staging_bytes_ = 0, row_bytes_ = 0;
  bool can_sum_ = true;
  std::vector<std::byte*> staging_of_;  // by rank
  uint32_t collective_ = 0;
};

struct PeerCopies::Made {
  std::unique_ptr<PeerCopies> copies;  // null where there is an obstacle
  Obstacle obstacle;
};

}  // namespace palimpsest
