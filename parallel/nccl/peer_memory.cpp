#include "parallel/nccl/peer_memory.h"

#include <algorithm>
#include <cstdio>

#include "parallel/mpi_communicator.h"

namespace palimpsest {

bool on_all(MPI_Comm comm, bool here) {
  int all = here ? 1 : 0;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, comm), "MPI_Allreduce");
  return all == 1;
}

PeerMemory::PeerMemory(MPI_Comm comm, const CudaDriver& driver, const std::string& axis)
    : comm_(comm), driver_(driver), axis_(axis) {
  check_mpi(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm, &size_), "MPI_Comm_size");
}

PeerMemory::~PeerMemory() {
  close_all();
}

PeerMemory::Place PeerMemory::place_of(void* address) {
  Place place = {};
  const std::optional<PlaceInBlock> found = driver_.place_of(address);
  if (!found) return place;
  place.block = found->block;
  place.offset = found->offset;
  const auto [entry, is_new] = handles_.try_emplace(place.block);
  if (is_new) {
    const cudaError_t error =
        cudaIpcGetMemHandle(&entry->second.handle, static_cast<std::byte*>(address) - place.offset);
    entry->second.exists = error == cudaSuccess;
    if (error != cudaSuccess) warn(rank_, "others cannot map the memory", error);
  }
  place.handle = entry->second.handle;
  place.can_be_mapped = entry->second.exists;
  return place;
}

bool PeerMemory::map(int rank, const Place& place) {
  const auto [entry, is_new] = mapped_.try_emplace({rank, place.block}, nullptr);
  if (!is_new) return true;
  void* memory = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&memory, place.handle, cudaIpcMemLazyEnablePeerAccess);
  if (error == cudaSuccess) {
    entry->second = static_cast<std::byte*>(memory);
    return true;
  }
  mapped_.erase(entry);
  warn(rank, "cannot map the memory", error);
  return false;
}

std::vector<std::byte*> PeerMemory::addresses_of(std::span<void* const> own) {
  const size_t count = own.size();
  std::vector<Place> mine(count), all(count * static_cast<size_t>(size_));
  std::transform(own.begin(), own.end(), mine.begin(), [&](void* address) { return place_of(address); });
  const int bytes = static_cast<int>(count * sizeof(Place));
  check_mpi(MPI_Allgather(mine.data(), bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, comm_), "MPI_Allgather");
  // What follows is decided by what all ranks have got, in the same way on each.
  std::set<Block> added;
  for (size_t i = 0; i < all.size(); ++i) {
    const Block block = {static_cast<int>(i / count), all[i].block};
    if (!all[i].can_be_mapped || refused_.contains(block)) return {};
    if (!shared_.contains(block)) added.insert(block);
  }
  if (!added.empty()) {
    bool possible = true;
    for (size_t i = 0; i < all.size(); ++i) {
      const int rank = static_cast<int>(i / count);
      if (rank != rank_ && added.contains({rank, all[i].block})) possible = possible && map(rank, all[i]);
    }
    const bool agreed = on_all(comm_, possible);
    (agreed ? shared_ : refused_).merge(added);
    if (!agreed) return {};
  }
  std::vector<std::byte*> addresses(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const int rank = static_cast<int>(i / count);
    addresses[i] =
        rank == rank_ ? static_cast<std::byte*>(own[i % count]) : mapped_.at({rank, all[i].block}) + all[i].offset;
  }
  return addresses;
}

void PeerMemory::unmap() noexcept {
  close_all();
  shared_.clear();
  refused_.clear();
  handles_.clear();
  MPI_Barrier(comm_);
}

void PeerMemory::close_all() noexcept {
  for (const auto& [block, memory] : mapped_) cudaIpcCloseMemHandle(memory);
  mapped_.clear();
}

// The job goes on without.
void PeerMemory::warn(int rank, const char* what, cudaError_t error) const {
  static_cast<void>(cudaGetLastError());
  std::fprintf(stderr, "warning: axis %s, rank %d: %s of rank %d, which goes by NCCL: %s\n", axis_.c_str(), rank_, what,
               rank, cudaGetErrorString(error));
}

}  // namespace palimpsest
