#include "kernels/router.h"

#include "kernels/adamw.h"
#include "kernels/op_check.h"

namespace palimpsest {

namespace {

void check_routing(const Stream& stream, const Routing& routing, DType dtype, int64_t N, int64_t E) {
  check_operand(stream, "scores", routing.scores, dtype, {N, E});
  check_operand(stream, "experts", routing.experts, DType::kI32, {N, kAnyDim});
  check_operand(stream, "weights", routing.weights, dtype, routing.experts.shape());
}

}  // namespace

void router_forward(Stream& stream, const Routing& routing, const Tensor& logits, const Tensor& bias,
                    const RouterOptions& options) {
  const DType dtype = statistics_dtype(floating_dtype(stream, "logits", logits));
  check_operand(stream, "logits", logits, dtype, {kAnyDim, kAnyDim});
  const int64_t E = logits.dim(1);
  check_routing(stream, routing, dtype, logits.dim(0), E);
  if (bias.defined()) check_operand(stream, "bias", bias, dtype, {E});
  const int64_t k = routing.experts.dim(1);
  CHECK(options.num_groups >= 1 && E % options.num_groups == 0, options.num_groups, " groups of ", E, " experts");
  CHECK(options.top_groups >= 1 && options.top_groups <= options.num_groups, options.top_groups, " of ",
        options.num_groups, " groups");
  CHECK(k >= 1 && k <= options.top_groups * (E / options.num_groups), k, " choices among ", options.top_groups,
        " groups of ", E / options.num_groups);
  PALIMPSEST_DISPATCH(stream, router_forward(stream, routing, logits, bias, options));
}

void router_backward(Stream& stream, Tensor d_logits, const Tensor& d_weights, const Routing& routing,
                     const Tensor& slope, const RouterOptions& options) {
  const DType dtype = statistics_dtype(floating_dtype(stream, "d_logits", d_logits));
  check_operand(stream, "d_logits", d_logits, d_logits.dtype(), {kAnyDim, kAnyDim});
  check_routing(stream, routing, dtype, d_logits.dim(0), d_logits.dim(1));
  check_operand(stream, "d_weights", d_weights, dtype, routing.experts.shape());
  if (slope.defined()) check_operand(stream, "slope", slope, DType::kF64, {d_logits.dim(1)});
  PALIMPSEST_DISPATCH(stream, router_backward(stream, d_logits, d_weights, routing, slope, options));
}

void tally_experts(Stream& stream, Tensor load, Tensor mass, const Tensor& offsets, const Tensor& scores) {
  check_operand(stream, "scores", scores, floating_dtype(stream, "scores", scores), {kAnyDim, kAnyDim});
  const int64_t E = scores.dim(1);
  check_operand(stream, "load", load, DType::kF64, {E});
  if (mass.defined()) check_operand(stream, "mass", mass, DType::kF64, {E});
  check_operand(stream, "offsets", offsets, DType::kI32, {E + 1});
  PALIMPSEST_DISPATCH(stream, tally_experts(stream, load, mass, offsets, scores));
}

void balance_experts(Stream& stream, Tensor sum, Tensor slope, const Tensor& load, const Tensor& mass,
                     const BalanceOptions& options) {
  check_operand(stream, "load", load, DType::kF64, {kAnyDim, kAnyDim});
  check_operand(stream, "mass", mass, DType::kF64, load.shape());
  check_operand(stream, "sum", sum, DType::kF64, {1});
  check_operand(stream, "slope", slope, DType::kF64, {load.dim(1)});
  PALIMPSEST_DISPATCH(stream, balance_experts(stream, sum, slope, load, mass, options));
}

void selection_bias_step(Stream& stream, Tensor bias, const Tensor& load, int64_t first, double speed,
                         const Tensor& control) {
  check_operand(stream, "bias", bias, statistics_dtype(floating_dtype(stream, "bias", bias)), {kAnyDim});
  check_operand(stream, "load", load, DType::kF64, {kAnyDim});
  check_operand(stream, "control", control, DType::kF64, {kStepControlSize});
  CHECK(first >= 0 && first + bias.dim(0) <= load.dim(0), "experts ", first, "+", bias.dim(0), " of ", load.dim(0));
  PALIMPSEST_DISPATCH(stream, selection_bias_step(stream, bias, load, first, speed, control));
}

}  // namespace palimpsest
