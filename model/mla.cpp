#include "model/mla.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/mla_heads.h"
#include "kernels/rms_norm.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

namespace {

// Both latent norms are plain with this epsilon, whatever the model's norm_eps is: so the published code has it.
constexpr double kLatentNormEps = 1e-6;

struct SavedMla : Saved, MlaProjections {
  Tensor kv;   // [N, H, dn + dv]: the expanded latent
  Tensor o;    // [N, H, dv]
  Tensor lse;  // [N, H]
};

struct MlaDecodeState : DecodeState {
  Tensor cache;  // [max_tokens, r + dr]: the normalised latent and the rotated shared key
  int64_t length = 0;
};

}  // namespace

Mla::Mla(const ModelConfig& config, const std::string& prefix, ParameterRegistry& registry)
    : num_heads_(registry.tensor_share().units(config.mla.num_heads, "model.mla.num_heads")),
      nope_dim_(config.mla.qk_nope_head_dim),
      rope_dim_(config.mla.qk_rope_head_dim),
      value_dim_(config.mla.v_head_dim),
      kv_rank_(config.mla.kv_lora_rank),
      q_rank_(config.mla.q_lora_rank.value_or(0)),
      scale_((config.mla.rope == RopeKind::kNone ? 1.0 : rope_softmax_factor(config.mla.rope_scaling)) /
             std::sqrt(static_cast<double>(nope_dim_ + rope_dim_))),
      q_rope_(config.mla.rope, nope_dim_, rope_dim_, config.mla.rope_theta, config.mla.rope_scaling),
      k_rope_(config.mla.rope, 0, rope_dim_, config.mla.rope_theta, config.mla.rope_scaling) {
  const int64_t D = config.hidden_size, H = config.mla.num_heads, dq = nope_dim_ + rope_dim_;
  const std::string p = prefix + "self_attn.";
  std::vector<ParameterSpec> projections;
  if (q_rank_ > 0) {
    projections.push_back(
        {.name = p + "q_a_proj.weight", .shape = {q_rank_, D}, .split = TensorSplit::kPartialOverHeads});
  } else {
    projections.push_back({.name = p + "q_proj.weight", .shape = {H * dq, D}, .units = H});
  }
  projections.push_back({.name = p + "kv_a_proj_with_mqa.weight",
                         .shape = {kv_rank_ + rope_dim_, D},
                         .split = TensorSplit::kPartialOverHeads});
  in_proj_ = &registry.declare_stack(std::move(projections));
  if (q_rank_ > 0) {
    q_a_norm_ = &registry.declare(norm_weight(p + "q_a_layernorm.weight", q_rank_, TensorSplit::kPartialOverHeads));
    q_b_ = &registry.declare({.name = p + "q_b_proj.weight", .shape = {H * dq, q_rank_}, .units = H});
  }
  kv_a_norm_ = &registry.declare(norm_weight(p + "kv_a_layernorm.weight", kv_rank_, TensorSplit::kPartialOverHeads));
  kv_b_ = &registry.declare(
      {.name = p + "kv_b_proj.weight", .shape = {H * (nope_dim_ + value_dim_), kv_rank_}, .units = H});
  o_proj_ = &registry.declare(
      {.name = p + "o_proj.weight", .shape = {D, H * value_dim_}, .split = TensorSplit::kColumns, .units = H});
}

Tensor Mla::query_columns(const Tensor& proj) const {
  return proj.columns(0, proj.dim(1) - kv_rank_ - rope_dim_);
}

Tensor Mla::latent_columns(const Tensor& proj) const {
  return proj.columns(proj.dim(1) - kv_rank_ - rope_dim_, kv_rank_);
}

Tensor Mla::k_pe_columns(const Tensor& proj) const {
  return proj.columns(proj.dim(1) - rope_dim_, rope_dim_);
}

