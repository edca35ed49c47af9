#include "parallel/nccl/peer_copies.h"

#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/part_sums.h"
#include "parallel/mpi_communicator.h"

namespace palimpsest {

namespace {

// Smaller ones are sooner there by kernels.
constexpr int64_t kLeastBytes = int64_t{512} << 10;
// Blocks that are mapped elsewhere are pages of this size.
constexpr size_t kFlagBytes = size_t{2} << 20;
constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t bytes_of_parts(std::span<const Parts> tensors) {
  int64_t bytes = 0;
  for (const Parts& tensor : tensors) bytes += aligned(tensor.part.bytes());
  return bytes;
}

template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
#else
  CUDA_CHECK(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result));
#endif
  CHECK(result == cudaDriverEntryPointSuccess, "the driver has no ", name);
  return reinterpret_cast<Function>(function);
}

void check_driver(CUresult result, const char* call) {
  CHECK(result == CUDA_SUCCESS, call, ": CUDA driver error ", static_cast<int>(result));
}

CUdeviceptr address_of(const void* memory) {
  return reinterpret_cast<CUdeviceptr>(memory);
}

// Copies that do not depend on each other. Many parameters are small, and a call for each would cost more than the
// copy.
class CopyList {
 public:
  void add(void* to, const void* from, int64_t bytes) {
    if (to == from || bytes == 0) return;
    to_.push_back(to);
    from_.push_back(from);
    bytes_.push_back(static_cast<size_t>(bytes));
  }
  void start(cudaStream_t queue) {
#if CUDART_VERSION >= 13000
    if (to_.size() > 1) {
      cudaMemcpyAttributes attributes = {};
      attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
      size_t first = 0;
      CUDA_CHECK(
          cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), to_.size(), &attributes, &first, 1, queue));
      return;
    }
#endif
    for (size_t i = 0; i < to_.size(); ++i)
      CUDA_CHECK(cudaMemcpyAsync(to_[i], from_[i], bytes_[i], cudaMemcpyDeviceToDevice, queue));
  }

 private:
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> bytes_;
};

bool same_host(MPI_Comm comm, int size) {
  MPI_Comm host = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
  int host_size = 0;
  check_mpi(MPI_Comm_size(host, &host_size), "MPI_Comm_size");
  check_mpi(MPI_Comm_free(&host), "MPI_Comm_free");
  return host_size == size;
}

bool on_all(MPI_Comm comm, bool here) {
  int all = here ? 1 : 0;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, comm), "MPI_Allreduce");
  return all == 1;
}

}  // namespace

struct PeerCopies::Driver {
  decltype(&cuStreamWriteValue32) write_value =
      driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
  decltype(&cuStreamWaitValue32) wait_value = driver_function<decltype(&cuStreamWaitValue32)>("cuStreamWaitValue32");
  decltype(&cuPointerGetAttribute) attribute =
      driver_function<decltype(&cuPointerGetAttribute)>("cuPointerGetAttribute");
};

PeerCopies::PeerCopies(MPI_Comm comm) : comm_(comm), driver_(std::make_unique<Driver>()) {
  check_mpi(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm, &size_), "MPI_Comm_size");
  void* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, kFlagBytes));
  flags_.reset(memory);
  CUDA_CHECK(cudaMemset(memory, 0, kFlagBytes));
  CUDA_CHECK(cudaDeviceSynchronize());
}

std::unique_ptr<PeerCopies> PeerCopies::make(MPI_Comm comm) {
  int size = 1;
  check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  if (size == 1 || !same_host(comm, size)) return nullptr;
  std::unique_ptr<PeerCopies> copies(new PeerCopies(comm));
  if (!on_all(comm, copies->map_flags())) return nullptr;
  return copies;
}

