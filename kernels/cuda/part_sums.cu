#include "kernels/cuda/part_sums.h"

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/check.h"
#include "kernels/cuda/engine.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/part_sums.h"

namespace palimpsest::cuda {

namespace {

// Sixteen blocks on each processor of a large GPU: the sums that come between two kernels of a step are soon over.
constexpr int kThreads = 256, kMaxBlocks = 2112;
constexpr int64_t kPiece = 4096;  // elements that a block sums at once
constexpr int kMostParts = 64;    // of a launch, whose parameters are few

// Many parts are small, and a launch for each would cost more than its sum.
struct Part {
  void* out;
  const void* own;
  int64_t offset, numel;
  int64_t first_piece;
  bool is_wide;  // 16 bytes at once fit
};
struct PartList {
  Part parts[kMostParts];
  int size = 0;
  int64_t pieces = 0;
};
struct ReceivedRows {
  const std::byte* rows;
  int64_t row_bytes;
  int own_rank, count;
};

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
__device__ void sum_piece(const Part& part, const ReceivedRows& rows, int64_t begin, int64_t end) {
  T* out = static_cast<T*>(part.out);
#pragma unroll 4
  for (int64_t i = begin + static_cast<int64_t>(threadIdx.x) * kPack; i < end; i += kThreads * kPack) {
    Sum sum[kPack] = {};
    for (int r = 0; r < rows.count; ++r) {
      const std::byte* row = rows.rows + (r < rows.own_rank ? r : r - 1) * rows.row_bytes + part.offset;
      const T* from = r == rows.own_rank ? static_cast<const T*>(part.own) : reinterpret_cast<const T*>(row);
      Sum x[kPack];
      load_sum(from + i, x);
#pragma unroll
      for (int c = 0; c < kPack; ++c) sum[c] = r == 0 ? x[c] : sum[c] + x[c];
    }
    store_sum(out + i, sum);
  }
}

template <class T, class Sum>
__global__ void sum_parts_kernel(const __grid_constant__ PartList list, const __grid_constant__ ReceivedRows rows) {
  int at = 0;
  for (int64_t piece = blockIdx.x; piece < list.pieces; piece += gridDim.x) {
    while (at + 1 < list.size && list.parts[at + 1].first_piece <= piece) ++at;
    const Part& part = list.parts[at];
    const int64_t begin = (piece - part.first_piece) * kPiece, end = min(begin + kPiece, part.numel);
    if (part.is_wide)
      sum_piece<T, Sum, kWidestPack<T>>(part, rows, begin, end);
    else
      sum_piece<T, Sum, 1>(part, rows, begin, end);
  }
}

template <class T, class Sum>
void run(cudaStream_t queue, std::span<const SummedPart> parts, const ReceivedRows& rows) {
  while (!parts.empty()) {
    PartList list;
    for (; !parts.empty() && list.size < kMostParts; parts = parts.subspan(1)) {
      const auto& [out, own, offset] = parts.front();
      const int64_t numel = out.numel();
      if (numel == 0) continue;
      const bool is_wide =
          out.bytes() % 16 == 0 && rows.row_bytes % 16 == 0 && aligned_to(16, {out.raw(), own, rows.rows + offset});
      list.parts[list.size++] = {out.raw(), own, offset, numel, list.pieces, is_wide};
      list.pieces += (numel + kPiece - 1) / kPiece;
    }
    if (list.size == 0) return;
    sum_parts_kernel<T, Sum>
        <<<static_cast<unsigned>(std::min<int64_t>(kMaxBlocks, list.pieces)), kThreads, 0, queue>>>(list, rows);
    CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace

void sum_parts(cudaStream_t queue, std::span<const SummedPart> parts, int own_rank, const void* rows, int64_t row_bytes,
               int count) {
  const ReceivedRows others = {static_cast<const std::byte*>(rows), row_bytes, own_rank, count};
  while (!parts.empty()) {
    const DType dtype = parts.front().out.dtype();
    const auto end =
        std::find_if(parts.begin(), parts.end(), [&](const SummedPart& part) { return part.out.dtype() != dtype; });
    const auto same = parts.first(static_cast<size_t>(end - parts.begin()));
    parts = parts.subspan(same.size());
    switch (dtype) {
      case DType::kF32:
        run<float, float>(queue, same, others);
        break;
      case DType::kF64:
        run<double, double>(queue, same, others);
        break;
      case DType::kBF16:
        run<bf16, float>(queue, same, others);
        break;
      default:
        CHECK(false, "no sum of parts in ", name_of(dtype));
    }
  }
}

void add_parts(Stream& stream, Tensor y, const Tensor& own, const Tensor& others) {
  if (stream.is_planning()) return;
  const SummedPart part = {y, own.raw(), 0};
  const auto count = static_cast<int>(others.dim(0) / own.dim(0)) + 1;
  sum_parts(queue_of(stream), {&part, 1}, 0, others.raw(), own.bytes(), count);
}

}  // namespace palimpsest::cuda
