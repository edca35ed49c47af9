// Products of matrices in shared memory by one warp, in units of 16 rows by kUnitColumns columns. bf16 operands go
// through the tensor cores (mma.sync, sm_80 and newer); f32 operands are multiplied in f32. Sums are f32 in registers.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

constexpr int kUnitRows = 16, kUnitColumns = 32;

// Elements added to the rows of a matrix in shared memory: rows start on 16 bytes, and the eight rows that a warp reads
// at once lie in different banks.
template <class T>
constexpr int kRowPad = 16 / static_cast<int>(sizeof(T));

// Whether neighbours along the summed dimension are neighbours in memory, or a row apart.
enum class Along : uint8_t { kRow, kColumn };

// The elements of a unit that a lane holds: 4 pairs of neighbours in each of two rows.
struct Unit {
  static constexpr int kPairs = 8;
  float value[kPairs][2] = {};

  // Of pair p, relative to the unit.
  static __device__ int row(int p) { return static_cast<int>(threadIdx.x) % kWarp / 4 + p % 2 * 8; }
  static __device__ int column(int p) { return p / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2; }
};

__device__ inline void load_matrices(unsigned (&m)[4], const bf16* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

__device__ inline void load_matrices_transposed(unsigned (&m)[4], const bf16* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

__device__ inline void multiply_16x8x16(float (&top)[2], float (&bottom)[2], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(top[0]), "+f"(top[1]), "+f"(bottom[0]), "+f"(bottom[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// unit += A B over `depth`, a multiple of 16. A's element (i, k) is a[i * lda + k] along rows, a[k * lda + i] along
// columns; B's element (k, j) is b[j * ldb + k] along rows, b[k * ldb + j] along columns.
template <Along kA, Along kB>
__device__ inline void multiply(Unit& unit, const bf16* a, int lda, const bf16* b, int ldb, int depth) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int low8 = lane % 8, high8 = lane / 16 * 8, middle8 = lane / 8 % 2 * 8, low16 = lane % 16;
  for (int k = 0; k < depth; k += 16) {
    unsigned a_part[4];
    if constexpr (kA == Along::kRow)
      load_matrices(a_part, a + low16 * lda + k + high8);
    else
      load_matrices_transposed(a_part, a + (k + low8 + high8) * lda + middle8);
#pragma unroll
    for (int j = 0; j < kUnitColumns; j += 16) {
      unsigned b_part[4];  // columns j .. j+7: first and second half of k; then columns j+8 .. j+15
      if constexpr (kB == Along::kRow)
        load_matrices(b_part, b + (j + low8 + high8) * ldb + k + middle8);
      else
        load_matrices_transposed(b_part, b + (k + low16) * ldb + j + high8);
      multiply_16x8x16(unit.value[j / 4], unit.value[j / 4 + 1], a_part, b_part[0], b_part[1]);
      multiply_16x8x16(unit.value[j / 4 + 2], unit.value[j / 4 + 3], a_part, b_part[2], b_part[3]);
    }
  }
}

template <Along kA, Along kB>
__device__ inline void multiply(Unit& unit, const float* a, int lda, const float* b, int ldb, int depth) {
  const int row = Unit::row(0), column = Unit::column(0);
  for (int k = 0; k < depth; ++k) {
    const float top = kA == Along::kRow ? a[row * lda + k] : a[k * lda + row];
    const float bottom = kA == Along::kRow ? a[(row + 8) * lda + k] : a[k * lda + row + 8];
#pragma unroll
    for (int p = 0; p < Unit::kPairs; p += 2) {
      const int j = column + p / 2 * 8;
      const float left = kB == Along::kRow ? b[j * ldb + k] : b[k * ldb + j];
      const float right = kB == Along::kRow ? b[(j + 1) * ldb + k] : b[k * ldb + j + 1];
      unit.value[p][0] += top * left;
      unit.value[p][1] += top * right;
      unit.value[p + 1][0] += bottom * left;
      unit.value[p + 1][1] += bottom * right;
    }
  }
}

// Calls body(row, column, value) with value a float[2]: the pair's elements at (row, column) and (row, column + 1).
template <class Body>
__device__ inline void for_each_pair(Unit& unit, int first_row, int first_column, Body body) {
#pragma unroll
  for (int p = 0; p < Unit::kPairs; ++p) body(first_row + Unit::row(p), first_column + Unit::column(p), unit.value[p]);
}

// ---- moving rows between global and shared memory, by the whole block ----

// What load_tile may move in packs: rows of `size` elements that start on 16 bytes.
template <class T>
bool packed_rows(const Rows<T>& rows, int64_t size) {
  return size % kRowPad<T> == 0 && rows.stride % kRowPad<T> == 0 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
}

// to [rows, columns] (rows `ld` apart) = from [n, size], zero outside. columns is a multiple of the pack.
template <class T>
__device__ inline void load_tile(T* to, int ld, int rows, int columns, const T* from, int64_t stride, int64_t n,
                                 int64_t size, bool packed) {
  if (packed) {
    constexpr int kPack = kRowPad<T>;
    const int packs = columns / kPack;
    for (int i = static_cast<int>(threadIdx.x); i < rows * packs; i += static_cast<int>(blockDim.x)) {
      const int row = i / packs, c = i % packs * kPack;
      uint4 pack = {0, 0, 0, 0};
      if (row < n && c < size) pack = *reinterpret_cast<const uint4*>(from + row * stride + c);
      *reinterpret_cast<uint4*>(to + row * ld + c) = pack;
    }
    return;
  }
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += static_cast<int>(blockDim.x)) {
    const int row = i / columns, c = i % columns;
    to[row * ld + c] = row < n && c < size ? from[row * stride + c] : from_f32<T>(0.0F);
  }
}

}  // namespace palimpsest::cuda
