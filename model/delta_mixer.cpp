#include "model/delta_mixer.h"

#include <utility>

#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/short_conv.h"
#include "model/sequence_states.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

namespace {

struct SavedDelta : Saved, DeltaProjections {
  Tensor o;     // [N, HV, V]
  Tensor rstd;  // [N, HV]
  DeltaRuleSaved delta;
  // Where sequence ranks cut the rows, for each slot of the rank:
  Tensor halo;         // [R, W-1, C]: inputs of the convolution from earlier ranges
  RangeStates states;  // of the delta rule
};

struct DeltaDecodeState : DecodeState {
  Tensor conv;   // [1, W-1, C]: the last inputs of the short convolution; absent when nothing is carried
  Tensor state;  // [1, HV, K, V]
};

}  // namespace

ParameterStack& declare_convolutions(ParameterRegistry& registry, const std::string& prefix,
                                     const DeltaMixerSizes& sizes, int64_t width) {
  const auto taps = [&](const char* name, int64_t heads, int64_t size) {
    return ParameterSpec{
        .name = prefix + name, .shape = {heads * size, 1, width}, .in_product = InProduct::kNo, .units = heads};
  };
  return registry.declare_stack({taps("q_conv1d.weight", sizes.num_heads, sizes.key_size),
                                 taps("k_conv1d.weight", sizes.num_heads, sizes.key_size),
                                 taps("v_conv1d.weight", sizes.num_value_heads, sizes.value_size)});
}

ParameterSpec decay_parameter(std::string name, int64_t size, int64_t heads, Init init) {
  return {.name = std::move(name),
          .shape = {size},
          .init = init,
          .decay = WeightDecay::kNo,
          .in_product = InProduct::kNo,
          .units = heads};
}

Tensor DeltaMixer::conv_columns(const Tensor& proj) const {
  return proj.columns(0, parts_.conv_channels());
}

Tensor DeltaMixer::decay_columns(const Tensor& proj) const {
  return proj.columns(parts_.conv_channels(), parts_.decay_rows);
}

Tensor DeltaMixer::gate_columns(const Tensor& proj) const {
  return proj.columns(parts_.conv_channels() + parts_.decay_rows, parts_.gate_rows);
}

Tensor DeltaMixer::output_gate(const DeltaProjections& projections) const {
  const auto& [whole, proj, decay, gate] = projections;
  return (gate.defined() ? gate : gate_columns(proj)).split_columns(parts_.num_value_heads, parts_.value_size);
}

int64_t DeltaMixer::padded_rows(Device device) const {
  const int64_t multiple = device == Device::kCuda ? 8 : 1;
  return (parts_.in_proj->value.dim(0) + multiple - 1) / multiple * multiple;
}

Tensor DeltaMixer::padded_weight(Context& context) const {
  const Tensor& weight = parts_.in_proj->operand;
  const int64_t rows = weight.dim(0), all = padded_rows(context.stream.device());
  if (rows == all) return weight;
  const Tensor padded = context.stream.scratch().allocate(context.dtype, {all, weight.dim(1)});
  copy(context.stream, padded.rows(0, rows), weight);
  fill_zero(context.stream, padded.rows(rows, all - rows));
  return padded;
}

void DeltaMixer::add_weight_gradient(Context& context, const Tensor& d_whole, const Tensor& x) const {
  Stream& stream = context.stream;
  const Tensor& grad = parts_.in_proj->grad;
  const int64_t rows = grad.dim(0), all = padded_rows(stream.device());
  if (rows == all) {
    linear_backward_weight(stream, grad, d_whole, x);
    return;
  }
  Arena::Scope scope(stream.scratch());
  const Tensor padded = stream.scratch().allocate(grad.dtype(), {all, grad.dim(1)});
  fill_zero(stream, padded);
  linear_backward_weight(stream, padded, d_whole, x);
  add(stream, grad, grad, padded.rows(0, rows));
}

