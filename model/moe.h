// Feed-forward of routed experts (Kimi Linear, DeepSeek-V3, Qwen3-Next): each token goes to its k best experts.
//   y = sum_j w_j Wdown_e( silu(Wgate_e x) * (Wup_e x) ), e = e_j  +  shared(x), or sigmoid(w . x) shared(x)
// Choice and weights: kernels/router.h. The tokens are sorted by expert, so that each expert is one matrix product; the
// weight multiplies the inner columns, which a product with Wdown leaves as it is. There are N * k rows whatever the
// routing, so memory does not depend on it.
//
// Over tensor ranks every expert is split by its inner columns like the dense feed-forward; the router sees all tokens
// on every rank. Experts are whole on every data and sequence rank: an axis over experts would cut the stacks by
// experts and exchange the sorted rows after step 3 and before step 7.
#pragma once

#include <optional>
#include <string>

#include "kernels/expert_rows.h"
#include "model/config.h"
#include "model/layer.h"
#include "model/mlp.h"
#include "model/parameters.h"

namespace palimpsest {

class Moe : public FeedForward {
 public:
  // Declares <prefix>gate.weight (the router), gate.e_score_correction_bias, experts.<e>.{gate,up,down}_proj.weight,
  // shared_experts.{gate,up,down}_proj.weight and shared_expert_gate.weight, as far as the config has them. `index`
  // counts the layers with experts.
  Moe(const ModelConfig& config, int64_t index, const std::string& prefix, ParameterRegistry& registry);

  bool adds_to_output() const override { return false; }  // rows of experts are added up in their own type
  std::unique_ptr<Saved> forward(Context& context, const Sequence& sequence, const LateTensor& x, const AwaitedRows& y,
                                 Write write) const override;
  void backward(Context& context, const Sequence& sequence, const Saved& saved, const LateTensor& x, const Tensor& dy,
                const AwaitedTensor& dx) const override;
  double flops_per_token() const override;

  Parameter* selection_bias() const { return bias_; }  // null with a softmax router

 private:
  // Logits of the router, [N, E] in scratch memory.
  Tensor router_logits(Context& context, const Tensor& x) const;

  int64_t index_, num_experts_, top_k_, inner_size_, global_inner_size_;
  RouterOptions router_options_;
  Parameter* router_;          // [E, D]
  Parameter* bias_ = nullptr;  // [E]
  ParameterStack* gate_up_;    // [E * 2F, D]: each expert's gate, then its up
  ParameterStack* down_;       // [E * D, F]
  std::optional<Mlp> shared_;
  Parameter* shared_gate_ = nullptr;  // [1, D]
};

}  // namespace palimpsest
