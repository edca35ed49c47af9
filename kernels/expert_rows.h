// Tokens as rows sorted by expert, so that each expert's rows are one matrix. Row r belongs to expert e for
// offsets[e] <= r < offsets[e + 1]; an expert's rows are in the order of their tokens. There are always N * k rows,
// however the tokens were routed.
#pragma once

#include "kernels/linear.h"
#include "kernels/stream.h"

namespace palimpsest {

struct ExpertRows {
  Tensor offsets;   // [E + 1] i32
  Tensor row_of;    // [N, k] i32: the row of a token's j-th choice
  Tensor token_of;  // [N * k] i32: the token of a row
};
// All of `rows` overwritten, from experts [N, k] i32 (kernels/router.h).
PALIMPSEST_OP(sort_by_expert, Stream& stream, const ExpertRows& rows, const Tensor& experts);

// rows [R, D] = x [N, D] at token_of [R].
PALIMPSEST_OP(gather_expert_rows, Stream& stream, Tensor rows, const Tensor& x, const Tensor& token_of);
// y [N, D] = the sum of each token's rows at row_of [N, k], or y += ...: the adjoint of the gather, in a fixed order.
PALIMPSEST_OP(sum_expert_rows, Stream& stream, Tensor y, const Tensor& rows, const Tensor& row_of, Write write);

// y [R, F] = x [R, F], each row times its weight: weights [N, k] at row_of [N, k]. y may be x.
PALIMPSEST_OP(scale_expert_rows_forward, Stream& stream, Tensor y, const Tensor& x, const Tensor& weights,
              const Tensor& row_of);
// dx = weight * dy, overwritten (may be dy); d_weights [N, k] = dy . x of the row, overwritten.
PALIMPSEST_OP(scale_expert_rows_backward, Stream& stream, Tensor dx, Tensor d_weights, const Tensor& dy,
              const Tensor& x, const Tensor& weights, const Tensor& row_of);

// Grouped products: each expert's rows with its own matrix, w [E * O, I], expert e's being rows [e * O, (e + 1) * O).
// As in kernels/linear.h, w may be f32 beside bf16 operands, and dw is f32. y [R, O] = x [R, I] w_e^T
PALIMPSEST_OP(grouped_linear_forward, Stream& stream, Tensor y, const Tensor& x, const Tensor& w,
              const Tensor& offsets);
// dx [R, I] = dy [R, O] w_e
PALIMPSEST_OP(grouped_linear_backward_input, Stream& stream, Tensor dx, const Tensor& dy, const Tensor& w,
              const Tensor& offsets);
// dw [E * O, I] += dy^T x of each expert's rows
PALIMPSEST_OP(grouped_linear_backward_weight, Stream& stream, Tensor dw, const Tensor& dy, const Tensor& x,
              const Tensor& offsets);

// The gate of a shared expert, one number a token: y [N, D] = x [N, D] * sigmoid(z [N, 1]). y may be x.
PALIMPSEST_OP(token_gate_forward, Stream& stream, Tensor y, const Tensor& x, const Tensor& z);
// dx = dy * sigmoid(z), overwritten (may be dy); dz [N, 1] = dy . x * sigmoid'(z), overwritten.
PALIMPSEST_OP(token_gate_backward, Stream& stream, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x,
              const Tensor& z);

}  // namespace palimpsest
