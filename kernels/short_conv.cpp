#include "kernels/short_conv.h"

#include "kernels/op_check.h"
#include "kernels/token_sums.h"

namespace palimpsest {

namespace {

// x [N, C] and w [C, 1, W].
DType check_conv(const Stream& stream, const Tensor& x, const Tensor& w, const Documents& documents) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_operand(stream, "x", x, dtype, {kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "w", w, statistics_dtype(dtype), {x.dim(1), 1, kAnyDim});
  CHECK(w.dim(2) >= 1 && w.dim(2) <= 4, "w is ", w.str(), ", expected a width from 1 to 4");
  check_covers(documents, "x", x.dim(0));
  return dtype;
}

// A carried state [states, W-1, C]; may be absent.
void check_state(const Stream& stream, const char* name, const Tensor& state, DType dtype, const Tensor& x, int64_t W,
                 const Documents& documents) {
  if (state.defined()) check_contiguous_operand(stream, name, state, dtype, {documents.num_states(), W - 1, x.dim(1)});
}

}  // namespace

void short_conv_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& w, const Tensor& initial,
                        const Documents& documents, ConvActivation activation) {
  const DType dtype = check_conv(stream, x, w, documents);
  check_operand(stream, "y", y, dtype, x.shape());
  check_state(stream, "initial", initial, dtype, x, w.dim(2), documents);
  PALIMPSEST_DISPATCH(stream, short_conv_forward(stream, y, x, w, initial, documents, activation));
}

void short_conv_backward(Stream& stream, Tensor dx, Tensor dw, Tensor d_initial, const Tensor& dy, const Tensor& x,
                         const Tensor& w, const Tensor& initial, const Tensor& d_final, const Documents& documents,
                         ConvActivation activation) {
  const DType dtype = check_conv(stream, x, w, documents);
  check_operand(stream, "dy", dy, dtype, x.shape());
  check_operand(stream, "dx", dx, dtype, x.shape());
  check_contiguous_operand(stream, "dw", dw, statistics_dtype(dtype), w.shape());
  check_state(stream, "initial", initial, dtype, x, w.dim(2), documents);
  check_state(stream, "d_initial", d_initial, dtype, x, w.dim(2), documents);
  check_state(stream, "d_final", d_final, dtype, x, w.dim(2), documents);
  count_token_sums(stream, dw.dtype(), x.dim(0), w.numel());
  PALIMPSEST_DISPATCH(
      stream, short_conv_backward(stream, dx, dw, d_initial, dy, x, w, initial, d_final, documents, activation));
}

void short_conv_final_state(Stream& stream, Tensor final_state, const Tensor& x, const Tensor& initial,
                            const Documents& documents) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_operand(stream, "x", x, dtype, {kAnyDim, kAnyDim});
  check_covers(documents, "x", x.dim(0));
  check_contiguous_operand(stream, "final_state", final_state, dtype, {documents.num_states(), kAnyDim, x.dim(1)});
  check_state(stream, "initial", initial, dtype, x, final_state.dim(1) + 1, documents);
  PALIMPSEST_DISPATCH(stream, short_conv_final_state(stream, final_state, x, initial, documents));
}

}  // namespace palimpsest
