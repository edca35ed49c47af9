// Linear maps: y = x W^T with W stored [out, in], as in the public checkpoints.
//
// All matrices may have spaced rows (Tensor::row_stride), so that stacked projections and row ranges of stacked weights
// work without copies. f32 and f64 on the CPU (BLAS), f32 and bf16 on a GPU (cuBLASLt, sums in f32; f32 products are
// f32 products). Beside bf16 operands w may be f32: it is rounded first; dw is f32.
#pragma once

#include "kernels/stream.h"
#include "kernels/write.h"

namespace palimpsest {

// y [N, O] = x [N, I] w[O, I]^T, or y += ... with kAccumulate. Beside bf16 operands y may be f32: the sums as they are.
PALIMPSEST_OP(linear_forward, Stream& stream, Tensor y, const Tensor& x, const Tensor& w, Write write);
// dx [N, I] = dy [N, O] w [O, I], or dx += ...
PALIMPSEST_OP(linear_backward_input, Stream& stream, Tensor dx, const Tensor& dy, const Tensor& w, Write write);
// dw [O, I] += dy [N, O]^T x [N, I]. Gradients of weights always accumulate.
PALIMPSEST_OP(linear_backward_weight, Stream& stream, Tensor dw, const Tensor& dy, const Tensor& x);

// w [O, I] in the operands' dtype: itself, or rounded in scratch memory. For who multiplies by it several times.
Tensor rounded_weight(Stream& stream, const Tensor& w, DType dtype);

// Multiplies two 96 x 96 matrices with the BLAS and with a plain loop, in f32 and f64. Some old OpenBLAS releases
// compute wrong products on processors they do not know; a mismatch throws a UserError that names OPENBLAS_CORETYPE.
void check_blas();

}  // namespace palimpsest
