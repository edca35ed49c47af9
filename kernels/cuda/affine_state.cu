// Affine maps of the recurrent state, which are small and few: plain sums do.
#include "kernels/affine_state.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRows = 4;  // of a state, what a block applies a map to

__global__ void affine_identity_kernel(float* maps, int64_t K, int64_t width) {
  const int64_t V = width - K;
  float* map = maps + blockIdx.x * K * width;
  for (int64_t i = threadIdx.x; i < K * width; i += kThreads) map[i] = i % width == V + i / width ? 1.0F : 0.0F;
}

// state [HV, K, V] from before [HV, K, V] and map [HV, K, V + K]. Grid: rows of a state, heads.
__global__ void affine_apply_kernel(float* state, const float* before, const float* map, int64_t K, int64_t V,
                                    bool adjoint) {
  const int64_t head = blockIdx.y, width = V + K, first = static_cast<int64_t>(blockIdx.x) * kRows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), K - first));
  const float* own = map + head * K * width;
  const float* phi = own + V + (adjoint ? first : first * width);  // of the first row
  const int64_t next_row = adjoint ? 1 : width, next = adjoint ? width : 1;
  const float* old = before + head * K * V;
  for (int64_t column = threadIdx.x; column < V; column += blockDim.x) {
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = r < rows ? own[(first + r) * width + column] : 0.0F;
    for (int64_t c = 0; c < K; ++c) {
      const float value = old[c * V + column];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (r < rows) sums[r] += phi[r * next_row + c * next] * value;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < rows) state[(head * K + first + r) * V + column] = sums[r];
  }
}

__global__ void copy_kernel(float* to, const float* from, int64_t count) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads)
    to[i] = from[i];
}

}  // namespace

void affine_identity(Stream& stream, Tensor maps) {
  launch(stream, affine_identity_kernel, {.grid_x = maps.dim(0) * maps.dim(1), .threads = kThreads}, maps.data<float>(),
         maps.dim(2), maps.dim(3));
}

void affine_apply(Stream& stream, Tensor states, const Tensor& map, AffineDirection direction) {
  const Arena::Scope scope(stream.scratch());
  const Tensor before = stream.scratch().allocate(DType::kF32, states.shape());
  launch(stream, copy_kernel, {.grid_x = states.dim(1), .threads = kThreads}, before.data<float>(),
         states.data<float>(), states.numel());
  launch(stream, affine_apply_kernel,
         {.grid_x = ceil_div(states.dim(2), kRows), .grid_y = states.dim(1), .threads = kThreads / 2},
         states.data<float>(), before.data<float>(), map.data<float>(), states.dim(2), states.dim(3),
         direction == AffineDirection::kAdjoint);
}

}  // namespace palimpsest::cuda
