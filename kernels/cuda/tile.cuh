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

// unit += A B over kUnitColumns, with A [16, kUnitColumns] another unit, rounded to T, and B along columns.
__device__ inline void multiply_held(Unit& unit, const Unit& a, const bf16* b, int ldb) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto packed = [](const float(&pair)[2]) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(pair[0], pair[1]);
    return *reinterpret_cast<const unsigned*>(&both);
  };
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    // The elements of a result are where those of an operand belong.
    const unsigned a_part[4] = {packed(a.value[4 * step]), packed(a.value[4 * step + 1]), packed(a.value[4 * step + 2]),
                                packed(a.value[4 * step + 3])};
#pragma unroll
    for (int j = 0; j < kUnitColumns; j += 16) {
      unsigned b_part[4];
      load_matrices_transposed(b_part, b + (step * 16 + lane % 16) * ldb + j + lane / 16 * 8);
      multiply_16x8x16(unit.value[j / 4], unit.value[j / 4 + 1], a_part, b_part[0], b_part[1]);
      multiply_16x8x16(unit.value[j / 4 + 2], unit.value[j / 4 + 3], a_part, b_part[2], b_part[3]);
    }
  }
}

__device__ inline void multiply_held(Unit& unit, const Unit& a, const float* b, int ldb) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, column = Unit::column(0);
#pragma unroll
  for (int k = 0; k < kUnitColumns; ++k) {
    const int owner = lane / 4 * 4 + k % 8 / 2;
    const float top = __shfl_sync(kAllLanes, a.value[k / 8 * 2][k % 2], owner);
    const float bottom = __shfl_sync(kAllLanes, a.value[k / 8 * 2 + 1][k % 2], owner);
#pragma unroll
    for (int p = 0; p < Unit::kPairs; p += 2) {
      const float* both = b + k * ldb + column + p / 2 * 8;
      const float left = both[0], right = both[1];
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

// Copies into shared memory that run while the thread goes on: 16 bytes, zeros where `inside` is false, or one f32.
__device__ inline void copy_async(void* to, const void* from, bool inside) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async(float* to, const float* from, bool inside) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(inside ? 4 : 0)
               : "memory");
}
// Ends a group of copies; waits until at most kGroups groups of this thread are under way.
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kGroups = 0>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// to [rows, columns] (rows `ld` apart) = from [n, size], zero outside. columns is a multiple of the pack. The copies
// must be committed and waited for.
template <class T>
__device__ inline void load_tile(T* to, int ld, int rows, int columns, const T* from, int64_t stride, int64_t n,
                                 int64_t size, bool packed) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (packed) {
    constexpr int kPack = kRowPad<T>;
    const int packs = columns / kPack, step = threads / packs, c = thread % packs * kPack;
    if (thread >= step * packs) return;
    for (int row = thread / packs; row < rows; row += step) {
      const bool inside = row < n && c < size;
      copy_async(static_cast<void*>(to + row * ld + c), inside ? from + row * stride + c : from, inside);
    }
    return;
  }
  for (int i = thread; i < rows * columns; i += threads) {
    const int row = i / columns, c = i % columns;
    to[row * ld + c] = row < n && c < size ? from[row * stride + c] : from_f32<T>(0.0F);
  }
}

}  // namespace palimpsest::cuda
