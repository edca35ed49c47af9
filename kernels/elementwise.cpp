#include "kernels/elementwise.h"

#include "kernels/op_check.h"

namespace palimpsest {

void fill_zero(Stream& stream, Tensor y) {
  check_operand(stream, "y", y, y.dtype(), y.shape());
  PALIMPSEST_DISPATCH(stream, fill_zero(stream, y));
}

namespace {

void check_copy(const Stream& stream, const Tensor& y, const Tensor& x) {
  const DType dtype = floating_dtype(stream, "y", y);
  check_residual(stream, "x", x, dtype, x.shape());
  check_operand(stream, "y", y, dtype, x.shape());
}

}  // namespace

void copy(Stream& stream, Tensor y, const Tensor& x) {
  check_copy(stream, y, x);
  PALIMPSEST_DISPATCH(stream, copy(stream, y, x));
}

void copy_all(Stream& stream, std::span<const CopyOperands> operands) {
  for (const CopyOperands& each : operands) check_copy(stream, each.y, each.x);
  PALIMPSEST_DISPATCH(stream, copy_all(stream, operands));
}

void add(Stream& stream, Tensor y, const Tensor& a, const Tensor& b) {
  const DType dtype = b.dtype() == DType::kF64 ? DType::kF64 : floating_dtype(stream, "b", b);
  check_residual(stream, "a", a, dtype, a.shape());
  check_operand(stream, "b", b, dtype, a.shape());
  check_operand(stream, "y", y, a.dtype(), a.shape());
  PALIMPSEST_DISPATCH(stream, add(stream, y, a, b));
}

void sigmoid_gate_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& z) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_operand(stream, "x", x, dtype, x.shape());
  check_operand(stream, "z", z, dtype, x.shape());
  check_operand(stream, "y", y, dtype, x.shape());
  PALIMPSEST_DISPATCH(stream, sigmoid_gate_forward(stream, y, x, z));
}

void sigmoid_gate_backward(Stream& stream, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z) {
  const DType dtype = floating_dtype(stream, "dy", dy);
  check_operand(stream, "dy", dy, dtype, dy.shape());
  check_operand(stream, "x", x, dtype, dy.shape());
  check_operand(stream, "z", z, dtype, dy.shape());
  check_operand(stream, "dx", dx, dtype, dy.shape());
  check_operand(stream, "dz", dz, dtype, dy.shape());
  PALIMPSEST_DISPATCH(stream, sigmoid_gate_backward(stream, dx, dz, dy, x, z));
}

}  // namespace palimpsest