Tensor Mla::queries(Context& context, Arena& arena, const Tensor& proj, const Tensor& rstd) const {
  const int64_t N = proj.dim(0), dq = nope_dim_ + rope_dim_;
  if (q_rank_ == 0) return query_columns(proj).split_columns(num_heads_, dq);
  const Tensor q = arena.allocate(context.dtype, {N, num_heads_, dq});
  Arena::Scope scope(context.stream.scratch());
  const Tensor latent = context.stream.scratch().allocate(context.dtype, {N, q_rank_});
  rms_norm_forward(context.stream, latent, rstd, query_columns(proj), q_a_norm_->value, kLatentNormEps,
                   NormWeight::kPlain);
  linear_forward(context.stream, q.merge_columns(), latent, q_b_->operand, Write::kOverwrite);
  return q;
}

MlaProjections Mla::project(Context& context, Arena& arena, const Sequence& sequence, const LateTensor& x,
                            const Tensor& latent) const {
  Stream& stream = context.stream;
  const int64_t N = x.dim(0);
  const DType statistics = kv_a_norm_->value.dtype();
  MlaProjections out;
  // 1. all projections of x
  out.proj = arena.allocate(context.dtype, {N, in_proj_->value.dim(0)});
  linear_forward_of_late(context, out.proj, x, in_proj_->operand);
  // 2. queries
  if (q_rank_ > 0) out.q_rstd = arena.allocate(statistics, {N});
  out.q = queries(context, arena, out.proj, out.q_rstd);
  // 3. latent
  out.kv_rstd = arena.allocate(statistics, {N});
  rms_norm_forward(stream, latent, out.kv_rstd, latent_columns(out.proj), kv_a_norm_->value, kLatentNormEps,
                   NormWeight::kPlain);
  // 4. rotation, in place
  q_rope_.forward(stream, out.q, sequence.positions);
  k_rope_.forward(stream, k_pe_columns(out.proj), sequence.positions);
  return out;
}

std::unique_ptr<Saved> Mla::forward(Context& context, const Sequence& sequence, const LateTensor& x,
                                    const AwaitedRows& y, Write write) const {
  Stream& stream = context.stream;
  Arena& keep = context.activations;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), H = num_heads_, dq = nope_dim_ + rope_dim_;
  const DType statistics = kv_a_norm_->value.dtype();
  auto saved = std::make_unique<SavedMla>();
  // 1. to 4.
  const Tensor latent = scratch.allocate(context.dtype, {N, kv_rank_});
  static_cast<MlaProjections&>(*saved) = project(context, keep, sequence, x, latent);
  // 5. keys and values as heads
  saved->kv = keep.allocate(context.dtype, {N, H, nope_dim_ + value_dim_});
  linear_forward(stream, saved->kv.merge_columns(), latent, kv_b_->operand, Write::kOverwrite);
  const Tensor k = scratch.allocate(context.dtype, {N, H, dq});
  const Tensor v = scratch.allocate(context.dtype, {N, H, value_dim_});
  mla_keys_values_forward(stream, k, v, saved->kv, k_pe_columns(saved->proj));
  // 6. attention
  saved->o = keep.allocate(context.dtype, {N, H, value_dim_});
  saved->lse = keep.allocate(statistics, {N, H});
  std::optional<PassedRows> passed;  // under way during the attention to own keys
  if (sequence.crossings.cut()) passed.emplace(context, sequence, std::vector{latent, k_pe_columns(saved->proj)});
  attention_forward(stream, saved->o, saved->lse, saved->q, k, v, scale_, sequence.documents, sequence.documents);
  if (passed) attend_to_earlier_ranges(context, *passed, saved->q, saved->o, saved->lse);
  // 7. output projection
  if (y.defined()) linear_forward_to_awaited(context, y, saved->o.merge_columns(), o_proj_->operand, write);
  return saved;
}

