// Memory of the GPUs of one host, as the ranks of a group map it from each other.
#pragma once

#include <cuda_runtime.h>
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "parallel/nccl/cuda_driver.h"

namespace palimpsest {

class PeerMemory {
 public:
  // `axis` is for messages. All of them must outlive it.
  PeerMemory(MPI_Comm comm, const CudaDriver& driver, const std::string& axis);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // The addresses, here, of each rank's memory that corresponds to `own`: [rank * own.size() + i]. Where a rank cannot
  // map some of it, none on all ranks; the rank that cannot says so once. Every rank calls it, and waits for the
  // others.
  std::vector<std::byte*> addresses_of(std::span<void* const> own);

  // Maps nothing any more. Every rank calls it, when nothing is under way; all have done so when it returns.
  void unmap() noexcept;

 private:
  using Block = std::pair<int, unsigned long long>;  // rank, and a number that no other block of the process ever has
  // Where memory lies: a block of this process, as others can map it, and a place in it.
  struct Place {
    unsigned long long block;
    int64_t offset;
    cudaIpcMemHandle_t handle;
    bool can_be_mapped;
  };
  struct Handle {
    cudaIpcMemHandle_t handle;
    bool exists;
  };

  Place place_of(void* address);
  bool map(int rank, const Place& place);
  void close_all() noexcept;
  void warn(int rank, const char* what, cudaError_t error) const;

  MPI_Comm comm_;
  const CudaDriver& driver_;
  const std::string& axis_;
  int rank_ = 0, size_ = 1;
  std::map<unsigned long long, Handle> handles_;  // of own blocks
  std::map<Block, std::byte*> mapped_;            // others' blocks
  // The same on all ranks: blocks that all who should have mapped, and those that one could not map.
  std::set<Block> shared_, refused_;
};

// Whether `here` is true on every rank of `comm`, which all call it.
bool on_all(MPI_Comm comm, bool here);

}  // namespace palimpsest
