// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; in Kimi Linear without positions):
//   c, k_pe = Wkva x       k_nope, v = Wkvb n(c)       q = Wq x, or Wqb n(Wqa x) with a query rank
//   k = concat(k_nope, k_pe), the last part shared by the heads and rotated when rope is on
//   y = Wo softmax_causal(q k^T / sqrt(dn + dr)) v
// Decoding keeps the normalised latent and the rotated shared key, r + dr numbers a token. On a CPU a single token
// attends to them as they are; more tokens at once, and GPUs, whose attention serves no heads so wide, expand them.
#pragma once

#include <string>

#include "model/config.h"
#include "model/layer.h"
#include "model/parameters.h"
#include "model/rope.h"
#include "model/sequence_attention.h"

namespace palimpsest {

// What all projections of x [N, D] become before the latent is expanded.
struct MlaProjections {
  Tensor proj;     // [N, P]: all projections of x; the shared key already rotated
  Tensor q;        // [N, H, dq], rotated; columns of proj when there is no query rank
  Tensor q_rstd;   // [N]; absent without a query rank
  Tensor kv_rstd;  // [N]
};

class Mla : public TokenMixer {
 public:
  // Declares <prefix>self_attn.{q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj}, with a query rank
  // q_a_proj, q_a_layernorm, q_b_proj in place of q_proj.
  Mla(const ModelConfig& config, const std::string& prefix, ParameterRegistry& registry);

  std::unique_ptr<Saved> forward(Context& context, const Sequence& sequence, const LateTensor& x, const AwaitedRows& y,
                                 Write write) const override;
  void backward(Context& context, const Sequence& sequence, const Saved& saved, const LateTensor& x, const Tensor& dy,
                const AwaitedTensor& dx) const override;
  double flops_per_token(int64_t row_length) const override;
  std::unique_ptr<DecodeState> make_decode_state(Context& context, int64_t max_tokens) const override;
  void extend(Context& context, DecodeState& state, const Sequence& sequence, const Tensor& x, Tensor y) const override;

 private:
  // Columns of the stacked projection [N, P]: queries (or their latent), latent, shared key.
  Tensor query_columns(const Tensor& proj) const;   // [N, H*dq] or [N, rq]
  Tensor latent_columns(const Tensor& proj) const;  // [N, r]
  Tensor k_pe_columns(const Tensor& proj) const;    // [N, dr]
  // Projections in `arena`; the normalised latent goes to `latent` [N, r].
  MlaProjections project(Context& context, Arena& arena, const Sequence& sequence, const LateTensor& x,
                         const Tensor& latent) const;
  // q [N, H, dq] from the projection: its columns, or through the query latent (then in `arena`; the statistics go to
  // rstd [N]).
  Tensor queries(Context& context, Arena& arena, const Tensor& proj, const Tensor& rstd) const;

  // Where sequence ranks cut the rows: attention to the earlier ranges of this rank's documents, whose normalised
  // latents and shared keys are passed and expanded block by block. Forward completes o and lse, backward dq.
  void attend_to_earlier_ranges(Context& context, PassedRows& passed, const Tensor& q, const Tensor& o,
                                const Tensor& lse) const;
  struct EarlierRangesBackward {
    Tensor dq, d_o, q, o;  // [N, H, .]
    Tensor lse;            // [N, H]
  };
  void earlier_ranges_backward(Context& context, PassedRows& passed, const EarlierRangesBackward& args) const;
  // Keys [n, H, dq] and values [n, H, dv] of rows [n, r + dr], a normalised latent and a rotated shared key each, in
  // scratch memory.
  struct KeysValues {
    Tensor k, v;
  };
  KeysValues expand(Context& context, const Tensor& rows) const;
  // o [1, H, dv] of one token's q [1, H, dq] over rows [n, r + dr], which stay as they are: the weights go to the query
  // and to the output instead, q_nope (Wk c)^T = (q_nope Wk) c^T and sum p Wv c = Wv sum p c, with Wkvb = (Wk; Wv).
  void attend_to_latents(Context& context, const Tensor& o, const Tensor& q, const Tensor& rows) const;

  int64_t num_heads_, nope_dim_, rope_dim_, value_dim_, kv_rank_, q_rank_;  // q_rank_ 0: full rank
  double scale_;
  Rope q_rope_, k_rope_;
  ParameterStack* in_proj_;        // [H*dq + r + dr, D], or [rq + r + dr, D]
  Parameter* q_a_norm_ = nullptr;  // [rq]
  Parameter* q_b_ = nullptr;       // [H*dq, rq]
  Parameter* kv_a_norm_;           // [r]
  Parameter* kv_b_;                // [H*(dn + dv), r]
  Parameter* o_proj_;              // [D, H*dv]
};

}  // namespace palimpsest
