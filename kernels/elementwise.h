// The few element-wise ops that no fused op covers. All shapes equal; rows may be spaced; f32 and f64, on a GPU f32 and
// bf16.
#pragma once

#include <span>

#include "kernels/stream.h"

namespace palimpsest {

PALIMPSEST_OP(fill_zero, Stream& stream, Tensor y);  // y = 0; any dtype on a GPU
// y = x. x may be of the next wider type (f32 beside bf16, f64 beside f32), and is rounded then.
PALIMPSEST_OP(copy, Stream& stream, Tensor y, const Tensor& x);
// The same for many at once, which a GPU does in one go where nothing has gaps.
struct CopyOperands {
  Tensor y, x;
};
PALIMPSEST_OP(copy_all, Stream& stream, std::span<const CopyOperands> operands);
// y = a + b; y may be a or b. a and y may be of the next wider type than b.
PALIMPSEST_OP(add, Stream& stream, Tensor y, const Tensor& a, const Tensor& b);
// y = x * sigmoid(z): the output gate of gated attention. y may be x.
PALIMPSEST_OP(sigmoid_gate_forward, Stream& stream, Tensor y, const Tensor& x, const Tensor& z);
// dx = dy * sigmoid(z) (overwritten, may be dy), dz = dy * x * sigmoid'(z) (overwritten).
PALIMPSEST_OP(sigmoid_gate_backward, Stream& stream, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x,
              const Tensor& z);

}  // namespace palimpsest
