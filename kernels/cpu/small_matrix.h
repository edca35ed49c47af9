// Products, transposes and dot products of small row-major matrices that lie in cache, where a call of a BLAS would
// cost more than the work. Everything runs on vectors of a fixed width and in a fixed order.
#pragma once

#include <cstdint>
#include <utility>

namespace palimpsest::cpu {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

// Elements of a vector. Matrices are padded to a multiple of it.
template <class T>
constexpr int64_t kWidth = kVectorBytes / static_cast<int64_t>(sizeof(T));

template <class T>
constexpr int64_t padded(int64_t size) {
  return (size + kWidth<T> - 1) / kWidth<T> * kWidth<T>;
}

namespace detail {
template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
}  // namespace detail
template <class T>
using Vector = typename detail::VectorOf<T>::Type;

template <class T>
[[gnu::always_inline]] inline void load(Vector<T>& v, const T* p) {
  v = *reinterpret_cast<const typename detail::VectorOf<T>::Unaligned*>(p);
}
template <class T>
[[gnu::always_inline]] inline void store(T* p, const Vector<T>& v) {
  *reinterpret_cast<typename detail::VectorOf<T>::Unaligned*>(p) = v;
}

// Stops the compiler from loading v again at each of its uses.
template <class T>
[[gnu::always_inline]] inline void keep_in_register([[maybe_unused]] Vector<T>& v) {
#if defined(__AVX__)
  asm("" : "+v"(v));
#endif
}

// ---- products ----

// The left operand of a product: element (i, l) is data[i * row_stride + l * depth_stride], so a transposed matrix is
// one with the strides exchanged.
template <class T>
struct Left {
  const T* data;
  int64_t row_stride, depth_stride;
};
template <class T>
Left<T> rows_of(const T* matrix, int64_t ld) {
  return {matrix, ld, 1};
}
template <class T>
Left<T> columns_of(const T* matrix, int64_t ld) {
  return {matrix, 1, ld};
}

// Which part of the left operand can be other than zero: row i has its entries l <= i, or l >= i.
enum class Part : uint8_t { kFull, kLower, kUpper };
enum class Into : uint8_t { kSet, kAdd };

namespace detail {

constexpr int kTileRows = 4;
constexpr int kTileVectors = kVectorBytes == 64 ? 4 : 2;

template <int R, int NV, class T>
[[gnu::always_inline]] inline void product_tile(int64_t begin, int64_t end, T factor, const Left<T>& a,
                                                const T* __restrict b, int64_t ldb, Into into, T* __restrict c,
                                                int64_t ldc) {
  Vector<T> sum[R][NV] = {};
  for (int64_t l = begin; l < end; ++l) {
    Vector<T> right[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
      load(right[n], b + l * ldb + n * kWidth<T>);
      keep_in_register<T>(right[n]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const T left = a.data[i * a.row_stride + l * a.depth_stride];
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[i][n] += left * right[n];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
      T* target = c + i * ldc + n * kWidth<T>;
      Vector<T> value = {};
      if (into == Into::kAdd) load(value, target);
      value += factor * sum[i][n];
      store(target, value);
    }
  }
}

template <Part part, Part result, int R, class T>
[[gnu::always_inline]] inline void product_rows(int64_t i, int64_t n, int64_t k, T factor, const Left<T>& a, const T* b,
                                                int64_t ldb, Into into, T* c, int64_t ldc) {
  const int64_t begin = part == Part::kUpper ? i : 0;
  const int64_t end = part == Part::kLower && i + R < k ? i + R : k;
  const Left<T> rows = {a.data + i * a.row_stride, a.row_stride, a.depth_stride};
  if (result == Part::kLower && padded<T>(i + R) < n) n = padded<T>(i + R);
  T* target = c + i * ldc;
  int64_t j = 0;
  for (; j + kTileVectors * kWidth<T> <= n; j += kTileVectors * kWidth<T>)
    product_tile<R, kTileVectors>(begin, end, factor, rows, b + j, ldb, into, target + j, ldc);
  for (; j < n; j += kWidth<T>) product_tile<R, 1>(begin, end, factor, rows, b + j, ldb, into, target + j, ldc);
}

}  // namespace detail

// C [m, n] = or += factor * A [m, k] B [k, n]; n is a multiple of kWidth. `part` is the part of A that counts, and
// `result` the part of C that is wanted: above it, C may or may not be written.
template <Part part = Part::kFull, Part result = Part::kFull, class T>
[[gnu::noinline]] void product(int64_t m, int64_t n, int64_t k, T factor, Left<T> a, const T* b, int64_t ldb, Into into,
                               T* c, int64_t ldc) {
  int64_t i = 0;
  for (; i + detail::kTileRows <= m; i += detail::kTileRows)
    detail::product_rows<part, result, detail::kTileRows>(i, n, k, factor, a, b, ldb, into, c, ldc);
  static_assert(detail::kTileRows == 4);
  switch (m - i) {
    case 3:
      detail::product_rows<part, result, 3>(i, n, k, factor, a, b, ldb, into, c, ldc);
      break;
    case 2:
      detail::product_rows<part, result, 2>(i, n, k, factor, a, b, ldb, into, c, ldc);
      break;
    case 1:
      detail::product_rows<part, result, 1>(i, n, k, factor, a, b, ldb, into, c, ldc);
      break;
    default:
      break;
  }
}

// ---- transposes ----

namespace detail {

// Exchanges the bit `distance` of the row index with that of the lane index in one pair of rows.
template <int distance, class T, int... lane>
[[gnu::always_inline]] inline void exchange(Vector<T>& a, Vector<T>& b, std::integer_sequence<int, lane...>) {
  constexpr int width = kWidth<T>;
  const Vector<T> first = __builtin_shufflevector(a, b, ((lane & distance) != 0 ? width + lane - distance : lane)...);
  b = __builtin_shufflevector(a, b, ((lane & distance) != 0 ? width + lane : lane + distance)...);
  a = first;
}

template <int distance, class T>
[[gnu::always_inline]] inline void transpose_stages(Vector<T> (&rows)[kWidth<T>]) {
  if constexpr (distance < kWidth<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth<T>; ++i)
      if ((i & distance) == 0)
        exchange<distance, T>(rows[i], rows[i + distance], std::make_integer_sequence<int, kWidth<T>>());
    transpose_stages<distance * 2, T>(rows);
  }
}

}  // namespace detail

template <class T>
[[gnu::always_inline]] inline void transpose_block(Vector<T> (&rows)[kWidth<T>]) {
  detail::transpose_stages<1, T>(rows);
}

// B [columns, rows] = A [rows, columns]^T; both extents are multiples of kWidth.
template <class T>
void transpose(int64_t rows, int64_t columns, const T* __restrict a, int64_t lda, T* __restrict b, int64_t ldb) {
  for (int64_t i = 0; i < rows; i += kWidth<T>) {
    for (int64_t j = 0; j < columns; j += kWidth<T>) {
      Vector<T> block[kWidth<T>];
#pragma GCC unroll 16
      for (int64_t r = 0; r < kWidth<T>; ++r) load(block[r], a + (i + r) * lda + j);
      transpose_block<T>(block);
#pragma GCC unroll 16
      for (int64_t r = 0; r < kWidth<T>; ++r) store(b + (j + r) * ldb + i, block[r]);
    }
  }
}

// ---- dot products ----

// kWidth dot products at once: result[p] = sum over `size` (a multiple of kWidth) of left(p) and right(p), which give
// the addresses of the two rows of pair p.
template <class T, class LeftRow, class RightRow>
[[gnu::always_inline]] inline Vector<T> dots(int64_t size, LeftRow left, RightRow right) {
  Vector<T> sum[kWidth<T>] = {};
  for (int64_t c = 0; c < size; c += kWidth<T>) {
#pragma GCC unroll 16
    for (int p = 0; p < kWidth<T>; ++p) {
      Vector<T> x, y;
      load(x, left(p) + c);
      load(y, right(p) + c);
      sum[p] += x * y;
    }
  }
  transpose_block<T>(sum);
  Vector<T> result = sum[0];
#pragma GCC unroll 16
  for (int p = 1; p < kWidth<T>; ++p) result += sum[p];
  return result;
}

}  // namespace palimpsest::cpu
