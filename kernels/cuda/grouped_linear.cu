// Products of each expert's rows with its own matrix. How many rows an expert has is known on the GPU alone: a block
// finds its expert from its number, and the host never asks.
//
// A block of 8 warps makes a tile [kTile, kTile] of a result; a warp's part of it is [64, 32]. Both operands come
// kDepth of the summed dimension at a time, copied asynchronously kStages - 1 steps ahead. bf16 goes through the tensor
// cores (mma.sync), f32 is multiplied in f32; sums are f32 in registers.
//
//   forward, backward input    grid: slots of kTile rows of an expert x tiles of columns. Tile t of the expert whose
//                              rows begin at b has slot b / kTile + e + t; some slots stay empty.
//   backward weight            grid: experts x tiles of the matrix; the sum goes over the expert's rows
#include "kernels/cuda/tile.cuh"
#include "kernels/expert_rows.h"

namespace palimpsest::cuda {

namespace {

constexpr int kTile = 128, kDepth = 32, kStages = 3, kThreads = 256;
constexpr int kWarpUnits = 4;                                                           // a warp's rows
constexpr int kWarpRows = kWarpUnits * kUnitRows, kWarpsAcross = kTile / kUnitColumns;  // warps side by side
static_assert(kTile / kWarpRows * kWarpsAcross == kThreads / kWarp);

// One operand [kTile, kDepth], or its transpose, as it lies in memory.
template <class T, Along kAlong>
struct Operand {
  static constexpr bool kIsRow = kAlong == Along::kRow;
  static constexpr int kRowSize = (kIsRow ? kDepth : kTile) + kRowPad<T>;
  static constexpr int kElements = (kIsRow ? kTile : kDepth) * kRowSize;

  const T* data;   // element (0, 0)
  int64_t stride;  // of its rows
  int64_t rows;    // of the tile that there are, from data on
  bool packed;

  // Starts copying the part [.., k .. k + kDepth) of `depth`.
  __device__ void copy(T* to, int64_t k, int64_t depth) const {
    if constexpr (kIsRow)
      load_tile(to, kRowSize, kTile, kDepth, data + k, stride, rows, depth - k, packed);
    else
      load_tile(to, kRowSize, kDepth, kTile, data + k * stride, stride, depth - k, rows, packed);
  }
};

// units [16 kWarpUnits, 32] += A B of one step; a and b begin at the warp's rows and columns.
template <Along kA, Along kB>
__device__ inline void multiply_step(Unit (&units)[kWarpUnits], const bf16* a, int lda, const bf16* b, int ldb) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int low8 = lane % 8, high8 = lane / 16 * 8, middle8 = lane / 8 % 2 * 8, low16 = lane % 16;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    unsigned b_part[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kB == Along::kRow)
        load_matrices(b_part[half], b + (16 * half + low8 + high8) * ldb + k + middle8);
      else
        load_matrices_transposed(b_part[half], b + (k + low16) * ldb + 16 * half + high8);
    }
#pragma unroll
    for (int i = 0; i < kWarpUnits; ++i) {
      unsigned a_part[4];
      if constexpr (kA == Along::kRow)
        load_matrices(a_part, a + (i * kUnitRows + low16) * lda + k + high8);
      else
        load_matrices_transposed(a_part, a + (k + low8 + high8) * lda + i * kUnitRows + middle8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(*value)[2] = units[i].value + 4 * half;
        multiply_16x8x16(value[0], value[1], a_part, b_part[half][0], b_part[half][1]);
        multiply_16x8x16(value[2], value[3], a_part, b_part[half][2], b_part[half][3]);
      }
    }
  }
}

template <Along kA, Along kB>
__device__ inline void multiply_step(Unit (&units)[kWarpUnits], const float* a, int lda, const float* b, int ldb) {
  const int row = Unit::row(0), column = Unit::column(0);
  for (int k = 0; k < kDepth; ++k) {
    float left[kWarpUnits][2], right[Unit::kPairs / 2][2];
#pragma unroll
    for (int i = 0; i < kWarpUnits; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = i * kUnitRows + row + 8 * half;
        left[i][half] = kA == Along::kRow ? a[m * lda + k] : a[k * lda + m];
      }
#pragma unroll
    for (int j = 0; j < Unit::kPairs / 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int n = column + 8 * j + e;
        right[j][e] = kB == Along::kRow ? b[n * ldb + k] : b[k * ldb + n];
      }
#pragma unroll
    for (int i = 0; i < kWarpUnits; ++i)
#pragma unroll
      for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
        for (int e = 0; e < 2; ++e) units[i].value[pair][e] += left[i][pair % 2] * right[pair / 2][e];
  }
}

template <class T, Along kA, Along kB>
constexpr int64_t kSharedBytes = int64_t{kStages} * (Operand<T, kA>::kElements + Operand<T, kB>::kElements) *
                                 static_cast<int64_t>(sizeof(T));

