#include "kernels/cpu/blas.h"

#include <cblas.h>

#include <algorithm>
#include <limits>

#include "kernels/check.h"

namespace palimpsest::cpu {

namespace {

CBLAS_TRANSPOSE cblas_of(Transpose transpose) {
  return transpose == Transpose::kYes ? CblasTrans : CblasNoTrans;
}

blasint blas_size(int64_t size) {
  CHECK(size <= std::numeric_limits<blasint>::max(), "matrix extent ", size, " is beyond the BLAS");
  return static_cast<blasint>(size);
}

// CBLAS refuses a leading dimension of 0, which a matrix without columns may have.
blasint blas_stride(int64_t stride) {
  return blas_size(std::max<int64_t>(stride, 1));
}

}  // namespace

void gemm(Transpose transpose_a, Transpose transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
          int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  cblas_sgemm(CblasRowMajor, cblas_of(transpose_a), cblas_of(transpose_b), blas_size(m), blas_size(n), blas_size(k),
              alpha, a, blas_stride(lda), b, blas_stride(ldb), beta, c, blas_stride(ldc));
}

void gemm(Transpose transpose_a, Transpose transpose_b, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
          int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  cblas_dgemm(CblasRowMajor, cblas_of(transpose_a), cblas_of(transpose_b), blas_size(m), blas_size(n), blas_size(k),
              alpha, a, blas_stride(lda), b, blas_stride(ldb), beta, c, blas_stride(ldc));
}

}  // namespace palimpsest::cpu
