#include "kernels/embedding.h"

#include "kernels/op_check.h"

namespace palimpsest {

void embedding_forward(Stream& stream, Tensor x, const Tensor& tokens, const Tensor& table) {
  const DType dtype = floating_dtype(stream, "table", table);
  check_operand(stream, "table", table, dtype, {kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "tokens", tokens, DType::kI32, {kAnyDim});
  check_operand(stream, "x", x, dtype, {tokens.dim(0), table.dim(1)});
  PALIMPSEST_DISPATCH(stream, embedding_forward(stream, x, tokens, table));
}

void embedding_backward(Stream& stream, Tensor dtable, const Tensor& dx, const Tensor& tokens) {
  const DType dtype = floating_dtype(stream, "dx", dx);
  check_operand(stream, "dx", dx, dtype, {kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "tokens", tokens, DType::kI32, {dx.dim(0)});
  check_operand(stream, "dtable", dtable, statistics_dtype(dtype), {kAnyDim, dx.dim(1)});
  PALIMPSEST_DISPATCH(stream, embedding_backward(stream, dtable, dx, tokens));
}

}  // namespace palimpsest
