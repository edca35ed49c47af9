// Routing of tokens to experts. DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and Kimi Linear: s = sigmoid(logits);
// Qwen3-Next: s = softmax(logits).
//   choice   the k experts with the largest s + bias; with groups, only those of the top_groups groups whose two best
//            s + bias add up to most. Of equals the first wins.
//   weights  s of the chosen, without bias; divided by their sum + 1e-20 when renormalised; times scale
// The choice has no gradient.
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

enum class RouterScore : uint8_t { kSigmoid, kSoftmax };

struct RouterOptions {
  RouterScore score = RouterScore::kSigmoid;
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  bool renormalize = true;
  double scale = 1.0;
};

struct Routing {
  Tensor scores;   // [N, E] s; f32, or f64 with f64
  Tensor experts;  // [N, k] i32, all different
  Tensor weights;  // [N, k] as scores
};

// All of `routing` overwritten. logits [N, E] as scores; bias [E] as scores, absent: 0.
PALIMPSEST_OP(router_forward, Stream& stream, const Routing& routing, const Tensor& logits, const Tensor& bias,
              const RouterOptions& options);
// d_logits [N, E] overwritten, as scores or in bf16, from d_weights [N, k]. slope [E] f64 is added to the gradient of
// every token's scores (the balance term of the loss); absent: 0.
PALIMPSEST_OP(router_backward, Stream& stream, Tensor d_logits, const Tensor& d_weights, const Routing& routing,
              const Tensor& slope, const RouterOptions& options);

// What experts were given: load [E] f64 += rows of each, from offsets [E + 1] i32 (kernels/expert_rows.h);
// mass [E] f64 += sum over tokens of scores [N, E], unless absent.
PALIMPSEST_OP(tally_experts, Stream& stream, Tensor load, Tensor mass, const Tensor& offsets, const Tensor& scores);

struct BalanceOptions {
  int64_t top_k = 1;
  double coefficient = 0.0;  // router_aux_loss_coef
  double slope_scale = 1.0;  // of the slope alone
};
// The load-balancing term of Switch Transformers (arXiv 2101.03961), over all layers together as the public Qwen models
// have it: coefficient * E * sum_e f_e P_e a token, f_e = share of the tokens sent to expert e (they add up to k), P_e
// = mean score; f is a constant to the gradient.
//   sum [1] f64 += coefficient * E / L * sum_e f_e * (sum over layers of mass)   slope [E] f64 = its derivative by a
//   token's score * slope_scale. load, mass [L, E] f64; load may count more tokens (of all ranks) than mass.
PALIMPSEST_OP(balance_experts, Stream& stream, Tensor sum, Tensor slope, const Tensor& load, const Tensor& mass,
              const BalanceOptions& options);

// Balance without a loss term (arXiv 2408.15664): bias_e += speed where expert e was given fewer rows than the mean,
// -= speed where more. bias [n] holds the experts from `first`; load [E] f64. Nothing when control (kernels/adamw.h)
// says that the step is not finite.
PALIMPSEST_OP(selection_bias_step, Stream& stream, Tensor bias, const Tensor& load, int64_t first, double speed,
              const Tensor& control);

}  // namespace palimpsest
