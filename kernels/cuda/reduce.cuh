// Sums over the lanes of a warp and the threads of a block, always in the same order.
#pragma once

#include "kernels/cuda/launch.cuh"

namespace palimpsest::cuda {

// Over each kLanes neighbouring lanes, in all of them.
template <int kLanes = kWarp, class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

// Of all threads of the block, in every thread. `room` [kWarp] lies in shared memory and may be used again at once.
template <class T>
__device__ inline T block_sum(T x, T* room) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) room[warp] = x;
  __syncthreads();
  T sum = 0;
  for (int i = 0; i < num_warps; ++i) sum += room[i];
  return sum;
}

__device__ inline float block_max(float x, float* room) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_max(x);
  __syncthreads();
  if (lane == 0) room[warp] = x;
  __syncthreads();
  float maximum = room[0];
  for (int i = 1; i < num_warps; ++i) maximum = fmaxf(maximum, room[i]);
  return maximum;
}

// total [width] += the rows of sums [count, width] f32, in order. Defined in sums.cu.
void add_rows_to(const Stream& stream, float* total, const float* sums, int64_t count, int64_t width);

}  // namespace palimpsest::cuda
