// A product of 96 x 96 matrices against a plain loop, see check_blas in kernels/linear.h.
#pragma once

#include <functional>

#include "kernels/cpu/blas.h"

namespace palimpsest::cpu {

constexpr int kBlasCheckSize = 96;

// product(transpose_a, transpose_b, a, b, c) must set c = op(a) op(b), all [96, 96], for the three combinations that
// linear layers use. Throws a UserError that names OPENBLAS_CORETYPE when it does not.
template <class T>
void check_product(const std::function<void(Transpose, Transpose, const T* a, const T* b, T* c)>& product);

}  // namespace palimpsest::cpu
