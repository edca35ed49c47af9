// Softmax cross-entropy on a block of logits, in the pieces that a vocabulary split over ranks needs too.
// model/head.cpp loops over blocks of tokens, so the logits of a whole batch never exist at once.
//   lse_n = log sum_v exp(logit_nv)        loss_n = lse_n - logit_n[target_n] + z_loss * lse_n^2
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

constexpr int32_t kIgnoreTarget = -1;  // a token that is not scored: loss 0, gradient 0

// stats [n, 3]: maximum, sum of exp(logit - maximum), logit of the target (0 when the target lies outside
// [vocab_begin, vocab_begin + Vl) or is ignored). logits [n, Vl] (rows may be spaced), targets [n] i32, global ids.
// stats f32 (f64 for f64), overwritten.
PALIMPSEST_OP(cross_entropy_stats, Stream& stream, Tensor stats, const Tensor& logits, const Tensor& targets,
              int64_t vocab_begin);
// stats [n, 3] = the statistics of whole rows from those of their parts, parts [P * n, 3], part after part.
// Overwritten.
PALIMPSEST_OP(cross_entropy_merge_stats, Stream& stream, Tensor stats, const Tensor& parts);
// token_loss [n] f32 (f64): loss without the z-loss term, 0 for ignored tokens, overwritten. z_term [n] or absent:
// z_loss * lse^2 of scored tokens, overwritten.
PALIMPSEST_OP(cross_entropy_loss, Stream& stream, Tensor token_loss, Tensor z_term, const Tensor& stats,
              const Tensor& targets, double z_loss);
// In place: logits become the gradient of grad_scale * (sum of loss and z terms) with respect to them; rows of ignored
// tokens become 0.
PALIMPSEST_OP(cross_entropy_backward, Stream& stream, Tensor logits, const Tensor& stats, const Tensor& targets,
              int64_t vocab_begin, double z_loss, double grad_scale);
// sum [1] f64 += sum of x [n] (f32 or f64), accumulated in f64 in a fixed order.
PALIMPSEST_OP(sum_into, Stream& stream, Tensor sum, const Tensor& x);

}  // namespace palimpsest
