#include "kernels/rms_norm.h"

#include "kernels/op_check.h"
#include "kernels/token_sums.h"

namespace palimpsest {

namespace {

// [N, D] or [N, H, D] and its weight and rstd.
DType check_norm(const Stream& stream, const char* name, const Tensor& x, const Tensor& w, const Tensor& rstd) {
  const DType dtype = floating_dtype(stream, name, x);
  const bool has_heads = x.num_dims() == 3;
  check_operand(stream, name, x, dtype, has_heads ? Shape{kAnyDim, kAnyDim, kAnyDim} : Shape{kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "w", w, statistics_dtype(dtype), {x.dim(-1)});
  check_contiguous_operand(stream, "rstd", rstd, statistics_dtype(dtype),
                           has_heads ? Shape{x.dim(0), x.dim(1)} : Shape{x.dim(0)});
  return dtype;
}

}  // namespace

void rms_norm_forward(Stream& stream, Tensor y, Tensor rstd, const Tensor& x, const Tensor& w, double eps,
                      NormWeight kind, const Tensor& kept) {
  const DType dtype = check_norm(stream, "y", y, w, rstd);
  check_residual(stream, "x", x, dtype, y.shape());
  if (kept.defined()) check_operand(stream, "kept", kept, kept.dtype() == x.dtype() ? x.dtype() : dtype, y.shape());
  PALIMPSEST_DISPATCH(stream, rms_norm_forward(stream, y, rstd, x, w, eps, kind, kept));
}

void rms_norm_backward(Stream& stream, Tensor dx, Tensor dw, const Tensor& dy, const Tensor& x, const Tensor& w,
                       const Tensor& rstd, NormWeight kind, Write write) {
  const DType dtype = check_norm(stream, "dy", dy, w, rstd);
  check_residual(stream, "x", x, dtype, dy.shape());
  check_operand(stream, "dx", dx, dtype, x.shape());
  check_contiguous_operand(stream, "dw", dw, statistics_dtype(dtype), w.shape());
  count_token_sums(stream, dw.dtype(), x.dim(0), 2 * w.numel());
  PALIMPSEST_DISPATCH(stream, rms_norm_backward(stream, dx, dw, dy, x, w, rstd, kind, write));
}

void gated_rms_norm_forward(Stream& stream, Tensor y, Tensor rstd, const Tensor& o, const Tensor& z, const Tensor& w,
                            double eps, GateActivation activation) {
  const DType dtype = check_norm(stream, "o", o, w, rstd);
  CHECK(o.num_dims() == 3, "o is ", o.str(), ", expected [N, H, V]");
  check_operand(stream, "z", z, dtype, o.shape());
  check_operand(stream, "y", y, dtype, o.shape());
  PALIMPSEST_DISPATCH(stream, gated_rms_norm_forward(stream, y, rstd, o, z, w, eps, activation));
}

void gated_rms_norm_backward(Stream& stream, Tensor d_o, Tensor dz, Tensor dw, const Tensor& dy, const Tensor& o,
                             const Tensor& z, const Tensor& w, const Tensor& rstd, GateActivation activation,
                             const Tensor& y) {
  const DType dtype = check_norm(stream, "o", o, w, rstd);
  CHECK(o.num_dims() == 3, "o is ", o.str(), ", expected [N, H, V]");
  check_operand(stream, "z", z, dtype, o.shape());
  check_operand(stream, "dy", dy, dtype, o.shape());
  check_operand(stream, "d_o", d_o, dtype, o.shape());
  check_operand(stream, "dz", dz, dtype, o.shape());
  check_contiguous_operand(stream, "dw", dw, statistics_dtype(dtype), w.shape());
  if (y.defined()) check_operand(stream, "y", y, dtype, o.shape());
  count_token_sums(stream, dw.dtype(), o.dim(0), 2 * w.numel());
  PALIMPSEST_DISPATCH(stream, gated_rms_norm_backward(stream, d_o, dz, dw, dy, o, z, w, rstd, activation, y));
}

}  // namespace palimpsest
