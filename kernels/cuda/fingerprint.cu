// A number made of the bits of rows in memory, to tell whether two computations gave the same.
#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/engine.h"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 2112;

// Integers add up to the same in any order. Rows of an even number of bytes.
__global__ void fingerprint_kernel(unsigned long long* sum, const uint16_t* data, int64_t rows, int64_t row_size,
                                   int64_t stride) {
  unsigned long long own = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    for (int64_t i = threadIdx.x; i < row_size; i += kThreads) {
      const unsigned long long place = static_cast<unsigned long long>(row * row_size + i) * 2 + 1;
      own += (place * 0x9e3779b97f4a7c15ULL ^ place >> 7) * data[row * stride + i];
    }
  atomicAdd(sum, own);
}

}  // namespace

void fingerprint(cudaStream_t queue, uint64_t* room, const void* data, int64_t rows, int64_t row_bytes,
                 int64_t stride_bytes) {
  CUDA_CHECK(cudaMemsetAsync(room, 0, sizeof(*room), queue));
  const auto blocks = static_cast<unsigned>(std::min(rows, kMaxBlocks));
  constexpr int64_t kPiece = sizeof(uint16_t);
  fingerprint_kernel<<<blocks, kThreads, 0, queue>>>(reinterpret_cast<unsigned long long*>(room),
                                                     static_cast<const uint16_t*>(data), rows, row_bytes / kPiece,
                                                     stride_bytes / kPiece);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace palimpsest::cuda
