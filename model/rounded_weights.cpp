#include "model/rounded_weights.h"

#include "kernels/elementwise.h"

namespace palimpsest {

namespace {

// Rows that do not start on 16 bytes are slow in products, which copy them with gaps.
bool is_rounded(const ParameterStack& stack, DType dtype) {
  constexpr int64_t kRow = 8;
  return stack.value.dtype() != dtype && stack.value.num_dims() == 2 && stack.value.dim(1) % kRow == 0 &&
         stack.parameters[0]->spec.in_product == InProduct::kYes;
}

void set_operand(ParameterStack& stack, const Tensor& operand) {
  stack.operand = operand;
  int64_t row = 0;
  for (Parameter* parameter : stack.parameters) {
    const Shape& block = parameter->block.shape;
    parameter->operand = operand.rows(row, block[0]).view(block);
    row += block[0];
  }
}

}  // namespace

RoundedWeights::RoundedWeights(Context& context, const std::vector<ParameterStack*>& stacks)
    : stacks_(stacks), scope_(context.stream.scratch()) {
  std::vector<CopyOperands> copies;
  for (ParameterStack* stack : stacks) {
    if (!is_rounded(*stack, context.dtype)) continue;
    copies.push_back({.y = context.stream.scratch().allocate(context.dtype, stack->value.shape()), .x = stack->value});
    set_operand(*stack, copies.back().y);
  }
  copy_all(context.stream, copies);
}

RoundedWeights::~RoundedWeights() {
  for (ParameterStack* stack : stacks_)
    if (stack->operand.raw() != stack->value.raw()) set_operand(*stack, stack->value);
}

}  // namespace palimpsest
