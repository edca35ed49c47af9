#include "model/attention.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/rms_norm.h"
#include "model/sequence_attention.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

namespace {

struct SavedAttention : Saved, AttentionHeads {
  Tensor o;    // [N, H, d], before the gate
  Tensor lse;  // [N, H]
};

struct AttentionDecodeState : DecodeState {
  Tensor k, v;  // [max_tokens, HKV, d], k normalised and rotated
  int64_t length = 0;
};

}  // namespace

Attention::Attention(const ModelConfig& config, const std::string& prefix, ParameterRegistry& registry)
    : num_heads_(registry.tensor_share().units(config.attention.num_heads, "model.attention.num_heads")),
      num_kv_heads_(registry.tensor_share().shared_units(
          config.attention.num_kv_heads.value_or(config.attention.num_heads), "model.attention.num_kv_heads")),
      head_dim_(config.attention.head_dim),
      output_gate_(config.attention.output_gate),
      scale_(1.0 / std::sqrt(static_cast<double>(head_dim_))),
      norm_eps_(config.norm_eps),
      norm_weight_(config.norm),
      rope_(config.attention.rope, 0, config.attention.rope_dim.value_or(head_dim_), config.attention.rope_theta,
            config.attention.rope_scaling) {
  const int64_t D = config.hidden_size, H = config.attention.num_heads, d = head_dim_;
  const int64_t HKV = config.attention.num_kv_heads.value_or(H);
  const std::string p = prefix + "self_attn.";
  std::vector<ParameterSpec> projections = {{.name = p + "q_proj.weight", .shape = {H * d, D}, .units = H},
                                            {.name = p + "k_proj.weight", .shape = {HKV * d, D}, .units = HKV},
                                            {.name = p + "v_proj.weight", .shape = {HKV * d, D}, .units = HKV}};
  if (output_gate_) projections.push_back({.name = p + "g_proj.weight", .shape = {H * d, D}, .units = H});
  in_proj_ = &registry.declare_stack(std::move(projections));
  if (config.attention.qk_norm) {
    q_norm_ = &registry.declare(norm_weight(p + "q_norm.weight", d, TensorSplit::kPartialOverHeads, config.norm));
    k_norm_ = &registry.declare(norm_weight(p + "k_norm.weight", d, TensorSplit::kPartialOverHeads, config.norm));
  }
  o_proj_ =
      &registry.declare({.name = p + "o_proj.weight", .shape = {D, H * d}, .split = TensorSplit::kColumns, .units = H});
}

Tensor Attention::q_columns(const Tensor& proj) const {
  return proj.columns(0, num_heads_ * head_dim_).split_columns(num_heads_, head_dim_);
}

Tensor Attention::k_columns(const Tensor& proj) const {
  return proj.columns(num_heads_ * head_dim_, num_kv_heads_ * head_dim_).split_columns(num_kv_heads_, head_dim_);
}

Tensor Attention::v_columns(const Tensor& proj) const {
  return proj.columns((num_heads_ + num_kv_heads_) * head_dim_, num_kv_heads_ * head_dim_)
      .split_columns(num_kv_heads_, head_dim_);
}

Tensor Attention::gate_columns(const Tensor& proj) const {
  if (!output_gate_) return {};
  return proj.columns((num_heads_ + 2 * num_kv_heads_) * head_dim_, num_heads_ * head_dim_)
      .split_columns(num_heads_, head_dim_);
}

Tensor Attention::passed_keys(const Tensor& rows) const {
  return rows.columns(0, num_kv_heads_ * head_dim_).split_columns(num_kv_heads_, head_dim_);
}

Tensor Attention::passed_values(const Tensor& rows) const {
  return rows.columns(num_kv_heads_ * head_dim_, num_kv_heads_ * head_dim_).split_columns(num_kv_heads_, head_dim_);
}

Tensor Attention::normalise(Context& context, Arena& arena, const Tensor& x, const Parameter* norm,
                            Tensor& rstd) const {
  if (!norm) return x;
  rstd = arena.allocate(norm->value.dtype(), {x.dim(0), x.dim(1)});
  const Tensor y = arena.allocate(context.dtype, x.shape());
  rms_norm_forward(context.stream, y, rstd, x, norm->value, norm_eps_, norm_weight_);
  return y;
}

