#include "parallel/nccl/peer_copies.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/check.h"
#include "kernels/cuda/part_sums.h"
#include "parallel/mpi_communicator.h"

namespace palimpsest {

namespace {

// Memory that others map is of whole pages of this size: it shares none with memory that is not theirs to see.
constexpr int64_t kPage = int64_t{2} << 20;
constexpr int64_t kAlignment = 256;
constexpr int64_t kTrialBytes = 4096;

int64_t rounded_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

int64_t bytes_of_parts(std::span<const Parts> tensors) {
  int64_t bytes = 0;
  for (const Parts& tensor : tensors) bytes += rounded_up(tensor.part.bytes(), kAlignment);
  return bytes;
}

// Null when there is not enough.
void* allocate(int64_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) == cudaSuccess) return memory;
  static_cast<void>(cudaGetLastError());
  return nullptr;
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

}  // namespace

const char* PeerCopies::text_of(Obstacle obstacle) {
  switch (obstacle) {
    case Obstacle::kNone:
      return "nothing";
    case Obstacle::kSeveralHosts:
      return "its ranks are on several hosts";
    case Obstacle::kDriver:
      return "a GPU's driver does not have what they take";
    case Obstacle::kNotMapped:
      return "a GPU's memory cannot be mapped by another rank";
    case Obstacle::kNotArrived:
      return "what a rank writes to another's memory does not arrive there";
  }
  return "";
}

PeerCopies::PeerCopies(MPI_Comm comm, const std::string& axis, int64_t least_bytes)
    : comm_(comm),
      least_bytes_(least_bytes),
      mapped_flags_(comm, driver_, axis),
      mapped_staging_(comm, driver_, axis),
      tensors_(comm, driver_, axis) {
  check_mpi(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm, &size_), "MPI_Comm_size");
}

PeerCopies::Made PeerCopies::make(MPI_Comm comm, const std::string& axis, int64_t least_bytes) {
  int size = 1;
  check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  if (!same_host(comm, size)) return {nullptr, Obstacle::kSeveralHosts};
  std::unique_ptr<PeerCopies> copies(new PeerCopies(comm, axis, least_bytes));
  Obstacle obstacle = on_all(comm, copies->driver_.is_complete()) ? copies->map_flags() : Obstacle::kDriver;
  if (obstacle == Obstacle::kNone && !on_all(comm, copies->try_flags())) obstacle = Obstacle::kNotArrived;
  if (obstacle == Obstacle::kNone) return {std::move(copies), obstacle};
  copies->unmap_all();
  return {nullptr, obstacle};
}

PeerCopies::Obstacle PeerCopies::map_flags() {
  flags_.reset(allocate(flag_bytes()));
  if (flags_ != nullptr) {
    CUDA_CHECK(cudaMemset(flags_.get(), 0, static_cast<size_t>(flag_bytes())));
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  void* own = flags_.get();
  flags_of_ = mapped_flags_.addresses_of({&own, 1});
  return flags_of_.empty() ? Obstacle::kNotMapped : Obstacle::kNone;
}

int64_t PeerCopies::flag_bytes() const {
  return rounded_up((size_ + 2) * kTrialBytes, kPage);
}

// The first page of them has the flags; the one of `from` = size_ what this rank writes to others.
std::byte* PeerCopies::trial_place(std::byte* flags, int from) const {
  return flags + (1 + from) * kTrialBytes;
}

bool PeerCopies::try_flags() {
  using Words = std::vector<uint32_t>;
  const auto pattern_of = [](int rank) {
    Words words(kTrialBytes / sizeof(uint32_t));
    for (size_t i = 0; i < words.size(); ++i)
      words[i] = 0x9e3779b9U * static_cast<uint32_t>(i + 1) + static_cast<uint32_t>(rank);
    return words;
  };
  bool possible = true;
  const auto try_call = [&](cudaError_t error) {
    if (error == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    possible = false;
  };
  auto* own = static_cast<std::byte*>(flags_.get());
  std::byte* written = trial_place(own, size_);
  const Words mine = pattern_of(rank_);
  try_call(cudaMemcpy(written, mine.data(), kTrialBytes, cudaMemcpyHostToDevice));
  for_each_other([&](int other) {
    std::byte* there = trial_place(flags_of_[static_cast<size_t>(other)], rank_);
    try_call(cudaMemcpyAsync(there, written, kTrialBytes, cudaMemcpyDeviceToDevice, cudaStreamPerThread));
  });
  try_call(cudaStreamSynchronize(cudaStreamPerThread));
  if (!on_all(comm_, possible)) return false;
  for_each_other([&](int other) {
    Words arrived(mine.size());
    try_call(cudaMemcpy(arrived.data(), trial_place(own, other), kTrialBytes, cudaMemcpyDeviceToHost));
    possible = possible && arrived == pattern_of(other);
  });
  return possible;
}

PeerCopies::~PeerCopies() = default;

void PeerCopies::unmap_all() noexcept {
  mapped_flags_.unmap();
  mapped_staging_.unmap();
  tensors_.unmap();
}

bool PeerCopies::suit_sums(std::span<const Parts> tensors) const {
  return can_sum_ && bytes_of_parts(tensors) >= least_bytes_ &&
         std::all_of(tensors.begin(), tensors.end(), [](const Parts& tensor) {
           const DType dtype = tensor.part.dtype();
           return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16;
         });
}

int64_t PeerCopies::workspace_bytes(std::span<const Parts> tensors) const {
  return suit_sums(tensors) ? rounded_up((size_ - 1) * bytes_of_parts(tensors), kPage) : 0;
}

void PeerCopies::reserve(int64_t workspace_bytes) {
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &workspace_bytes, 1, MPI_INT64_T, MPI_MAX, comm_), "MPI_Allreduce");
  if (workspace_bytes <= staging_bytes_ || !can_sum_) return;
  mapped_staging_.unmap();
  staging_.reset();
  staging_.reset(allocate(workspace_bytes));
  void* own = staging_.get();
  staging_of_ = mapped_staging_.addresses_of({&own, 1});
  can_sum_ = !staging_of_.empty();
  if (!can_sum_) {
    mapped_staging_.unmap();
    staging_.reset();
    workspace_bytes = 0;
  }
  staging_bytes_ = workspace_bytes;
  row_bytes_ = workspace_bytes / (size_ - 1) / kAlignment * kAlignment;
}