// The block's tile: body(row, column, value) for its elements that there are.
template <class T, Along kA, Along kB, class Body>
__device__ inline void multiply_tile(const Operand<T, kA>& a, const Operand<T, kB>& b, int64_t depth, Body body) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kStage = Operand<T, kA>::kElements + Operand<T, kB>::kElements;
  T* const stages = reinterpret_cast<T*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first_row = warp / kWarpsAcross * kWarpRows, first_column = warp % kWarpsAcross * kUnitColumns;
  const int64_t steps = ceil_div(depth, kDepth);
  const auto copy = [&](int64_t step) {
    if (step < steps) {
      T* const to = stages + step % kStages * kStage;
      a.copy(to, step * kDepth, depth);
      b.copy(to + Operand<T, kA>::kElements, step * kDepth, depth);
    }
    commit_copies();  // an empty group past the end, so that their number is that of the steps
  };
  Unit units[kWarpUnits];
  for (int step = 0; step + 1 < kStages; ++step) copy(step);
  for (int64_t step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the step's operands are there, and nobody reads those of the step before
    copy(step + kStages - 1);
    const T *from_a = stages + step % kStages * kStage, *from_b = from_a + Operand<T, kA>::kElements;
    constexpr int kLda = Operand<T, kA>::kRowSize, kLdb = Operand<T, kB>::kRowSize;
    multiply_step<kA, kB>(units, from_a + (Operand<T, kA>::kIsRow ? first_row * kLda : first_row), kLda,
                          from_b + (Operand<T, kB>::kIsRow ? first_column * kLdb : first_column), kLdb);
  }
#pragma unroll
  for (int i = 0; i < kWarpUnits; ++i)
    for_each_pair(units[i], first_row + i * kUnitRows, first_column, [&](int row, int column, const float(&value)[2]) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (row < a.rows && column + e < b.rows) body(row, column + e, value[e]);
    });
}

// y [R, O] = x [R, I] with each expert's matrix: w_e [O, I] along rows, or [I, O] along columns.
template <class T, Along kB>
__global__ void __launch_bounds__(kThreads)
    grouped_rows_kernel(Rows<T> y, Rows<T> x, Rows<T> w, const int32_t* offsets, int64_t E, int64_t O, int64_t I,
                        bool x_packed, bool w_packed) {
  const int64_t tiles = ceil_div(O, kTile), slot = blockIdx.x / tiles, first_column = blockIdx.x % tiles * kTile;
  int64_t low = 0, high = E - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (offsets[middle] / kTile + middle <= slot)
      low = middle;
    else
      high = middle - 1;
  }
  const int64_t first = offsets[low] + (slot - offsets[low] / kTile - low) * kTile, rows = offsets[low + 1] - first;
  if (rows <= 0) return;
  const T* matrix = kB == Along::kRow ? w[low * O + first_column] : w[low * I] + first_column;
  multiply_tile(Operand<T, Along::kRow>{x[first], x.stride, rows, x_packed},
                Operand<T, kB>{matrix, w.stride, O - first_column, w_packed}, I,
                [&](int row, int column, float value) { y[first + row][first_column + column] = from_f32<T>(value); });
}

// dw_e [O, I] += dy^T x over the expert's rows.
template <class T>
__global__ void __launch_bounds__(kThreads)
    grouped_weight_kernel(Rows<float> dw, Rows<T> dy, Rows<T> x, const int32_t* offsets, int64_t O, int64_t I,
                          bool dy_packed, bool x_packed) {
  const int64_t across = ceil_div(I, kTile), tiles = across * ceil_div(O, kTile), e = blockIdx.x / tiles;
  const int64_t first_row = blockIdx.x % tiles / across * kTile, first_column = blockIdx.x % across * kTile;
  const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
  if (rows == 0) return;
  multiply_tile(Operand<T, Along::kColumn>{dy[begin] + first_row, dy.stride, O - first_row, dy_packed},
                Operand<T, Along::kColumn>{x[begin] + first_column, x.stride, I - first_column, x_packed}, rows,
                [&](int row, int column, float value) { dw[e * O + first_row + row][first_column + column] += value; });
}

// y [R, O] from x [R, I]; kB as w lies.
template <Along kB>
void multiply_rows(Stream& stream, const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& offsets) {
  const Arena::Scope scope(stream.scratch());
  const Tensor weight = rounded_weight(stream, w, x.dtype());
  const int64_t E = offsets.dim(0) - 1, O = y.dim(1), I = x.dim(1);
  with_float(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> in(x), matrices(weight);
    launch(stream, grouped_rows_kernel<T, kB>,
           {.grid_x = (x.dim(0) / kTile + E) * ceil_div(O, kTile),
            .threads = kThreads,
            .shared_bytes = kSharedBytes<T, Along::kRow, kB>},
           Rows<T>(y), in, matrices, offsets.data<int32_t>(), E, O, I, packed_rows(in, I),
           packed_rows(matrices, weight.dim(1)));
  });
}

}  // namespace

void grouped_linear_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& w, const Tensor& offsets) {
  multiply_rows<Along::kRow>(stream, y, x, w, offsets);
}

void grouped_linear_backward_input(Stream& stream, Tensor dx, const Tensor& dy, const Tensor& w,
                                   const Tensor& offsets) {
  multiply_rows<Along::kColumn>(stream, dx, dy, w, offsets);
}

void grouped_linear_backward_weight(Stream& stream, Tensor dw, const Tensor& dy, const Tensor& x,
                                    const Tensor& offsets) {
  const int64_t E = offsets.dim(0) - 1, O = dy.dim(1), I = x.dim(1);
  with_float(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> gradient(dy), in(x);
    launch(stream, grouped_weight_kernel<T>,
           {.grid_x = E * ceil_div(O, kTile) * ceil_div(I, kTile),
            .threads = kThreads,
            .shared_bytes = kSharedBytes<T, Along::kColumn, Along::kColumn>},
           Rows<float>(dw), gradient, in, offsets.data<int32_t>(), O, I, packed_rows(gradient, O), packed_rows(in, I));
  });
}

}  // namespace palimpsest::cuda