AttentionHeads Attention::heads(Context& context, Arena& arena, const Sequence& sequence, const LateTensor& x) const {
  Stream& stream = context.stream;
  AttentionHeads heads;
  // 1. all projections of x
  heads.proj = arena.allocate(context.dtype, {x.dim(0), in_proj_->value.dim(0)});
  linear_forward_of_late(context, heads.proj, x, in_proj_->operand);
  // 2. norms of queries and keys
  heads.q = normalise(context, arena, q_columns(heads.proj), q_norm_, heads.q_rstd);
  heads.k = normalise(context, arena, k_columns(heads.proj), k_norm_, heads.k_rstd);
  // 3. rotation, in place
  rope_.forward(stream, heads.q, sequence.positions);
  rope_.forward(stream, heads.k, sequence.positions);
  return heads;
}

std::unique_ptr<Saved> Attention::forward(Context& context, const Sequence& sequence, const LateTensor& x,
                                          const AwaitedRows& y, Write write) const {
  Stream& stream = context.stream;
  Arena& keep = context.activations;
  Arena::Scope scope(stream.scratch());
  const int64_t N = x.dim(0), H = num_heads_, d = head_dim_;
  auto saved = std::make_unique<SavedAttention>();
  // 1. to 3.
  static_cast<AttentionHeads&>(*saved) = heads(context, keep, sequence, x);
  // 4. attention
  saved->o = keep.allocate(context.dtype, {N, H, d});
  saved->lse = keep.allocate(statistics_dtype(), {N, H});
  {
    Arena::Scope inner(stream.scratch());
    std::optional<PassedRows> passed;  // under way during the attention to own keys
    if (sequence.crossings.cut())
      passed.emplace(context, sequence, std::vector{saved->k.merge_columns(), v_columns(saved->proj).merge_columns()});
    attention_forward(stream, saved->o, saved->lse, saved->q, saved->k, v_columns(saved->proj), scale_,
                      sequence.documents, sequence.documents);
    if (passed)
      passed->for_each_block([&](const EarlierRows& earlier) {
        const int64_t first = earlier.first, length = earlier.length;
        attention_prefix_forward(stream, saved->o.rows(first, length), saved->lse.rows(first, length),
                                 saved->q.rows(first, length), passed_keys(earlier.rows), passed_values(earlier.rows),
                                 scale_);
      });
  }
  if (!y.defined()) return saved;
  // 5. output gate
  Tensor gated = saved->o;
  if (output_gate_) {
    gated = stream.scratch().allocate(context.dtype, {N, H, d});
    sigmoid_gate_forward(stream, gated, saved->o, gate_columns(saved->proj));
  }
  // 6. output projection
  linear_forward_to_awaited(context, y, gated.merge_columns(), o_proj_->operand, write);
  return saved;
}

