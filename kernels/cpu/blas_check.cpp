#include "kernels/cpu/blas_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/linear.h"
#include "kernels/random.h"

namespace palimpsest {

namespace cpu {

namespace {

constexpr int kSize = kBlasCheckSize;

template <class T>
std::vector<T> random_matrix(uint64_t seed) {
  std::vector<T> matrix(kSize * kSize);
  for (size_t i = 0; i < matrix.size(); ++i)
    matrix[i] = static_cast<T>(random_uniform(seed, hash_of("check_blas"), i) - 0.5);
  return matrix;
}

template <class T>
T element(const std::vector<T>& matrix, Transpose transpose, int row, int column) {
  return transpose == Transpose::kYes ? matrix[column * kSize + row] : matrix[row * kSize + column];
}

}  // namespace

template <class T>
void check_product(const std::function<void(Transpose, Transpose, const T* a, const T* b, T* c)>& product) {
  const std::vector<T> a = random_matrix<T>(1), b = random_matrix<T>(2);
  std::vector<T> c(kSize * kSize);
  const std::pair<Transpose, Transpose> used[] = {
      {Transpose::kNo, Transpose::kYes}, {Transpose::kNo, Transpose::kNo}, {Transpose::kYes, Transpose::kNo}};
  for (const auto& [transpose_a, transpose_b] : used) {
    std::fill(c.begin(), c.end(), std::numeric_limits<T>::quiet_NaN());
    product(transpose_a, transpose_b, a.data(), b.data(), c.data());
    for (int i = 0; i < kSize; ++i)
      for (int j = 0; j < kSize; ++j) {
        double expected = 0;
        for (int k = 0; k < kSize; ++k)
          expected += static_cast<double>(element(a, transpose_a, i, k)) * element(b, transpose_b, k, j);
        // The terms are at most 1/4, so rounding stays below this bound and a wrong term far above it.
        const double allowed = 4.0 * kSize * std::numeric_limits<T>::epsilon();
        const double got = c[i * kSize + j];
        if (!(std::fabs(got - expected) <= allowed))
          throw_user_error("the BLAS library computes wrong products on this processor (",
                           sizeof(T) == 4 ? "f32" : "f64", " ", kSize, "x", kSize, ", element ", i, ",", j, " is ", got,
                           ", should be ", expected,
                           "): set the environment variable OPENBLAS_CORETYPE=Haswell or install a newer OpenBLAS");
      }
  }
}

template void check_product<float>(
    const std::function<void(Transpose, Transpose, const float*, const float*, float*)>&);
template void check_product<double>(
    const std::function<void(Transpose, Transpose, const double*, const double*, double*)>&);

namespace {

template <class T>
void check_gemm() {
  check_product<T>([](Transpose transpose_a, Transpose transpose_b, const T* a, const T* b, T* c) {
    gemm(transpose_a, transpose_b, kSize, kSize, kSize, T(1), a, kSize, b, kSize, T(0), c, kSize);
  });
}

}  // namespace

}  // namespace cpu

void check_blas() {
  cpu::check_gemm<float>();
  cpu::check_gemm<double>();
}

}  // namespace palimpsest
