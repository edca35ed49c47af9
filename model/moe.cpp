#include "model/moe.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/swiglu.h"
#include "model/expert_balance.h"

namespace palimpsest {

namespace {

struct SavedMoe : Saved {
  Routing routing;                // [N, E], [N, k], [N, k]
  ExpertRows rows;                // [E + 1], [N, k], [R] with R = N * k
  Tensor gate_up;                 // [R, 2F]
  std::unique_ptr<Saved> shared;  // null without a shared expert
  Tensor shared_y;                // [N, D] before its gate; absent without one
  Tensor shared_z;                // [N, 1]
};

// This layer's row of what the layers note.
Tensor row_of(const Tensor& table, int64_t index) {
  return table.rows(index, 1).view({table.dim(1)});
}

}  // namespace

Moe::Moe(const ModelConfig& config, int64_t index, const std::string& prefix, ParameterRegistry& registry)
    : index_(index),
      num_experts_(config.moe.num_experts),
      top_k_(config.moe.experts_per_token),
      inner_size_(registry.tensor_share().units(config.moe.intermediate_size, "model.moe.intermediate_size")),
      global_inner_size_(config.moe.intermediate_size),
      router_options_{.score = config.moe.router,
                      .num_groups = config.moe.num_groups,
                      .top_groups = config.moe.top_groups,
                      .renormalize = config.moe.renormalize,
                      .scale = config.moe.routed_scaling_factor} {
  const int64_t D = config.hidden_size, F = config.moe.intermediate_size;
  // Each tensor rank has a part of every expert's columns, hence of the gradient of its weight.
  router_ = &registry.declare(
      {.name = prefix + "gate.weight", .shape = {num_experts_, D}, .split = TensorSplit::kPartialOverHeads});
  if (config.moe.router == RouterScore::kSigmoid)
    bias_ = &registry.declare({.name = prefix + "gate.e_score_correction_bias",
                               .shape = {num_experts_},
                               .init = Init::kZeros,
                               .decay = WeightDecay::kNo,
                               .split = TensorSplit::kPartialOverHeads,
                               .in_product = InProduct::kNo});
  std::vector<ParameterSpec> gate_up, down;
  for (int64_t e = 0; e < num_experts_; ++e) {
    const std::string expert = fmt::format("{}experts.{}.", prefix, e);
    for (const char* name : {"gate_proj.weight", "up_proj.weight"})
      gate_up.push_back({.name = expert + name, .shape = {F, D}, .in_product = InProduct::kNo, .units = F});
    down.push_back({.name = expert + "down_proj.weight",
                    .shape = {D, F},
                    .split = TensorSplit::kColumns,
                    .in_product = InProduct::kNo,
                    .units = F});
  }
  gate_up_ = &registry.declare_stack(std::move(gate_up));
  down_ = &registry.declare_stack(std::move(down));
  if (config.moe.shared_intermediate_size > 0)
    shared_.emplace(config.moe.shared_intermediate_size, "model.moe.shared_intermediate_size", D,
                    prefix + "shared_experts.", registry);
  if (config.moe.shared_gate)
    shared_gate_ = &registry.declare(
        {.name = prefix + "shared_expert_gate.weight", .shape = {1, D}, .split = TensorSplit::kPartialOverHeads});
}

Tensor Moe::router_logits(Context& context, const Tensor& x) const {
  const Tensor logits = context.stream.scratch().allocate(router_->value.dtype(), {x.dim(0), num_experts_});
  linear_forward(context.stream, logits, x, router_->operand, Write::kOverwrite);
  return logits;
}

std::unique_ptr<Saved> Moe::forward(Context& context, const Sequence& sequence, const LateTensor& x,
                                    const AwaitedRows& y, Write write) const {
  CHECK(write == Write::kOverwrite, "experts do not add to their output");
  Stream& stream = context.stream;
  Arena& keep = context.activations;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), R = N * top_k_, D = x.dim(1), F = inner_size_, E = num_experts_;
  const DType statistics = router_->value.dtype();
  auto saved = std::make_unique<SavedMoe>();
  // 1. shared expert
  if (shared_gate_) {
    saved->shared_y = keep.allocate(context.dtype, {N, D});
    saved->shared_z = keep.allocate(context.dtype, {N, 1});
    saved->shared = shared_->forward(context, sequence, x, saved->shared_y, Write::kOverwrite);
    linear_forward(stream, saved->shared_z, x, shared_gate_->operand, Write::kOverwrite);
    if (y.defined()) token_gate_forward(stream, y, saved->shared_y, saved->shared_z);
  } else if (shared_) {
    saved->shared = shared_->forward(context, sequence, x, static_cast<const Tensor&>(y), Write::kOverwrite);
  }
  // 2. routing
  saved->routing = {.scores = keep.allocate(statistics, {N, E}),
                    .experts = keep.allocate(DType::kI32, {N, top_k_}),
                    .weights = keep.allocate(statistics, {N, top_k_})};
  saved->rows = {.offsets = keep.allocate(DType::kI32, {E + 1}),
                 .row_of = keep.allocate(DType::kI32, {N, top_k_}),
                 .token_of = keep.allocate(DType::kI32, {R})};
  router_forward(stream, saved->routing, router_logits(context, x), bias_ ? bias_->value : Tensor(), router_options_);
  sort_by_expert(stream, saved->rows, saved->routing.experts);
  if (context.experts && y.defined()) {
    const ExpertTally& tally = *context.experts;
    tally_experts(stream, row_of(tally.load, index_), tally.mass.defined() ? row_of(tally.mass, index_) : Tensor(),
                  saved->rows.offsets, saved->routing.scores);
  }
  // 3. rows by expert
  const Tensor x_rows = scratch.allocate(context.dtype, {R, D});
  gather_expert_rows(stream, x_rows, x, saved->rows.token_of);
  // 4. gate and up
  saved->gate_up = keep.allocate(context.dtype, {R, 2 * F});
  grouped_linear_forward(stream, saved->gate_up, x_rows, gate_up_->operand, saved->rows.offsets);
  if (!y.defined()) return saved;
  // 5. h = weight * silu(gate) * up
  const Tensor h = scratch.allocate(context.dtype, {R, F});
  swiglu_forward(stream, h, saved->gate_up);
  scale_expert_rows_forward(stream, h, h, saved->routing.weights, saved->rows.row_of);
  // 6. down, over the rows of x, which are not needed any more
  const Tensor& y_rows = x_rows;
  grouped_linear_forward(stream, y_rows, h, down_->operand, saved->rows.offsets);
  // 7. back to tokens
  sum_expert_rows(stream, y, y_rows, saved->rows.row_of, shared_ ? Write::kAccumulate : Write::kOverwrite);
  return saved;
}

