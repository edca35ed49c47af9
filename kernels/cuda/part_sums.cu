#include "kernels/cuda/part_sums.h"

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/check.h"
#include "kernels/cuda/engine.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/part_sums.h"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 256, kMaxBlocks = 528;  // four on each processor of a large GPU

template <int kPack>
__device__ void load_sum(const double* from, double (&x)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) x[i] = from[i];
}
template <int kPack, class T>
__device__ void load_sum(const T* from, float (&x)[kPack]) {
  load(from, x);
}
template <int kPack>
__device__ void store_sum(double* to, const double (&x)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) to[i] = x[i];
}
template <int kPack, class T>
__device__ void store_sum(T* to, const float (&x)[kPack]) {
  store(to, x);
}

template <class T, class Sum, int kPack>
__global__ void sum_parts_kernel(T* out, const T* own, int own_rank, const std::byte* rows, int64_t row_bytes,
                                 int count, int64_t n) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kPack;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack; i < n; i += step) {
    Sum sum[kPack] = {};
    for (int r = 0; r < count; ++r) {
      const T* from = r == own_rank ? own : reinterpret_cast<const T*>(rows + (r < own_rank ? r : r - 1) * row_bytes);
      Sum x[kPack];
      load_sum(from + i, x);
#pragma unroll
      for (int c = 0; c < kPack; ++c) sum[c] = r == 0 ? x[c] : sum[c] + x[c];
    }
    store_sum(out + i, sum);
  }
}

template <class T, class Sum>
void run(cudaStream_t queue, const Tensor& out, const void* own, int own_rank, const void* rows, int64_t row_bytes,
         int count) {
  constexpr int kWide = kWidestPack<T>;
  const int64_t n = out.numel();
  const bool fits = n % kWide == 0 && row_bytes % 16 == 0 && aligned_to(16, {out.raw(), own, rows});
  const auto with_pack = [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t blocks = std::min<int64_t>(kMaxBlocks, (n + kThreads * kPack - 1) / (kThreads * kPack));
    sum_parts_kernel<T, Sum, kPack><<<static_cast<unsigned>(blocks), kThreads, 0, queue>>>(
        static_cast<T*>(out.raw()), static_cast<const T*>(own), own_rank, static_cast<const std::byte*>(rows),
        row_bytes, count, n);
    CUDA_CHECK(cudaGetLastError());
  };
  if (fits)
    with_pack(std::integral_constant<int, kWide>{});
  else
    with_pack(std::integral_constant<int, 1>{});
}

}  // namespace

void sum_parts(cudaStream_t queue, const Tensor& out, const void* own, int own_rank, const void* rows,
               int64_t row_bytes, int count) {
  if (out.numel() == 0) return;
  switch (out.dtype()) {
    case DType::kF32:
      return run<float, float>(queue, out, own, own_rank, rows, row_bytes, count);
    case DType::kF64:
      return run<double, double>(queue, out, own, own_rank, rows, row_bytes, count);
    case DType::kBF16:
      return run<bf16, float>(queue, out, own, own_rank, rows, row_bytes, count);
    default:
      CHECK(false, "no sum of parts in ", name_of(out.dtype()));
  }
}

void add_parts(Stream& stream, Tensor y, const Tensor& own, const Tensor& others) {
  if (stream.is_planning()) return;
  const auto count = static_cast<int>(others.dim(0) / own.dim(0)) + 1;
  sum_parts(queue_of(stream), y, own.raw(), 0, others.raw(), own.bytes(), count);
}

}  // namespace palimpsest::cuda
