// Collectives between the GPUs of one host as copies from memory to memory, by the engines that GPUs have for that: no
// processor takes part but for sums, so that products beside them keep all of them.
//
// Every rank maps the others' memory. A rank says in its queue that its tensors may be written to, waits until the
// others have said so, writes, says that it has written, and waits until the others have.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <mpi.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "parallel/communicator.h"

namespace palimpsest {

class PeerCopies {
 public:
  // Over the current GPU of each rank of `comm`, where all of them are on one host and can map each other's memory;
  // null elsewhere. Every rank of `comm` calls it, as all of this.
  static std::unique_ptr<PeerCopies> make(MPI_Comm comm);
  ~PeerCopies();  // nothing may be under way
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  // Whether these are large enough to be worth it, and of a kind that reduce_scatter can sum.
  static bool suit_all_gather(std::span<const Parts> tensors);
  static bool suit_reduce_scatter(std::span<const Parts> tensors);
  static bool suit_shift(const Tensor& out);

  void all_gather(cudaStream_t queue, std::span<const Parts> tensors);
  // Sums in the order of the ranks, in f32 (f64 of f64), rounded once.
  void reduce_scatter(cudaStream_t queue, std::span<const Parts> tensors);
  void shift(cudaStream_t queue, const Tensor& out, const Tensor& in, int64_t by);

 private:
  // Where memory lies: a block of this process, as others can map it, and a place in it.
  struct Place {
    unsigned long long block;  // no other block of the process ever has this number
    int64_t offset;
    cudaIpcMemHandle_t handle;
  };
  struct Driver;  // functions that the runtime does not have
  struct MemoryDeleter {
    void operator()(void* memory) const noexcept { cudaFree(memory); }
  };
  using Memory = std::unique_ptr<void, MemoryDeleter>;

  explicit PeerCopies(MPI_Comm comm);

  bool map_flags();
  Place place_of(void* address);
  // The addresses, here, of each rank's memory that corresponds to `own`: [rank * own.size() + i]. Waits for the other
  // hosts' calls.
  std::vector<std::byte*> addresses_of(std::span<void* const> own);
  std::byte* mapped(int rank, const Place& place);
  void reserve_staging(cudaStream_t queue, int64_t bytes);

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

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::unique_ptr<const Driver> driver_;
  std::map<unsigned long long, cudaIpcMemHandle_t> handles_;         // of own blocks
  std::map<std::pair<int, unsigned long long>, std::byte*> mapped_;  // others' blocks
  Memory flags_;                                                     // written by the others, and a word more
  std::vector<std::byte*> flags_of_;                                 // by rank
  Memory staging_;                                                   // [size, staging_bytes_]
  int64_t staging_bytes_ = 0;
  std::vector<std::byte*> staging_of_;  // by rank
  uint32_t collective_ = 0;
};

}  // namespace palimpsest