void Attention::backward(Context& context, const Sequence& sequence, const Saved& saved_base, const LateTensor& x,
                         const Tensor& dy, const AwaitedTensor& dx) const {
  const auto& saved = static_cast<const SavedAttention&>(saved_base);
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), H = num_heads_, HKV = num_kv_heads_, d = head_dim_;
  const Tensor d_proj = scratch.allocate(context.dtype, saved.proj.shape());
  const Tensor d_o = scratch.allocate(context.dtype, {N, H, d});
  // 6.
  linear_backward_input(stream, d_o.merge_columns(), dy, o_proj_->operand, Write::kOverwrite);
  // 5.
  if (output_gate_) sigmoid_gate_backward(stream, d_o, gate_columns(d_proj), d_o, saved.o, gate_columns(saved.proj));
  // 4.
  const Tensor dq = q_norm_ ? scratch.allocate(context.dtype, {N, H, d}) : q_columns(d_proj);
  const Tensor dk = k_norm_ ? scratch.allocate(context.dtype, {N, HKV, d}) : k_columns(d_proj);
  {
    Arena::Scope inner(scratch);
    std::optional<PassedRows> passed;
    if (sequence.crossings.cut())
      passed.emplace(context, sequence, std::vector{saved.k.merge_columns(), v_columns(saved.proj).merge_columns()},
                     PassedRows::Gradients::kYes);
    attention_backward(stream,
                       {.dq = dq,
                        .dk = dk,
                        .dv = v_columns(d_proj),
                        .d_o = d_o,
                        .q = saved.q,
                        .k = saved.k,
                        .v = v_columns(saved.proj),
                        .o = saved.o,
                        .lse = saved.lse,
                        .scale = scale_},
                       sequence.documents);
    if (passed) {
      passed->for_each_block([&](const EarlierRows& earlier) {
        const int64_t first = earlier.first, length = earlier.length;
        attention_prefix_backward(stream, {.dq = dq.rows(first, length),
                                           .dk = passed_keys(earlier.d_rows),
                                           .dv = passed_values(earlier.d_rows),
                                           .d_o = d_o.rows(first, length),
                                           .q = saved.q.rows(first, length),
                                           .k = passed_keys(earlier.rows),
                                           .v = passed_values(earlier.rows),
                                           .o = saved.o.rows(first, length),
                                           .lse = saved.lse.rows(first, length),
                                           .scale = scale_});
      });
      add(stream, dk, dk, passed_keys(passed->d_own()));
      add(stream, v_columns(d_proj), v_columns(d_proj), passed_values(passed->d_own()));
    }
  }
  // 3.
  rope_.backward(stream, dq, sequence.positions);
  rope_.backward(stream, dk, sequence.positions);
  // 2.
  if (q_norm_)
    rms_norm_backward(stream, q_columns(d_proj), q_norm_->grad, dq, q_columns(saved.proj), q_norm_->value, saved.q_rstd,
                      norm_weight_);
  if (k_norm_)
    rms_norm_backward(stream, k_columns(d_proj), k_norm_->grad, dk, k_columns(saved.proj), k_norm_->value, saved.k_rstd,
                      norm_weight_);
  // 1.
  linear_backward_input(stream, dx, d_proj, in_proj_->operand, Write::kOverwrite);
  dx.filled();
  // 6. recomputes the gated heads, over the gradients of them
  if (output_gate_) sigmoid_gate_forward(stream, d_o, saved.o, gate_columns(saved.proj));
  linear_backward_weight(stream, o_proj_->grad, dy, (output_gate_ ? d_o : saved.o).merge_columns());
  dx.may_be_taken();
  linear_backward_weight(stream, in_proj_->grad, d_proj, x);
}

double Attention::flops_per_token(int64_t row_length) const {
  return 2.0 * static_cast<double>(o_proj_->spec.units * 2 * head_dim_) * (static_cast<double>(row_length) + 1.0) / 2.0;
}

std::unique_ptr<DecodeState> Attention::make_decode_state(Context& context, int64_t max_tokens) const {
  auto state = std::make_unique<AttentionDecodeState>();
  state->k = context.activations.allocate(context.dtype, {max_tokens, num_kv_heads_, head_dim_});
  state->v = context.activations.allocate(context.dtype, {max_tokens, num_kv_heads_, head_dim_});
  return state;
}

void Attention::extend(Context& context, DecodeState& state_base, const Sequence& sequence, const Tensor& x,
                       Tensor y) const {
  auto& state = static_cast<AttentionDecodeState&>(state_base);
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), H = num_heads_, d = head_dim_;
  CHECK(state.length + N <= state.k.dim(0), "the decode state is full: ", state.k.dim(0), " tokens");
  const AttentionHeads added = heads(context, scratch, sequence, x);
  copy(stream, state.k.rows(state.length, N), added.k);
  copy(stream, state.v.rows(state.length, N), v_columns(added.proj));
  state.length += N;
  const Tensor o = scratch.allocate(context.dtype, {N, H, d});
  const Tensor lse = scratch.allocate(statistics_dtype(), {N, H});
  attention_forward(stream, o, lse, added.q, state.k.rows(0, state.length), state.v.rows(0, state.length), scale_,
                    sequence.documents, Documents::single(state.length));
  if (output_gate_) sigmoid_gate_forward(stream, o, o, gate_columns(added.proj));
  linear_forward(stream, y, o.merge_columns(), o_proj_->operand, Write::kOverwrite);
}

}  // namespace palimpsest