// Whether the others' flags can be mapped: GPUs, drivers and containers differ in what they allow.
bool PeerCopies::map_flags() {
  cudaIpcMemHandle_t own = {};
  bool possible = cudaIpcGetMemHandle(&own, flags_.get()) == cudaSuccess;
  std::vector<cudaIpcMemHandle_t> all(static_cast<size_t>(size_));
  check_mpi(MPI_Allgather(&own, sizeof(own), MPI_BYTE, all.data(), sizeof(own), MPI_BYTE, comm_), "MPI_Allgather");
  possible = on_all(comm_, possible);
  flags_of_.assign(static_cast<size_t>(size_), nullptr);
  flags_of_[static_cast<size_t>(rank_)] = static_cast<std::byte*>(flags_.get());
  for_each_other([&](int other) {
    void* memory = nullptr;
    possible = possible && cudaIpcOpenMemHandle(&memory, all[static_cast<size_t>(other)],
                                                cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    flags_of_[static_cast<size_t>(other)] = static_cast<std::byte*>(memory);
  });
  if (!possible) static_cast<void>(cudaGetLastError());
  return possible;
}

PeerCopies::~PeerCopies() {
  for (const auto& [key, memory] : mapped_) cudaIpcCloseMemHandle(memory);
  for (int other = 0; other < static_cast<int>(flags_of_.size()); ++other)
    if (other != rank_ && flags_of_[static_cast<size_t>(other)] != nullptr)
      cudaIpcCloseMemHandle(flags_of_[static_cast<size_t>(other)]);
}

bool PeerCopies::suit_all_gather(std::span<const Parts> tensors) {
  return bytes_of_parts(tensors) >= kLeastBytes;
}

bool PeerCopies::suit_reduce_scatter(std::span<const Parts> tensors) {
  return bytes_of_parts(tensors) >= kLeastBytes && std::all_of(tensors.begin(), tensors.end(), [](const Parts& tensor) {
           const DType dtype = tensor.part.dtype();
           return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16;
         });
}

bool PeerCopies::suit_shift(const Tensor& out) {
  return out.bytes() >= kLeastBytes;
}

PeerCopies::Place PeerCopies::place_of(void* address) {
  Place place = {};
  CUdeviceptr begin = 0;
  check_driver(driver_->attribute(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address_of(address)),
               "cuPointerGetAttribute");
  check_driver(driver_->attribute(&place.block, CU_POINTER_ATTRIBUTE_BUFFER_ID, address_of(address)),
               "cuPointerGetAttribute");
  place.offset = static_cast<int64_t>(address_of(address) - begin);
  const auto [entry, is_new] = handles_.try_emplace(place.block);
  if (is_new) CUDA_CHECK(cudaIpcGetMemHandle(&entry->second, static_cast<std::byte*>(address) - place.offset));
  place.handle = entry->second;
  return place;
}

std::byte* PeerCopies::mapped(int rank, const Place& place) {
  const auto [entry, is_new] = mapped_.try_emplace({rank, place.block}, nullptr);
  if (is_new) {
    void* memory = nullptr;
    CUDA_CHECK(cudaIpcOpenMemHandle(&memory, place.handle, cudaIpcMemLazyEnablePeerAccess));
    entry->second = static_cast<std::byte*>(memory);
  }
  return entry->second + place.offset;
}

std::vector<std::byte*> PeerCopies::addresses_of(std::span<void* const> own) {
  const size_t count = own.size();
  std::vector<Place> mine(count), all(count * static_cast<size_t>(size_));
  std::transform(own.begin(), own.end(), mine.begin(), [&](void* address) { return place_of(address); });
  const int bytes = static_cast<int>(count * sizeof(Place));
  check_mpi(MPI_Allgather(mine.data(), bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, comm_), "MPI_Allgather");
  std::vector<std::byte*> addresses(all.size());
  for (int rank = 0; rank < size_; ++rank)
    for (size_t i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(rank) * count + i;
      addresses[at] = rank == rank_ ? static_cast<std::byte*>(own[i]) : mapped(rank, all[at]);
    }
  return addresses;
}

void PeerCopies::meet(cudaStream_t queue, Meeting which) {
  uint32_t* word = reinterpret_cast<uint32_t*>(flags_.get()) + 2 * size_;
  check_driver(driver_->write_value(queue, address_of(word), collective_, CU_STREAM_WRITE_VALUE_DEFAULT),
               "cuStreamWriteValue32");
  for_each_other([&](int other) {
    CUDA_CHECK(cudaMemcpyAsync(flag(flags_of_[static_cast<size_t>(other)], which, rank_), word, sizeof(*word),
                               cudaMemcpyDeviceToDevice, queue));
  });
  for_each_other([&](int other) {
    const uint32_t* theirs = flag(static_cast<std::byte*>(flags_.get()), which, other);
    check_driver(driver_->wait_value(queue, address_of(theirs), collective_, CU_STREAM_WAIT_VALUE_GEQ),
                 "cuStreamWaitValue32");
  });
}

void PeerCopies::all_gather(cudaStream_t queue, std::span<const Parts> tensors) {
  std::vector<void*> wholes;
  for (const Parts& tensor : tensors) wholes.push_back(tensor.whole.raw());
  const std::vector<std::byte*> addresses = addresses_of(wholes);
  ++collective_;
  CopyList copies;
  const auto add_copies = [&](int to) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& part = tensors[i].part;
      copies.add(addresses[static_cast<size_t>(to) * tensors.size() + i] + rank_ * part.bytes(), part.raw(),
                 part.bytes());
    }
  };
  for_each_other(add_copies);
  add_copies(rank_);
  meet(queue, Meeting::kBefore);
  copies.start(queue);
  meet(queue, Meeting::kAfter);
}