void PeerCopies::meet(cudaStream_t queue, Meeting which) {
  auto* own = static_cast<std::byte*>(flags_.get());
  uint32_t* word = own_word(own);
  driver_.write_value(queue, word, collective_);
  for_each_other([&](int other) {
    CUDA_CHECK(cudaMemcpyAsync(flag(flags_of_[static_cast<size_t>(other)], which, rank_), word, sizeof(*word),
                               cudaMemcpyDeviceToDevice, queue));
  });
  for_each_other([&](int other) { driver_.wait_value(queue, flag(own, which, other), collective_); });
}

bool PeerCopies::all_gather(cudaStream_t queue, std::span<const Parts> tensors) {
  if (bytes_of_parts(tensors) < least_bytes_) return false;
  std::vector<void*> wholes;
  for (const Parts& tensor : tensors) wholes.push_back(tensor.whole.raw());
  const std::vector<std::byte*> addresses = tensors_.addresses_of(wholes);
  if (addresses.empty()) return false;
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
  return true;
}

bool PeerCopies::shift(cudaStream_t queue, const Tensor& out, const Tensor& in, int64_t by) {
  if (out.bytes() < least_bytes_) return false;
  void* own = in.raw();
  const std::vector<std::byte*> addresses = tensors_.addresses_of({&own, 1});
  if (addresses.empty()) return false;
  ++collective_;
  CopyList copies;
  copies.add(addresses[static_cast<size_t>((rank_ + by) % size_)], out.raw(), out.bytes());
  meet(queue, Meeting::kBefore);
  copies.start(queue);
  meet(queue, Meeting::kAfter);
  return true;
}

bool PeerCopies::reduce_scatter(cudaStream_t queue, std::span<const Parts> tensors) {
  if (!suit_sums(tensors)) return false;
  const int64_t bytes = bytes_of_parts(tensors);
  CHECK(bytes <= row_bytes_, "a reduce_scatter of ", bytes, " bytes a part, more than any that was rehearsed: there ",
        "is memory for ", row_bytes_);
  ++collective_;
  CopyList copies;
  for_each_other([&](int to) {
    std::byte* there = row_of(to, rank_);
    for (const auto& [whole, part] : tensors) {
      copies.add(there, static_cast<const std::byte*>(whole.raw()) + to * part.bytes(), part.bytes());
      there += rounded_up(part.bytes(), kAlignment);
    }
  });
  meet(queue, Meeting::kBefore);
  copies.start(queue);
  meet(queue, Meeting::kAfter);
  std::vector<cuda::SummedPart> sums;
  int64_t offset = 0;
  for (const auto& [whole, part] : tensors) {
    sums.push_back({part, static_cast<const std::byte*>(whole.raw()) + rank_ * part.bytes(), offset});
    offset += rounded_up(part.bytes(), kAlignment);
  }
  cuda::sum_parts(queue, sums, rank_, staging_.get(), row_bytes_, size_);
  return true;
}

}  // namespace palimpsest