DeltaProjections DeltaMixer::allocate_projections(const Context& context, Arena& arena, int64_t N) const {
  const DType dtype = context.dtype;
  const Tensor whole = arena.allocate(dtype, {N, padded_rows(context.stream.device())});
  DeltaProjections out = {.whole = whole, .proj = whole.columns(0, parts_.in_proj->value.dim(0))};
  if (parts_.decay_b) out.decay = arena.allocate(dtype, {N, parts_.decay_b->value.dim(0)});
  if (parts_.gate_b) out.gate = arena.allocate(dtype, {N, parts_.gate_b->value.dim(0)});
  return out;
}

DeltaProjections DeltaMixer::project(Context& context, Arena& arena, const LateTensor& x) const {
  Stream& stream = context.stream;
  DeltaProjections out = allocate_projections(context, arena, x.dim(0));
  // 1. all projections of x
  {
    Arena::Scope scope(stream.scratch());
    linear_forward_of_late(context, out.whole, x, padded_weight(context));
  }
  // 2. decay logits and output gate of low rank
  if (parts_.decay_b)
    linear_forward(stream, out.decay, decay_columns(out.proj), parts_.decay_b->operand, Write::kOverwrite);
  if (parts_.gate_b)
    linear_forward(stream, out.gate, gate_columns(out.proj), parts_.gate_b->operand, Write::kOverwrite);
  return out;
}

Tensor DeltaMixer::normed(Context& context, const Tensor& o, const Tensor& rstd,
                          const DeltaProjections& projections) const {
  const Tensor normed = context.stream.scratch().allocate(context.dtype, o.shape());
  gated_rms_norm_forward(context.stream, normed, rstd, o, output_gate(projections), parts_.o_norm->value,
                         parts_.norm_eps, parts_.gate_activation);
  return normed;
}

DeltaRuleInputs DeltaMixer::delta_inputs(const Tensor& convolved, const DeltaProjections& projections) const {
  const auto& [whole, proj, decay, gate] = projections;
  const int64_t H = parts_.num_heads, HV = parts_.num_value_heads, K = parts_.key_size, V = parts_.value_size;
  DeltaRuleInputs in;
  in.q = convolved.columns(0, H * K).split_columns(H, K);
  in.k = convolved.columns(H * K, H * K).split_columns(H, K);
  in.v = convolved.columns(2 * H * K, HV * V).split_columns(HV, V);
  if (parts_.beta_rows > 0) in.beta_logit = proj.columns(proj.dim(1) - parts_.beta_rows, parts_.beta_rows);
  if (parts_.dt_bias && parts_.options.decay == Decay::kVector) {
    in.gate_logit = (decay.defined() ? decay : decay_columns(proj)).split_columns(HV, K);
    in.dt_bias = parts_.dt_bias->value.view({HV, K});
  } else if (parts_.dt_bias) {
    in.gate_logit = decay.defined() ? decay : decay_columns(proj);
    in.dt_bias = parts_.dt_bias->value;
  }
  if (parts_.A_log) in.A_log = parts_.A_log->value;
  return in;
}

Tensor DeltaMixer::convolve(Context& context, const Sequence& sequence, const Tensor& proj, const Tensor& halo) const {
  if (!parts_.conv) return conv_columns(proj);
  const Tensor convolved = context.stream.scratch().allocate(context.dtype, {proj.dim(0), parts_.conv_channels()});
  short_conv_forward(context.stream, convolved, conv_columns(proj), parts_.conv->value, halo, sequence.documents,
                     ConvActivation::kSilu);
  return convolved;
}