void Mla::backward(Context& context, const Sequence& sequence, const Saved& saved_base, const LateTensor& x,
                   const Tensor& dy, const AwaitedTensor& dx) const {
  const auto& saved = static_cast<const SavedMla&>(saved_base);
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), H = num_heads_, dq = nope_dim_ + rope_dim_;
  const Tensor d_proj = scratch.allocate(context.dtype, saved.proj.shape());
  const Tensor dq_heads =
      q_rank_ > 0 ? scratch.allocate(context.dtype, {N, H, dq}) : query_columns(d_proj).split_columns(H, dq);
  const Tensor dkv = scratch.allocate(context.dtype, saved.kv.shape());
  Tensor d_from_others;  // [N, r + dr]: of the normalised latent and the rotated shared key
  const auto normalised = [&](const Parameter& norm, const Tensor& raw, const Tensor& rstd) {
    const Tensor latent = scratch.allocate(context.dtype, raw.shape());
    const Tensor again = scratch.allocate(rstd.dtype(), rstd.shape());
    rms_norm_forward(stream, latent, again, raw, norm.value, kLatentNormEps, NormWeight::kPlain);
    return latent;
  };
  if (sequence.crossings.cut()) d_from_others = scratch.allocate(context.dtype, {N, kv_rank_ + rope_dim_});
  {
    Arena::Scope inner(scratch);
    // 7.
    const Tensor d_o = scratch.allocate(context.dtype, {N, H, value_dim_});
    linear_backward_input(stream, d_o.merge_columns(), dy, o_proj_->operand, Write::kOverwrite);
    // 6. rebuilds keys and values
    const Tensor k = scratch.allocate(context.dtype, {N, H, dq});
    const Tensor v = scratch.allocate(context.dtype, {N, H, value_dim_});
    const Tensor dk = scratch.allocate(context.dtype, {N, H, dq});
    const Tensor dv = scratch.allocate(context.dtype, {N, H, value_dim_});
    mla_keys_values_forward(stream, k, v, saved.kv, k_pe_columns(saved.proj));
    std::optional<PassedRows> passed;
    if (sequence.crossings.cut())
      passed.emplace(
          context, sequence,
          std::vector{normalised(*kv_a_norm_, latent_columns(saved.proj), saved.kv_rstd), k_pe_columns(saved.proj)},
          PassedRows::Gradients::kYes);
    attention_backward(stream,
                       {.dq = dq_heads,
                        .dk = dk,
                        .dv = dv,
                        .d_o = d_o,
                        .q = saved.q,
                        .k = k,
                        .v = v,
                        .o = saved.o,
                        .lse = saved.lse,
                        .scale = scale_},
                       sequence.documents);
    if (passed) {
      earlier_ranges_backward(context, *passed,
                              {.dq = dq_heads, .d_o = d_o, .q = saved.q, .o = saved.o, .lse = saved.lse});
      copy(stream, d_from_others, passed->d_own());
    }
    // 5.
    mla_keys_values_backward(stream, dkv, k_pe_columns(d_proj), dk, dv);
    if (d_from_others.defined())
      add(stream, k_pe_columns(d_proj), k_pe_columns(d_proj), d_from_others.columns(kv_rank_, rope_dim_));
  }
  // 4.
  k_rope_.backward(stream, k_pe_columns(d_proj), sequence.positions);
  q_rope_.backward(stream, dq_heads, sequence.positions);
  // A latent norm and its expansion, backward: recomputes the normalised latent. `more` is a further gradient of it.
  const auto through_latent = [&](const Tensor& d_out, const Parameter& expansion, const Parameter& norm,
                                  const Tensor& raw, const Tensor& rstd, const Tensor& d_raw, const Tensor& more) {
    Arena::Scope inner(scratch);
    const Tensor latent = normalised(norm, raw, rstd);
    const Tensor d_latent = scratch.allocate(context.dtype, raw.shape());
    linear_backward_weight(stream, expansion.grad, d_out, latent);
    linear_backward_input(stream, d_latent, d_out, expansion.value, Write::kOverwrite);
    if (more.defined()) add(stream, d_latent, d_latent, more);
    rms_norm_backward(stream, d_raw, norm.grad, d_latent, raw, norm.value, rstd, NormWeight::kPlain);
  };
  // 3.
  through_latent(dkv.merge_columns(), *kv_b_, *kv_a_norm_, latent_columns(saved.proj), saved.kv_rstd,
                 latent_columns(d_proj), d_from_others.defined() ? d_from_others.columns(0, kv_rank_) : Tensor());
  // 2.
  if (q_rank_ > 0)
    through_latent(dq_heads.merge_columns(), *q_b_, *q_a_norm_, query_columns(saved.proj), saved.q_rstd,
                   query_columns(d_proj), {});
  // 1.
  linear_backward_input(stream, dx, d_proj, in_proj_->operand, Write::kOverwrite);
  dx.filled();
  linear_backward_weight(stream, o_proj_->grad, dy, saved.o.merge_columns());
  dx.may_be_taken();
  linear_backward_weight(stream, in_proj_->grad, d_proj, x);
}

