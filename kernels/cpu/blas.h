// Matrix products through the BLAS, row-major. Inside a parallel region a product runs on the calling thread.
#pragma once

#include <cstdint>

namespace palimpsest::cpu {

enum class Transpose : bool { kNo, kYes };

// c [m, n] = alpha * op(a) [m, k] * op(b) [k, n] + beta * c, where op transposes or not. ld: elements from one row of
// the stored matrix to the next. beta = 0 overwrites c whatever it held.
void gemm(Transpose transpose_a, Transpose transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
          int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);
void gemm(Transpose transpose_a, Transpose transpose_b, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
          int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc);

}  // namespace palimpsest::cpu