std::unique_ptr<Saved> DeltaMixer::forward(Context& context, const Sequence& sequence, const LateTensor& x,
                                           const AwaitedRows& y, Write write) const {
  Stream& stream = context.stream;
  Arena& keep = context.activations;
  Arena::Scope scope(stream.scratch());
  const int64_t N = x.dim(0), HV = parts_.num_value_heads, V = parts_.value_size;
  auto saved = std::make_unique<SavedDelta>();
  // 1. and 2.
  static_cast<DeltaProjections&>(*saved) = project(context, keep, x);
  // 3. short convolution of q, k, v, from the inputs of earlier ranges on
  if (sequence.crossings.cut() && window() > 0) {
    saved->halo = keep.allocate(context.dtype, {sequence.crossings.num_slots, window(), parts_.conv_channels()});
    exchange_halo(context, sequence, saved->halo, conv_columns(saved->proj));
  }
  const Tensor convolved = convolve(context, sequence, saved->proj, saved->halo);
  // 4. delta rule, from the states of earlier ranges on
  DeltaRuleInputs in = delta_inputs(convolved, *saved);
  if (sequence.crossings.cut()) {
    saved->states = allocate_range_states(keep, statistics_dtype(), sequence, delta_rule_shape(in, sequence.documents));
    exchange_states(context, sequence, saved->states, in, parts_.options);
    in.initial_state = saved->states.entering;
  }
  saved->o = keep.allocate(context.dtype, {N, HV, V});
  saved->delta =
      allocate_delta_rule_saved(keep, context.dtype, delta_rule_shape(in, sequence.documents), parts_.options);
  delta_rule_forward(stream, {.o = saved->o}, saved->delta, in, parts_.options, sequence.documents);
  // 5. gated norm
  saved->rstd = keep.allocate(statistics_dtype(), {N, HV});
  const Tensor heads = normed(context, saved->o, saved->rstd, *saved);
  // 6. output projection
  if (y.defined()) linear_forward_to_awaited(context, y, heads.merge_columns(), parts_.o_proj->operand, write);
  return saved;
}

void DeltaMixer::backward(Context& context, const Sequence& sequence, const Saved& saved_base, const LateTensor& x,
                          const Tensor& dy, const AwaitedTensor& dx) const {
  const auto& saved = static_cast<const SavedDelta&>(saved_base);
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), HV = parts_.num_value_heads, V = parts_.value_size;
  const DeltaProjections d_projections = allocate_projections(context, scratch, N);
  const auto& [d_whole, d_proj, d_decay, d_gate] = d_projections;
  const Tensor d_o = scratch.allocate(context.dtype, {N, HV, V});
  const Tensor heads = scratch.allocate(context.dtype, {N, HV, V});  // normed, computed again
  {
    Arena::Scope inner(scratch);
    const Tensor d_normed = scratch.allocate(context.dtype, {N, HV, V});
    // 6.
    linear_backward_input(stream, d_normed.merge_columns(), dy, parts_.o_proj->operand, Write::kOverwrite);
    // 5.
    gated_rms_norm_backward(stream, d_o, output_gate(d_projections), parts_.o_norm->grad, d_normed, saved.o,
                            output_gate(saved), parts_.o_norm->value, saved.rstd, parts_.gate_activation, heads);
  }
  // 4. recomputes the convolution
  const Tensor convolved = convolve(context, sequence, saved.proj, saved.halo);
  const Tensor d_convolved =
      parts_.conv ? scratch.allocate(context.dtype, {N, parts_.conv_channels()}) : conv_columns(d_proj);
  DeltaRuleInputs in = delta_inputs(convolved, saved);
  Tensor d_final_state;
  if (sequence.crossings.cut()) {
    in.initial_state = saved.states.entering;
    d_final_state = scratch.allocate(statistics_dtype(), in.initial_state.shape());
    exchange_state_gradients(context, sequence, saved.states, d_final_state, d_o, saved.delta, in, parts_.options);
  }
  const DeltaRuleInputs d_in = delta_inputs(d_convolved, d_projections);
  DeltaRuleGrads grads = {
      .dq = d_in.q, .dk = d_in.k, .dv = d_in.v, .dbeta_logit = d_in.beta_logit, .dgate_logit = d_in.gate_logit};
  if (parts_.A_log) grads.dA_log = parts_.A_log->grad;
  if (parts_.dt_bias) grads.ddt_bias = parts_.dt_bias->grad.view(in.dt_bias.shape());
  delta_rule_backward(stream, grads, d_o, d_final_state, saved.delta, in, parts_.options, sequence.documents);
  // 3.
  if (parts_.conv) {
    Tensor d_halo;
    if (saved.halo.defined()) {
      d_halo = scratch.allocate(context.dtype, saved.halo.shape());
      fill_zero(stream, d_halo);
    }
    short_conv_backward(stream, conv_columns(d_proj), parts_.conv->grad, d_halo, d_convolved, conv_columns(saved.proj),
                        parts_.conv->value, saved.halo, {}, sequence.documents, ConvActivation::kSilu);
    if (d_halo.defined()) exchange_halo_gradients(context, sequence, conv_columns(d_proj), d_halo);
  }
  // 2.
  if (parts_.gate_b) {
    linear_backward_weight(stream, parts_.gate_b->grad, d_gate, gate_columns(saved.proj));
    linear_backward_input(stream, gate_columns(d_proj), d_gate, parts_.gate_b->operand, Write::kOverwrite);
  }
  if (parts_.decay_b) {
    linear_backward_weight(stream, parts_.decay_b->grad, d_decay, decay_columns(saved.proj));
    linear_backward_input(stream, decay_columns(d_proj), d_decay, parts_.decay_b->operand, Write::kOverwrite);
  }
  // 1.
  const int64_t more = d_whole.dim(1) - d_proj.dim(1);
  if (more > 0) fill_zero(stream, d_whole.columns(d_proj.dim(1), more));
  linear_backward_input(stream, dx, d_whole, padded_weight(context), Write::kOverwrite);
  dx.filled();
  // 6.
  linear_backward_weight(stream, parts_.o_proj->grad, dy, heads.merge_columns());
  dx.may_be_taken();
  add_weight_gradient(context, d_whole, x);
}