Mla::KeysValues Mla::expand(Context& context, const Tensor& rows) const {
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  const int64_t n = rows.dim(0), H = num_heads_;
  const KeysValues keys = {.k = scratch.allocate(context.dtype, {n, H, nope_dim_ + rope_dim_}),
                           .v = scratch.allocate(context.dtype, {n, H, value_dim_})};
  Arena::Scope scope(scratch);
  const Tensor kv = scratch.allocate(context.dtype, {n, H, nope_dim_ + value_dim_});
  linear_forward(stream, kv.merge_columns(), rows.columns(0, kv_rank_), kv_b_->operand, Write::kOverwrite);
  mla_keys_values_forward(stream, keys.k, keys.v, kv, rows.columns(kv_rank_, rope_dim_));
  return keys;
}

void Mla::attend_to_latents(Context& context, const Tensor& o, const Tensor& q, const Tensor& rows) const {
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t H = num_heads_, r = kv_rank_, width = r + rope_dim_;
  const Tensor latent_q = scratch.allocate(context.dtype, {1, H, width});
  const Tensor latent_o = scratch.allocate(context.dtype, {1, H, r});
  const Tensor lse = scratch.allocate(kv_a_norm_->value.dtype(), {1, H});
  const auto of_head = [](const Tensor& heads, int64_t head) {  // [1, H, size] -> [1, size]
    return heads.merge_columns().columns(head * heads.dim(2), heads.dim(2));
  };
  const auto weights_of = [&](int64_t head) {
    return kv_b_->value.rows(head * (nope_dim_ + value_dim_), nope_dim_ + value_dim_);
  };
  for (int64_t head = 0; head < H; ++head) {
    const Tensor from = of_head(q, head), to = of_head(latent_q, head);
    linear_backward_input(stream, to.columns(0, r), from.columns(0, nope_dim_), weights_of(head).rows(0, nope_dim_),
                          Write::kOverwrite);
    copy(stream, to.columns(r, rope_dim_), from.columns(nope_dim_, rope_dim_));
  }
  attention_forward(stream, latent_o, lse, latent_q, rows.split_columns(1, width),
                    rows.columns(0, r).split_columns(1, r), scale_, Documents::single(1),
                    Documents::single(rows.dim(0)));
  for (int64_t head = 0; head < H; ++head)
    linear_forward(stream, of_head(o, head), of_head(latent_o, head), weights_of(head).rows(nope_dim_, value_dim_),
                   Write::kOverwrite);
}

void Mla::attend_to_earlier_ranges(Context& context, PassedRows& passed, const Tensor& q, const Tensor& o,
                                   const Tensor& lse) const {
  passed.for_each_block([&](const EarlierRows& earlier) {
    Arena::Scope scope(context.stream.scratch());
    const int64_t first = earlier.first, length = earlier.length;
    const auto [k, v] = expand(context, earlier.rows);
    attention_prefix_forward(context.stream, o.rows(first, length), lse.rows(first, length), q.rows(first, length), k,
                             v, scale_);
  });
}

