#include "kernels/linear.h"

#include "kernels/elementwise.h"
#include "kernels/op_check.h"

namespace palimpsest {

void linear_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& w, Write write) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_operand(stream, "x", x, dtype, {kAnyDim, kAnyDim});
  check_weight(stream, w, dtype, {kAnyDim, x.dim(1)});
  check_operand(stream, "y", y, y.dtype() == statistics_dtype(dtype) ? statistics_dtype(dtype) : dtype,
                {x.dim(0), w.dim(0)});
  PALIMPSEST_DISPATCH(stream, linear_forward(stream, y, x, w, write));
}

void linear_backward_input(Stream& stream, Tensor dx, const Tensor& dy, const Tensor& w, Write write) {
  const DType dtype = floating_dtype(stream, "dy", dy);
  check_operand(stream, "dy", dy, dtype, {kAnyDim, kAnyDim});
  check_weight(stream, w, dtype, {dy.dim(1), kAnyDim});
  check_operand(stream, "dx", dx, dtype, {dy.dim(0), w.dim(1)});
  PALIMPSEST_DISPATCH(stream, linear_backward_input(stream, dx, dy, w, write));
}

void linear_backward_weight(Stream& stream, Tensor dw, const Tensor& dy, const Tensor& x) {
  const DType dtype = floating_dtype(stream, "dy", dy);
  check_operand(stream, "dy", dy, dtype, {kAnyDim, kAnyDim});
  check_operand(stream, "x", x, dtype, {dy.dim(0), kAnyDim});
  check_operand(stream, "dw", dw, statistics_dtype(dtype), {dy.dim(1), x.dim(1)});
  PALIMPSEST_DISPATCH(stream, linear_backward_weight(stream, dw, dy, x));
}

Tensor rounded_weight(Stream& stream, const Tensor& w, DType dtype) {
  if (w.dtype() == dtype) return w;
  constexpr int64_t kRow = 8;  // elements: rows start on 16 bytes
  const Tensor room = stream.scratch().allocate(dtype, {w.dim(0), (w.dim(1) + kRow - 1) / kRow * kRow});
  const Tensor rounded = room.columns(0, w.dim(1));
  copy(stream, rounded, w);
  return rounded;
}

}  // namespace palimpsest