void PeerCopies::shift(cudaStream_t queue, const Tensor& out, const Tensor& in, int64_t by) {
  void* own = in.raw();
  const std::vector<std::byte*> addresses = addresses_of({&own, 1});
  ++collective_;
  CopyList copies;
  copies.add(addresses[static_cast<size_t>((rank_ + by) % size_)], out.raw(), out.bytes());
  meet(queue, Meeting::kBefore);
  copies.start(queue);
  meet(queue, Meeting::kAfter);
}

void PeerCopies::reduce_scatter(cudaStream_t queue, std::span<const Parts> tensors) {
  reserve_staging(queue, bytes_of_parts(tensors));
  ++collective_;
  // Every rank has a row for each of the others.
  const auto row_of = [&](int rank, int from) {
    return staging_of_[static_cast<size_t>(rank)] + from * staging_bytes_;
  };
  CopyList copies;
  for_each_other([&](int to) {
    std::byte* there = row_of(to, rank_);
    for (const auto& [whole, part] : tensors) {
      copies.add(there, static_cast<const std::byte*>(whole.raw()) + to * part.bytes(), part.bytes());
      there += aligned(part.bytes());
    }
  });
  meet(queue, Meeting::kBefore);
  copies.start(queue);
  meet(queue, Meeting::kAfter);
  int64_t offset = 0;
  for (const auto& [whole, part] : tensors) {
    cuda::sum_parts(queue, part, static_cast<const std::byte*>(whole.raw()) + rank_ * part.bytes(), rank_,
                    row_of(rank_, 0) + offset, staging_bytes_, size_);
    offset += aligned(part.bytes());
  }
}

// Grows in the same calls on all ranks. Nobody uses the old memory any more when all of them are here.
void PeerCopies::reserve_staging(cudaStream_t queue, int64_t bytes) {
  if (bytes <= staging_bytes_) return;
  CUDA_CHECK(cudaStreamSynchronize(queue));
  check_mpi(MPI_Barrier(comm_), "MPI_Barrier");
  for (auto entry = mapped_.begin(); entry != mapped_.end();) {
    const auto [rank, block] = entry->first;
    const bool is_staging = staging_ != nullptr && entry->second == staging_of_[static_cast<size_t>(rank)];
    if (is_staging) CUDA_CHECK(cudaIpcCloseMemHandle(entry->second));
    entry = is_staging ? mapped_.erase(entry) : std::next(entry);
  }
  check_mpi(MPI_Barrier(comm_), "MPI_Barrier");
  staging_.reset();
  void* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(bytes * size_)));
  staging_.reset(memory);
  staging_bytes_ = bytes;
  staging_of_ = addresses_of({&memory, 1});
}

}  // namespace palimpsest