void Moe::backward(Context& context, const Sequence& sequence, const Saved& saved_base, const LateTensor& x,
                   const Tensor& dy, const AwaitedTensor& awaited_dx) const {
  const Tensor& dx = awaited_dx;
  const auto& saved = static_cast<const SavedMoe&>(saved_base);
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), R = N * top_k_, D = x.dim(1), F = inner_size_;
  const ExpertRows& rows = saved.rows;
  const Tensor d_weights = scratch.allocate(saved.routing.weights.dtype(), {N, top_k_});
  {
    Arena::Scope inner(scratch);
    const Tensor d_rows = scratch.allocate(context.dtype, {R, D});
    const Tensor h = scratch.allocate(context.dtype, {R, F});
    const Tensor dh = scratch.allocate(context.dtype, {R, F});
    const Tensor d_gate_up = scratch.allocate(context.dtype, {R, 2 * F});
    // 7.
    gather_expert_rows(stream, d_rows, dy, rows.token_of);
    // 6. with h as in forward
    grouped_linear_backward_input(stream, dh, d_rows, down_->operand, rows.offsets);
    swiglu_forward(stream, h, saved.gate_up);
    // 5. the scaled h is needed for the weights of 6 alone
    scale_expert_rows_backward(stream, dh, d_weights, dh, h, saved.routing.weights, rows.row_of);
    scale_expert_rows_forward(stream, h, h, saved.routing.weights, rows.row_of);
    grouped_linear_backward_weight(stream, down_->grad, d_rows, h, rows.offsets);
    swiglu_backward(stream, d_gate_up, {}, dh, saved.gate_up);
    // 4. and 3.
    const Tensor& x_rows = d_rows;
    gather_expert_rows(stream, x_rows, x, rows.token_of);
    grouped_linear_backward_weight(stream, gate_up_->grad, d_gate_up, x_rows, rows.offsets);
    grouped_linear_backward_input(stream, d_rows, d_gate_up, gate_up_->operand, rows.offsets);
    sum_expert_rows(stream, dx, d_rows, rows.row_of, Write::kOverwrite);
  }
  // 2.
  const Tensor d_logits = scratch.allocate(context.dtype, saved.routing.scores.shape());
  router_backward(stream, d_logits, d_weights, saved.routing, context.experts ? context.experts->slope : Tensor(),
                  router_options_);
  linear_backward_weight(stream, router_->grad, d_logits, x);
  linear_backward_input(stream, dx, d_logits, router_->operand, Write::kAccumulate);
  // 1.
  if (!shared_) return;
  const Tensor d_shared_x = scratch.allocate(context.dtype, dx.shape());
  if (shared_gate_) {
    const Tensor d_shared_y = scratch.allocate(context.dtype, dy.shape());
    const Tensor dz = scratch.allocate(context.dtype, saved.shared_z.shape());
    token_gate_backward(stream, d_shared_y, dz, dy, saved.shared_y, saved.shared_z);
    linear_backward_weight(stream, shared_gate_->grad, dz, x);
    linear_backward_input(stream, dx, dz, shared_gate_->operand, Write::kAccumulate);
    shared_->backward(context, sequence, *saved.shared, x, d_shared_y, d_shared_x);
  } else {
    shared_->backward(context, sequence, *saved.shared, x, dy, d_shared_x);
  }
  add(stream, dx, dx, d_shared_x);
}

double Moe::flops_per_token() const {
  const int64_t D = router_->spec.shape[1];
  return 2.0 * static_cast<double>(top_k_ * 3 * D * global_inner_size_);
}

}  // namespace palimpsest
