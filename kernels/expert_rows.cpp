#include "kernels/expert_rows.h"

#include "kernels/op_check.h"

namespace palimpsest {

namespace {

// The number of experts; w holds E matrices of O rows.
int64_t check_groups(const Stream& stream, const Tensor& w, int64_t O, const Tensor& offsets) {
  check_operand(stream, "offsets", offsets, DType::kI32, {kAnyDim});
  const int64_t E = offsets.dim(0) - 1;
  CHECK(E >= 1 && w.dim(0) == E * O, "w is ", w.str(), ", expected ", E, " matrices of ", O, " rows");
  return E;
}

void check_row_of(const Stream& stream, const Tensor& row_of, int64_t num_rows) {
  check_operand(stream, "row_of", row_of, DType::kI32, {kAnyDim, kAnyDim});
  CHECK(row_of.numel() == num_rows, "row_of is ", row_of.str(), " for ", num_rows, " rows");
}

}  // namespace

void sort_by_expert(Stream& stream, const ExpertRows& rows, const Tensor& experts) {
  check_operand(stream, "experts", experts, DType::kI32, {kAnyDim, kAnyDim});
  CHECK(experts.numel() <= INT32_MAX, experts.numel(), " rows do not fit 32 bits");
  check_operand(stream, "offsets", rows.offsets, DType::kI32, {kAnyDim});
  check_contiguous_operand(stream, "row_of", rows.row_of, DType::kI32, experts.shape());
  check_operand(stream, "token_of", rows.token_of, DType::kI32, {experts.numel()});
  PALIMPSEST_DISPATCH(stream, sort_by_expert(stream, rows, experts));
}

void gather_expert_rows(Stream& stream, Tensor rows, const Tensor& x, const Tensor& token_of) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_operand(stream, "x", x, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "token_of", token_of, DType::kI32, {kAnyDim});
  check_operand(stream, "rows", rows, dtype, {token_of.dim(0), x.dim(1)});
  PALIMPSEST_DISPATCH(stream, gather_expert_rows(stream, rows, x, token_of));
}

void sum_expert_rows(Stream& stream, Tensor y, const Tensor& rows, const Tensor& row_of, Write write) {
  const DType dtype = floating_dtype(stream, "rows", rows);
  check_operand(stream, "rows", rows, dtype, {kAnyDim, kAnyDim});
  check_row_of(stream, row_of, rows.dim(0));
  check_operand(stream, "y", y, dtype, {row_of.dim(0), rows.dim(1)});
  PALIMPSEST_DISPATCH(stream, sum_expert_rows(stream, y, rows, row_of, write));
}

void scale_expert_rows_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& weights, const Tensor& row_of) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_operand(stream, "x", x, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "y", y, dtype, x.shape());
  check_row_of(stream, row_of, x.dim(0));
  check_operand(stream, "weights", weights, statistics_dtype(dtype), row_of.shape());
  PALIMPSEST_DISPATCH(stream, scale_expert_rows_forward(stream, y, x, weights, row_of));
}

void scale_expert_rows_backward(Stream& stream, Tensor dx, Tensor d_weights, const Tensor& dy, const Tensor& x,
                                const Tensor& weights, const Tensor& row_of) {
  const DType dtype = floating_dtype(stream, "dy", dy);
  check_operand(stream, "dy", dy, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "x", x, dtype, dy.shape());
  check_operand(stream, "dx", dx, dtype, dy.shape());
  check_row_of(stream, row_of, dy.dim(0));
  check_operand(stream, "weights", weights, statistics_dtype(dtype), row_of.shape());
  check_operand(stream, "d_weights", d_weights, statistics_dtype(dtype), row_of.shape());
  PALIMPSEST_DISPATCH(stream, scale_expert_rows_backward(stream, dx, d_weights, dy, x, weights, row_of));
}

void grouped_linear_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& w, const Tensor& offsets) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_operand(stream, "x", x, dtype, {kAnyDim, kAnyDim});
  check_weight(stream, w, dtype, {kAnyDim, x.dim(1)});
  check_operand(stream, "y", y, dtype, {x.dim(0), kAnyDim});
  check_groups(stream, w, y.dim(1), offsets);
  PALIMPSEST_DISPATCH(stream, grouped_linear_forward(stream, y, x, w, offsets));
}

void grouped_linear_backward_input(Stream& stream, Tensor dx, const Tensor& dy, const Tensor& w,
                                   const Tensor& offsets) {
  const DType dtype = floating_dtype(stream, "dy", dy);
  check_operand(stream, "dy", dy, dtype, {kAnyDim, kAnyDim});
  check_weight(stream, w, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "dx", dx, dtype, {dy.dim(0), w.dim(1)});
  check_groups(stream, w, dy.dim(1), offsets);
  PALIMPSEST_DISPATCH(stream, grouped_linear_backward_input(stream, dx, dy, w, offsets));
}

void grouped_linear_backward_weight(Stream& stream, Tensor dw, const Tensor& dy, const Tensor& x,
                                    const Tensor& offsets) {
  const DType dtype = floating_dtype(stream, "dy", dy);
  check_operand(stream, "dy", dy, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "x", x, dtype, {dy.dim(0), kAnyDim});
  check_operand(stream, "dw", dw, statistics_dtype(dtype), {kAnyDim, x.dim(1)});
  check_groups(stream, dw, dy.dim(1), offsets);
  PALIMPSEST_DISPATCH(stream, grouped_linear_backward_weight(stream, dw, dy, x, offsets));
}

void token_gate_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& z) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_operand(stream, "x", x, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "y", y, dtype, x.shape());
  check_operand(stream, "z", z, dtype, {x.dim(0), 1});
  PALIMPSEST_DISPATCH(stream, token_gate_forward(stream, y, x, z));
}

void token_gate_backward(Stream& stream, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z) {
  const DType dtype = floating_dtype(stream, "dy", dy);
  check_operand(stream, "dy", dy, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "x", x, dtype, dy.shape());
  check_operand(stream, "dx", dx, dtype, dy.shape());
  check_operand(stream, "z", z, dtype, {dy.dim(0), 1});
  check_operand(stream, "dz", dz, dtype, z.shape());
  PALIMPSEST_DISPATCH(stream, token_gate_backward(stream, dx, dz, dy, x, z));
}

}  // namespace palimpsest
