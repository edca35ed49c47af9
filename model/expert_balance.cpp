#include "model/expert_balance.h"

#include "kernels/elementwise.h"

namespace palimpsest {

ExpertBalance::ExpertBalance(Context& context, const MoeConfig& config, int64_t num_layers)
    : context_(context), config_(config), num_layers_(num_layers) {
  if (num_layers == 0) return;
  const Shape shape = {num_layers, config.num_experts};
  tally_.load = context.activations.allocate(DType::kF64, shape);
  fill_zero(context.stream, tally_.load);
  if (config.router_aux_loss_coef > 0) {
    tally_.mass = context.activations.allocate(DType::kF64, shape);
    tally_.slope = context.activations.allocate(DType::kF64, {config.num_experts});
    fill_zero(context.stream, tally_.mass);
  }
  context.experts = &tally_;
}

void ExpertBalance::finish_forward(Tensor sum, Tensor step_load, double grad_scale) {
  if (num_layers_ == 0) return;
  Stream& stream = context_.stream;
  if (step_load.defined()) add(stream, step_load, step_load, tally_.load);
  if (!tally_.slope.defined()) return;
  context_.mesh.replica().all_reduce(stream, tally_.load, ReduceOp::kSum);
  // Every tensor rank routes all tokens, and their gradients of the router are summed.
  const double share = grad_scale / static_cast<double>(context_.mesh.tensor().size());
  balance_experts(
      stream, sum, tally_.slope, tally_.load, tally_.mass,
      {.top_k = config_.experts_per_token, .coefficient = config_.router_aux_loss_coef, .slope_scale = share});
}

}  // namespace palimpsest
