#include "kernels/adamw.h"

#include "kernels/op_check.h"

namespace palimpsest {

namespace {

void check_control(const Stream& stream, const Tensor& control) {
  check_contiguous_operand(stream, "control", control, DType::kF64, {kStepControlSize});
}

}  // namespace

void accumulate_norm_squared(Stream& stream, Tensor control, std::span<const Tensor> grads) {
  check_control(stream, control);
  for (const Tensor& grad : grads)
    check_contiguous_operand(stream, "grad", grad, floating_dtype(stream, "grad", grad), grad.shape());
  PALIMPSEST_DISPATCH(stream, accumulate_norm_squared(stream, control, grads));
}

void require_finite(Stream& stream, Tensor control, const Tensor& sum) {
  check_control(stream, control);
  check_contiguous_operand(stream, "sum", sum, DType::kF64, {1});
  PALIMPSEST_DISPATCH(stream, require_finite(stream, control, sum));
}

void prepare_step(Stream& stream, Tensor control, double max_norm) {
  check_control(stream, control);
  PALIMPSEST_DISPATCH(stream, prepare_step(stream, control, max_norm));
}

void adamw_step(Stream& stream, std::span<const AdamwOperands> operands, const Tensor& control,
                const AdamwOptions& options) {
  check_control(stream, control);
  for (const AdamwOperands& each : operands) {
    const DType dtype = floating_dtype(stream, "param", each.param);
    const struct {
      const char* name;
      const Tensor& tensor;
    } named[] = {{"param", each.param}, {"m", each.m}, {"v", each.v}, {"grad", each.grad}};
    for (const auto& [name, tensor] : named) {
      check_contiguous_operand(stream, name, tensor, dtype, tensor.shape());
      CHECK(tensor.numel() == each.param.numel(), name, " is ", tensor.str(), ", param is ", each.param.str());
    }
  }
  PALIMPSEST_DISPATCH(stream, adamw_step(stream, operands, control, options));
}

void sgd_step(Stream& stream, Tensor param, const Tensor& grad, const Tensor& control, double lr) {
  const DType dtype = floating_dtype(stream, "param", param);
  check_control(stream, control);
  check_contiguous_operand(stream, "param", param, dtype, param.shape());
  check_contiguous_operand(stream, "grad", grad, dtype, grad.shape());
  CHECK(grad.numel() == param.numel(), "grad is ", grad.str(), ", param is ", param.str());
  PALIMPSEST_DISPATCH(stream, sgd_step(stream, param, grad, control, lr));
}

}  // namespace palimpsest