double DeltaMixer::flops_per_token(int64_t) const {
  return static_cast<double>(parts_.o_proj->spec.units) * delta_rule_flops(parts_.key_size, parts_.value_size);
}

std::unique_ptr<DecodeState> DeltaMixer::make_decode_state(Context& context, int64_t) const {
  auto state = std::make_unique<DeltaDecodeState>();
  if (window() > 0) {
    state->conv = context.activations.allocate(context.dtype, {1, window(), parts_.conv_channels()});
    fill_zero(context.stream, state->conv);
  }
  state->state =
      context.activations.allocate(statistics_dtype(), {1, parts_.num_value_heads, parts_.key_size, parts_.value_size});
  fill_zero(context.stream, state->state);
  return state;
}

void DeltaMixer::extend(Context& context, DecodeState& state_base, const Sequence& sequence, const Tensor& x,
                        Tensor y) const {
  auto& state = static_cast<DeltaDecodeState&>(state_base);
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = x.dim(0), HV = parts_.num_value_heads, V = parts_.value_size;
  // 1. and 2.
  const DeltaProjections projections = project(context, scratch, x);
  // 3. convolution, continuing from the last inputs
  const Tensor convolved = convolve(context, sequence, projections.proj, state.conv);
  if (state.conv.defined())
    short_conv_final_state(stream, state.conv, conv_columns(projections.proj), state.conv, sequence.documents);
  // 4. recurrence, continuing from the state
  DeltaRuleInputs in = delta_inputs(convolved, projections);
  in.initial_state = state.state;
  DeltaRuleOptions options = parts_.options;
  options.save_level = SaveLevel::kNothing;
  if (N == 1) options.form = DeltaForm::kRecurrence;
  const Tensor o = scratch.allocate(context.dtype, {N, HV, V});
  const Tensor next_state = scratch.allocate(state.state.dtype(), state.state.shape());
  delta_rule_forward(stream, {.o = o, .final_state = next_state}, {}, in, options, sequence.documents);
  copy(stream, state.state, next_state);
  // 5. and 6. gated norm and output projection
  const Tensor rstd = scratch.allocate(statistics_dtype(), {N, HV});
  linear_forward(stream, y, normed(context, o, rstd, projections).merge_columns(), parts_.o_proj->operand,
                 Write::kOverwrite);
}

}  // namespace palimpsest
