#include "model/mlp.h"

#include "kernels/linear.h"
#include "kernels/swiglu.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

namespace {

struct SavedMlp : Saved {
  Tensor gate_up;  // [N, 2F]
};

}  // namespace

Mlp::Mlp(int64_t intermediate_size, const std::string& field, int64_t hidden_size, const std::string& prefix,
         ParameterRegistry& registry)
    : intermediate_size_(registry.tensor_share().units(intermediate_size, field)) {
  const int64_t F = intermediate_size;
  gate_up_ = &registry.declare_stack({{.name = prefix + "gate_proj.weight", .shape = {F, hidden_size}, .units = F},
                                      {.name = prefix + "up_proj.weight", .shape = {F, hidden_size}, .units = F}});
  down_ = &registry.declare(
      {.name = prefix + "down_proj.weight", .shape = {hidden_size, F}, .split = TensorSplit::kColumns, .units = F});
}

std::unique_ptr<Saved> Mlp::forward(Context& context, const Sequence&, const LateTensor& x, const AwaitedRows& y,
                                    Write write) const {
  Stream& stream = context.stream;
  Arena::Scope scope(stream.scratch());
  const int64_t N = x.dim(0);
  auto saved = std::make_unique<SavedMlp>();
  // 1. gate and up
  saved->gate_up = context.activations.allocate(context.dtype, {N, 2 * intermediate_size_});
  linear_forward_of_late(context, saved->gate_up, x, gate_up_->operand);
  if (!y.defined()) return saved;
  // 2. h = silu(gate) * up
  const Tensor h = stream.scratch().allocate(context.dtype, {N, intermediate_size_});
  swiglu_forward(stream, h, saved->gate_up);
  // 3. down
  linear_forward_to_awaited(context, y, h, down_->operand, write);
  return saved;
}

void Mlp::backward(Context& context, const Sequence&, const Saved& saved_base, const LateTensor& x, const Tensor& dy,
                   const AwaitedTensor& dx) const {
  const auto& saved = static_cast<const SavedMlp&>(saved_base);
  Stream& stream = context.stream;
  Arena::Scope scope(stream.scratch());
  const int64_t N = x.dim(0);
  const Tensor h = stream.scratch().allocate(context.dtype, {N, intermediate_size_});
  const Tensor dh = stream.scratch().allocate(context.dtype, {N, intermediate_size_});
  const Tensor d_gate_up = stream.scratch().allocate(context.dtype, {N, 2 * intermediate_size_});
  // 3.
  linear_backward_input(stream, dh, dy, down_->operand, Write::kOverwrite);
  // 2. recomputes h
  swiglu_backward(stream, d_gate_up, h, dh, saved.gate_up);
  // 1.
  linear_backward_input(stream, dx, d_gate_up, gate_up_->operand, Write::kOverwrite);
  dx.filled();
  linear_backward_weight(stream, down_->grad, dy, h);
  dx.may_be_taken();
  linear_backward_weight(stream, gate_up_->grad, d_gate_up, x);
}

}  // namespace palimpsest
