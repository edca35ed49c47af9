#include "kernels/cross_entropy.h"

#include "kernels/op_check.h"

namespace palimpsest {

void cross_entropy_stats(Stream& stream, Tensor stats, const Tensor& logits, const Tensor& targets,
                         int64_t vocab_begin) {
  const DType dtype = floating_dtype(stream, "logits", logits);
  check_operand(stream, "logits", logits, dtype, {kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "targets", targets, DType::kI32, {logits.dim(0)});
  check_contiguous_operand(stream, "stats", stats, statistics_dtype(dtype), {logits.dim(0), 3});
  PALIMPSEST_DISPATCH(stream, cross_entropy_stats(stream, stats, logits, targets, vocab_begin));
}

void cross_entropy_merge_stats(Stream& stream, Tensor stats, const Tensor& parts) {
  const DType dtype = floating_dtype(stream, "stats", stats);
  check_contiguous_operand(stream, "stats", stats, dtype, {kAnyDim, 3});
  check_contiguous_operand(stream, "parts", parts, dtype, {kAnyDim, 3});
  CHECK(stats.dim(0) > 0 ? parts.dim(0) % stats.dim(0) == 0 : parts.dim(0) == 0, parts.dim(0), " parts of ",
        stats.dim(0), " rows");
  PALIMPSEST_DISPATCH(stream, cross_entropy_merge_stats(stream, stats, parts));
}

void cross_entropy_loss(Stream& stream, Tensor token_loss, Tensor z_term, const Tensor& stats, const Tensor& targets,
                        double z_loss) {
  const DType dtype = floating_dtype(stream, "stats", stats);
  check_contiguous_operand(stream, "stats", stats, dtype, {kAnyDim, 3});
  check_contiguous_operand(stream, "targets", targets, DType::kI32, {stats.dim(0)});
  check_contiguous_operand(stream, "token_loss", token_loss, dtype, {stats.dim(0)});
  if (z_term.defined()) check_contiguous_operand(stream, "z_term", z_term, dtype, {stats.dim(0)});
  PALIMPSEST_DISPATCH(stream, cross_entropy_loss(stream, token_loss, z_term, stats, targets, z_loss));
}

void cross_entropy_backward(Stream& stream, Tensor logits, const Tensor& stats, const Tensor& targets,
                            int64_t vocab_begin, double z_loss, double grad_scale) {
  const DType dtype = floating_dtype(stream, "logits", logits);
  check_operand(stream, "logits", logits, dtype, {kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "targets", targets, DType::kI32, {logits.dim(0)});
  check_contiguous_operand(stream, "stats", stats, statistics_dtype(dtype), {logits.dim(0), 3});
  PALIMPSEST_DISPATCH(stream, cross_entropy_backward(stream, logits, stats, targets, vocab_begin, z_loss, grad_scale));
}

void sum_into(Stream& stream, Tensor sum, const Tensor& x) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_contiguous_operand(stream, "x", x, dtype, {kAnyDim});
  check_contiguous_operand(stream, "sum", sum, DType::kF64, {1});
  PALIMPSEST_DISPATCH(stream, sum_into(stream, sum, x));
}

}  // namespace palimpsest
