#include "kernels/swiglu.h"

#include "kernels/op_check.h"

namespace palimpsest {

void swiglu_forward(Stream& stream, Tensor h, const Tensor& gate_up) {
  const DType dtype = floating_dtype(stream, "gate_up", gate_up);
  check_operand(stream, "h", h, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "gate_up", gate_up, dtype, {h.dim(0), 2 * h.dim(1)});
  PALIMPSEST_DISPATCH(stream, swiglu_forward(stream, h, gate_up));
}

void swiglu_backward(Stream& stream, Tensor d_gate_up, Tensor h, const Tensor& dh, const Tensor& gate_up) {
  const DType dtype = floating_dtype(stream, "dh", dh);
  check_operand(stream, "dh", dh, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "gate_up", gate_up, dtype, {dh.dim(0), 2 * dh.dim(1)});
  check_operand(stream, "d_gate_up", d_gate_up, dtype, gate_up.shape());
  if (h.defined()) check_operand(stream, "h", h, dtype, dh.shape());
  PALIMPSEST_DISPATCH(stream, swiglu_backward(stream, d_gate_up, h, dh, gate_up));
}

}  // namespace palimpsest
