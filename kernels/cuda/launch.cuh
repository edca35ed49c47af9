// Launching kernels: on the stream's queue, checked, and not at all when the stream is planning.
#pragma once

#include "kernels/cuda/check.h"
#include "kernels/cuda/engine.h"

namespace palimpsest::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int64_t kDefaultSharedBytes = 48 * 1024;  // what a kernel gets without asking

struct LaunchShape {
  int64_t grid_x = 1, grid_y = 1;
  int threads = 256;
  int64_t shared_bytes = 0;  // dynamic shared memory of a block
};

// An empty grid is no work.
template <class... Parameters, class... Arguments>
void launch(const Stream& stream, void (*kernel)(Parameters...), const LaunchShape& shape, Arguments... arguments) {
  if (stream.is_planning() || shape.grid_x == 0 || shape.grid_y == 0) return;
  if (shape.shared_bytes > kDefaultSharedBytes)
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)));
  const dim3 grid(static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y));
  kernel<<<grid, static_cast<unsigned>(shape.threads), static_cast<size_t>(shape.shared_bytes), queue_of(stream)>>>(
      static_cast<Parameters>(arguments)...);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace palimpsest::cuda
