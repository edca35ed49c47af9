#include "parallel/nccl/cuda_driver.h"

#include "kernels/cuda/check.h"

namespace palimpsest {

namespace {

// Null where the driver has none of this name.
template <class Function>
Function find_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return found ? reinterpret_cast<Function>(function) : nullptr;
}

void check_driver(CUresult result, const char* call) {
  CHECK(result == CUDA_SUCCESS, call, ": CUDA driver error ", static_cast<int>(result));
}

CUdeviceptr address_of(const void* memory) {
  return reinterpret_cast<CUdeviceptr>(memory);
}

// A GPU that could see a flag before what was written ahead of it must be told to wait for that.
bool can_flush_remote_writes() {
  int device = 0, can = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&can, cudaDevAttrCanFlushRemoteWrites, device));
  return can != 0;
}

}  // namespace

CudaDriver::CudaDriver()
    : write_value_(find_function<decltype(write_value_)>("cuStreamWriteValue32")),
      wait_value_(find_function<decltype(wait_value_)>("cuStreamWaitValue32")),
      attribute_(find_function<decltype(attribute_)>("cuPointerGetAttribute")),
      wait_flags_(CU_STREAM_WAIT_VALUE_GEQ) {
  if (can_flush_remote_writes()) wait_flags_ |= CU_STREAM_WAIT_VALUE_FLUSH;
}

void CudaDriver::write_value(cudaStream_t queue, uint32_t* at, uint32_t value) const {
  check_driver(write_value_(queue, address_of(at), value, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
}

void CudaDriver::wait_value(cudaStream_t queue, const uint32_t* at, uint32_t value) const {
  check_driver(wait_value_(queue, address_of(at), value, wait_flags_), "cuStreamWaitValue32");
}

std::optional<PlaceInBlock> CudaDriver::place_of(const void* address) const {
  CUdeviceptr begin = 0;
  PlaceInBlock place = {};
  if (attribute_(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address_of(address)) != CUDA_SUCCESS ||
      attribute_(&place.block, CU_POINTER_ATTRIBUTE_BUFFER_ID, address_of(address)) != CUDA_SUCCESS)
    return std::nullopt;
  place.offset = static_cast<int64_t>(address_of(address) - begin);
  return place;
}

}  // namespace palimpsest
