// Softmax attention with grouped key/value heads, as in Llama, and its gated kind with q/k norms and partial rotary
// embedding, as in Qwen3-Next:
//   q = rope(norm(Wq x))       k = rope(norm(Wk x))       v = Wv x
//   y = Wo ( softmax_causal(q k^T / sqrt(d)) v * sigmoid(Wg x) )
#pragma once

#include <string>

#include "model/config.h"
#include "model/layer.h"
#include "model/parameters.h"
#include "model/rope.h"

namespace palimpsest {

// What all projections of x [N, D] become before the attention itself.
struct AttentionHeads {
  Tensor proj;            // [N, P]: all projections of x; q and k rotated in place when there are no norms
  Tensor q, k;            // [N, H, d], [N, HKV, d]: normalised and rotated; columns of proj without norms
  Tensor q_rstd, k_rstd;  // [N, H], [N, HKV]; absent without norms
};

class Attention : public TokenMixer {
 public:
  // Declares <prefix>self_attn.{q,k,v,o}_proj, with the options also g_proj and q_norm, k_norm.
  Attention(const ModelConfig& config, const std::string& prefix, ParameterRegistry& registry);

  std::unique_ptr<Saved> forward(Context& context, const Sequence& sequence, const LateTensor& x, const AwaitedRows& y,
                                 Write write) const override;
  void backward(Context& context, const Sequence& sequence, const Saved& saved, const LateTensor& x, const Tensor& dy,
                const AwaitedTensor& dx) const override;
  double flops_per_token(int64_t row_length) const override;
  std::unique_ptr<DecodeState> make_decode_state(Context& context, int64_t max_tokens) const override;
  void extend(Context& context, DecodeState& state, const Sequence& sequence, const Tensor& x, Tensor y) const override;

 private:
  // Columns of the stacked projection [N, P], as heads.
  Tensor q_columns(const Tensor& proj) const;     // [N, H, d]
  Tensor k_columns(const Tensor& proj) const;     // [N, HKV, d]
  Tensor v_columns(const Tensor& proj) const;     // [N, HKV, d]
  Tensor gate_columns(const Tensor& proj) const;  // [N, H, d]; absent without output gate
  // Rows [n, 2*HKV*d] of keys and values from other sequence ranks, as heads [n, HKV, d].
  Tensor passed_keys(const Tensor& rows) const;
  Tensor passed_values(const Tensor& rows) const;
  AttentionHeads heads(Context& context, Arena& arena, const Sequence& sequence, const LateTensor& x) const;
  // Normalises x [N, h, d] into a new tensor of `arena` when the layer has q/k norms, else x itself.
  Tensor normalise(Context& context, Arena& arena, const Tensor& x, const Parameter* norm, Tensor& rstd) const;

  DType statistics_dtype() const { return o_proj_->value.dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }

  int64_t num_heads_, num_kv_heads_, head_dim_;
  bool output_gate_;
  double scale_, norm_eps_;
  NormWeight norm_weight_;
  Rope rope_;
  ParameterStack* in_proj_;      // [H*d + 2*HKV*d (+ H*d), D]: q, k, v, g
  Parameter* q_norm_ = nullptr;  // [d]
  Parameter* k_norm_ = nullptr;  // [d]
  Parameter* o_proj_;            // [D, H*d]
};

}  // namespace palimpsest