void Mla::earlier_ranges_backward(Context& context, PassedRows& passed, const EarlierRangesBackward& args) const {
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  passed.for_each_block([&](const EarlierRows& earlier) {
    Arena::Scope scope(scratch);
    const int64_t first = earlier.first, length = earlier.length, n = earlier.rows.dim(0);
    const auto [k, v] = expand(context, earlier.rows);
    const Tensor dk = scratch.allocate(context.dtype, k.shape());
    const Tensor dv = scratch.allocate(context.dtype, v.shape());
    fill_zero(stream, dk);
    fill_zero(stream, dv);
    attention_prefix_backward(stream, {.dq = args.dq.rows(first, length),
                                       .dk = dk,
                                       .dv = dv,
                                       .d_o = args.d_o.rows(first, length),
                                       .q = args.q.rows(first, length),
                                       .k = k,
                                       .v = v,
                                       .o = args.o.rows(first, length),
                                       .lse = args.lse.rows(first, length),
                                       .scale = scale_});
    const Tensor dkv = scratch.allocate(context.dtype, {n, num_heads_, nope_dim_ + value_dim_});
    const Tensor dk_pe = scratch.allocate(context.dtype, {n, rope_dim_});
    mla_keys_values_backward(stream, dkv, dk_pe, dk, dv);
    linear_backward_weight(stream, kv_b_->grad, dkv.merge_columns(), earlier.rows.columns(0, kv_rank_));
    linear_backward_input(stream, earlier.d_rows.columns(0, kv_rank_), dkv.merge_columns(), kv_b_->operand,
                          Write::kAccumulate);
    const Tensor d_shared = earlier.d_rows.columns(kv_rank_, rope_dim_);
    add(stream, d_shared, d_shared, dk_pe);
  });
}

double Mla::flops_per_token(int64_t row_length) const {
  return 2.0 * static_cast<double>(o_proj_->spec.units * (nope_dim_ + rope_dim_ + value_dim_)) *
         (static_cast<double>(row_length) + 1.0) / 2.0;
}

std::unique_ptr<DecodeState> Mla::make_decode_state(Context& context, int64_t max_tokens) const {
  auto state = std::make_unique<MlaDecodeState>();
  state->cache = context.activations.allocate(context.dtype, {max_tokens, kv_rank_ + rope_dim_});
  return state;
}

void Mla::extend(Context& context, DecodeState& state_base, const Sequence& sequence, const Tensor& x, Tensor y) const {
  auto& state = static_cast<MlaDecodeState&>(state_base);
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), H = num_heads_;
  CHECK(state.length + N <= state.cache.dim(0), "the decode state is full: ", state.cache.dim(0), " tokens");
  // 1. to 4. with new rows of the cache
  const Tensor added = state.cache.rows(state.length, N);
  const MlaProjections projections = project(context, scratch, sequence, x, added.columns(0, kv_rank_));
  copy(stream, added.columns(kv_rank_, rope_dim_), k_pe_columns(projections.proj));
  state.length += N;
  // 5. keys and values of all tokens so far and 6. attention
  const Tensor so_far = state.cache.rows(0, state.length);
  const Tensor o = scratch.allocate(context.dtype, {N, H, value_dim_});
  if (N == 1 && stream.device() == Device::kCpu) {
    attend_to_latents(context, o, projections.q, so_far);
  } else {
    const auto [k, v] = expand(context, so_far);
    const Tensor lse = scratch.allocate(kv_a_norm_->value.dtype(), {N, H});
    attention_forward(stream, o, lse, projections.q, k, v, scale_, sequence.documents, Documents::single(state.length));
  }
  // 7. output projection
  linear_forward(stream, y, o.merge_columns(), o_proj_->operand, Write::kOverwrite);
}

}  // namespace palimpsest
