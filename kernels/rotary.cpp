#include "kernels/rotary.h"

#include "kernels/op_check.h"

namespace palimpsest {

namespace {

void check_rotary(const Stream& stream, const Tensor& x, const Tensor& positions, const Tensor& inv_freq,
                  const RotaryOptions& options) {
  const DType dtype = floating_dtype(stream, "x", x);
  const bool has_heads = x.num_dims() == 3;
  check_operand(stream, "x", x, dtype, has_heads ? Shape{kAnyDim, kAnyDim, kAnyDim} : Shape{kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "positions", positions, DType::kI32, {x.dim(0)});
  check_tensor("inv_freq", inv_freq, DType::kF64, {kAnyDim});
  check_contiguous("inv_freq", inv_freq);
  CHECK(inv_freq.device() == Device::kCpu, "inv_freq is ", inv_freq.str(), ", expected it in host memory");
  CHECK(options.offset >= 0 && options.offset + 2 * inv_freq.numel() <= x.dim(-1), "rotary: ", inv_freq.numel(),
        " pairs from element ", options.offset, " of a head of ", x.dim(-1));
}

}  // namespace

void rotary_forward(Stream& stream, Tensor x, const Tensor& positions, const Tensor& inv_freq,
                    const RotaryOptions& options) {
  check_rotary(stream, x, positions, inv_freq, options);
  PALIMPSEST_DISPATCH(stream, rotary_forward(stream, x, positions, inv_freq, options));
}

void rotary_backward(Stream& stream, Tensor dx, const Tensor& positions, const Tensor& inv_freq,
                     const RotaryOptions& options) {
  check_rotary(stream, dx, positions, inv_freq, options);
  PALIMPSEST_DISPATCH(stream, rotary_backward(stream, dx, positions, inv_freq, options));
}

}  // namespace palimpsest
