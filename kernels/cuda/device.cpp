// The device layer on the CUDA runtime.
#include "kernels/device.h"

#include <cstring>

#include "kernels/cuda/check.h"
#include "kernels/cuda/engine.h"

namespace palimpsest {

namespace cuda {

void throw_cuda_failure(const char* file, int line, const char* expression, cudaError_t error) {
  static_cast<void>(cudaGetLastError());  // an error that does no lasting harm is not told again
  detail::throw_check_failure(file, line, expression,
                              detail::concatenate(cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
}

void throw_cublas_failure(const char* file, int line, const char* expression, cublasStatus_t status) {
  detail::throw_check_failure(file, line, expression, cublasLtGetStatusName(status));
}

}  // namespace cuda

namespace {

// A thread begins on GPU 0; what is waited for here, and copied next, is where the tensor lies.
void wait_for_gpu_of(const Tensor& tensor) {
  cudaPointerAttributes attributes = {};
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, tensor.raw()));
  CUDA_CHECK(cudaSetDevice(attributes.device));
  CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace

int num_gpus() {
  int count = 0;
  // Without a driver or a GPU this call fails, which is an answer.
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

void use_gpu(int64_t node_rank) {
  const int count = num_gpus();
  if (count == 0) throw_user_error("there is no GPU, or no driver for it; try device=cpu");
  CUDA_CHECK(cudaSetDevice(static_cast<int>(node_rank % count)));
}

GpuProperties gpu_properties() {
  int device = 0;
  cudaDeviceProp properties = {};
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  char bus_id[32] = {};
  CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device));
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {.name = properties.name,
          .bus_id = bus_id,
          .major = properties.major,
          .minor = properties.minor,
          .num_multiprocessors = properties.multiProcessorCount,
          .memory_bytes = static_cast<int64_t>(total_bytes),
          .free_bytes = static_cast<int64_t>(free_bytes)};
}

std::string take_last_path(const Stream& stream) {
  if (stream.device() == Device::kCpu || stream.is_planning()) return {};
  std::string path = stream.engine().path();
  cuda::note_path(stream, "");
  return path;
}

void synchronize(const Stream& stream) {
  if (stream.device() == Device::kCuda && !stream.is_planning())
    CUDA_CHECK(cudaStreamSynchronize(cuda::queue_of(stream)));
}

void transfer(const Stream& stream, const Tensor& to, const Tensor& from) {
  CHECK(to.dtype() == from.dtype() && to.numel() == from.numel(), "transfer of ", from.str(), " to ", to.str());
  check_contiguous("to", to);
  check_contiguous("from", from);
  if (to.numel() == 0 || stream.is_planning()) return;
  const auto bytes = static_cast<size_t>(from.bytes());
  if (to.device() == Device::kCpu && from.device() == Device::kCpu) {
    std::memcpy(to.raw(), from.raw(), bytes);
    return;
  }
  CUDA_CHECK(cudaMemcpyAsync(to.raw(), from.raw(), bytes, cudaMemcpyDefault, cuda::queue_of(stream)));
  // Pageable host memory is read before the call returns; a copy to it must be waited for.
  if (to.device() == Device::kCpu) CUDA_CHECK(cudaStreamSynchronize(cuda::queue_of(stream)));
}

void copy_to_host(const Tensor& to, const Tensor& from) {
  CHECK(to.dtype() == from.dtype() && to.numel() == from.numel(), "copy of ", from.str(), " to ", to.str());
  check_contiguous("to", to);
  check_contiguous("from", from);
  if (from.numel() == 0) return;
  if (from.device() == Device::kCpu) {
    std::memcpy(to.raw(), from.raw(), static_cast<size_t>(from.bytes()));
    return;
  }
  wait_for_gpu_of(from);
  CUDA_CHECK(cudaMemcpy(to.raw(), from.raw(), static_cast<size_t>(from.bytes()), cudaMemcpyDeviceToHost));
}

PinnedRange::PinnedRange(void* begin, int64_t bytes) : begin_(begin) {
  CUDA_CHECK(cudaHostRegister(begin, static_cast<size_t>(bytes), cudaHostRegisterDefault));
}

PinnedRange::~PinnedRange() {
  cudaHostUnregister(begin_);
}

HostCopy& HostCopy::fetch() {
  if (!memory_.empty()) copy_to_host(tensor_, original_);
  return *this;
}

void HostCopy::store() const {
  if (memory_.empty()) return;
  wait_for_gpu_of(original_);
  CUDA_CHECK(cudaMemcpy(original_.raw(), memory_.data(), memory_.size(), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaDeviceSynchronize());  // the stream of later work does not wait for this copy by itself
}

namespace detail {

// In whole pages: what another process maps has neighbours' memory on none of them.
void* allocate_on_gpu(int64_t bytes) {
  constexpr int64_t kPage = int64_t{2} << 20;
  void* block = nullptr;
  const cudaError_t error = cudaMalloc(&block, static_cast<size_t>((bytes + kPage - 1) / kPage * kPage));
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  CUDA_CHECK(error);
  return block;
}

void free_on_gpu(void* block) noexcept {
  cudaFree(block);
}

}  // namespace detail

}  // namespace palimpsest
