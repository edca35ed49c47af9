// Checks of what CUDA and its libraries return.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include "kernels/check.h"

namespace palimpsest::cuda {

[[noreturn]] void throw_cuda_failure(const char* file, int line, const char* expression, cudaError_t error);
[[noreturn]] void throw_cublas_failure(const char* file, int line, const char* expression, cublasStatus_t status);

}  // namespace palimpsest::cuda

#define CUDA_CHECK(call)                                                                   \
  do {                                                                                     \
    const cudaError_t cuda_check_error = (call);                                           \
    if (cuda_check_error != cudaSuccess) [[unlikely]]                                      \
      ::palimpsest::cuda::throw_cuda_failure(__FILE__, __LINE__, #call, cuda_check_error); \
  } while (false)

#define CUBLAS_CHECK(call)                                                                      \
  do {                                                                                          \
    const cublasStatus_t cublas_check_status = (call);                                          \
    if (cublas_check_status != CUBLAS_STATUS_SUCCESS) [[unlikely]]                              \
      ::palimpsest::cuda::throw_cublas_failure(__FILE__, __LINE__, #call, cublas_check_status); \
  } while (false)
