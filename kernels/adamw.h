// AdamW (Loshchilov and Hutter, 2019), the global gradient norm and plain SGD, on flat contiguous ranges.
//   m <- b1 m + (1-b1) g      v <- b2 v + (1-b2) g^2
//   p <- p - lr * weight_decay * p - lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)
// g is the gradient times StepControl's clip factor. The control lives on the device, so a step needs no round trip to
// the host: a non-finite norm leaves parameters, moments and the step counter untouched.
//
// A model has hundreds of parameters, most of them small: the ops take lists, which on a GPU go in a few launches.
#pragma once

#include <span>

#include "kernels/stream.h"

namespace palimpsest {

// Layout of the control tensor [4] f64.
enum StepControl : int {
  kNormSquared = 0,   // sum of squares of all gradients, filled by accumulate_norm_squared
  kClipFactor = 1,    // min(1, max_norm / norm), or 0 when the norm is not finite
  kAppliedSteps = 2,  // t: optimizer steps applied so far, this one included
  kFinite = 3,        // 1 when this step is applied, 0 when it is skipped
};
constexpr int64_t kStepControlSize = 4;

struct AdamwOptions {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
};

// One parameter: contiguous, the same dtype f32 or f64, the same numel.
struct AdamwOperands {
  Tensor param, m, v, grad;
  double weight_decay = 0;
};

// control[kNormSquared] += sum of grad^2, in f64 and in a fixed order. Each grad: contiguous, f32 or f64, any shape.
PALIMPSEST_OP(accumulate_norm_squared, Stream& stream, Tensor control, std::span<const Tensor> grads);
// control[kNormSquared] = NaN unless sum [1] f64 is finite, so that a step with a bad loss is skipped.
PALIMPSEST_OP(require_finite, Stream& stream, Tensor control, const Tensor& sum);
// From kNormSquared: fills kClipFactor and kFinite and advances kAppliedSteps when finite. max_norm <= 0: no clipping.
PALIMPSEST_OP(prepare_step, Stream& stream, Tensor control, double max_norm);
// Updates param, m and v of each; the weight decay is theirs, not that of the options.
PALIMPSEST_OP(adamw_step, Stream& stream, std::span<const AdamwOperands> operands, const Tensor& control,
              const AdamwOptions& options);
// p <- p - lr * g, with the same clip and skip rule: for tests of parity, which Adam would hide.
PALIMPSEST_OP(sgd_step, Stream& stream, Tensor param, const Tensor& grad, const Tensor& control, double lr);

// The same of one.
inline void accumulate_norm_squared(Stream& stream, const Tensor& control, const Tensor& grad) {
  accumulate_norm_squared(stream, control, std::span(&grad, 1));
}
inline void adamw_step(Stream& stream, const Tensor& param, const Tensor& m, const Tensor& v, const Tensor& grad,
                       const Tensor& control, const AdamwOptions& options) {
  const AdamwOperands operands = {.param = param, .m = m, .v = v, .grad = grad, .weight_decay = options.weight_decay};
  adamw_step(stream, std::span(&operands, 1), control, options);
}

}  // namespace palimpsest
