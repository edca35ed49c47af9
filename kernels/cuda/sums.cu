// The last step of sums that blocks of a grid made in parts: the parts are added in order, so the result depends on
// nothing but the shapes.
//
// Grid: one block for kColumns columns; each of its kSlices rows of threads adds a run of neighbouring parts, then the
// first row of threads adds those.
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kColumns = 32, kSlices = 32;

__global__ void add_rows_kernel(float* total, const float* sums, int64_t count, int64_t width) {
  __shared__ float slices[kSlices][kColumns];
  const int x = static_cast<int>(threadIdx.x) % kColumns, slice = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + x;
  const int64_t each = ceil_div(count, kSlices);
  float sum = 0.0F;
  if (column < width)
#pragma unroll 8
    for (int64_t row = slice * each; row < min((slice + 1) * each, count); ++row) sum += sums[row * width + column];
  slices[slice][x] = sum;
  __syncthreads();
  if (slice != 0 || column >= width) return;
  float all = 0.0F;
  for (int i = 0; i < kSlices; ++i) all += slices[i][x];
  total[column] += all;
}

}  // namespace

void add_rows_to(const Stream& stream, float* total, const float* sums, int64_t count, int64_t width) {
  launch(stream, add_rows_kernel, {.grid_x = ceil_div(width, kColumns), .threads = kColumns * kSlices}, total, sums,
         count, width);
}

}  // namespace palimpsest::cuda
