#include "kernels/delta_rule.h"

#include <algorithm>

#include "kernels/op_check.h"

namespace palimpsest {

namespace {

bool has_gate(const DeltaRuleOptions& options) {  // one that reads and trains its tensors
  return options.decay != Decay::kNone && options.gate != Gate::kFixed;
}
bool has_delta(const DeltaRuleOptions& options) {
  return options.delta_rule == DeltaRule::kOn;
}

// A tensor that the options call for (rows may be spaced) or rule out.
void check_presence(const Stream& stream, const char* name, const Tensor& tensor, bool wanted, DType dtype,
                    const Shape& shape) {
  if (wanted) {
    check_operand(stream, name, tensor, dtype, shape);
  } else {
    CHECK(!tensor.defined(), name, " is ", tensor.str(), ", but these options have no such tensor");
  }
}

void check_optional_state(const Stream& stream, const char* name, const Tensor& state, DType dtype,
                          const Shape& shape) {
  if (state.defined()) check_contiguous_operand(stream, name, state, dtype, shape);
}

Shape gate_shape(const DeltaRuleShape& s, Decay decay) {
  return decay == Decay::kVector ? Shape{s.N, s.HV, s.K} : Shape{s.N, s.HV};
}
Shape dt_bias_shape(const DeltaRuleShape& s, Decay decay) {
  return decay == Decay::kVector ? Shape{s.HV, s.K} : Shape{s.HV};
}
Shape state_shape(const DeltaRuleShape& s) {
  return {s.num_states, s.HV, s.K, s.V};
}

void check_inputs(const Stream& stream, const DeltaRuleInputs& in, const DeltaRuleShape& s,
                  const DeltaRuleOptions& options, const Documents& documents) {
  const DType dtype = floating_dtype(stream, "q", in.q), parameters = statistics_dtype(dtype);
  check_operand(stream, "q", in.q, dtype, {s.N, s.H, s.K});
  check_operand(stream, "k", in.k, dtype, {s.N, s.H, s.K});
  check_operand(stream, "v", in.v, dtype, {s.N, s.HV, s.V});
  check_presence(stream, "beta_logit", in.beta_logit, has_delta(options), dtype, {s.N, s.HV});
  check_presence(stream, "gate_logit", in.gate_logit, has_gate(options), dtype, gate_shape(s, options.decay));
  check_presence(stream, "A_log", in.A_log, has_gate(options), parameters, {s.HV});
  check_presence(stream, "dt_bias", in.dt_bias, has_gate(options), parameters, dt_bias_shape(s, options.decay));
  if (has_gate(options)) {
    check_contiguous("A_log", in.A_log);
    check_contiguous("dt_bias", in.dt_bias);
  }
  check_optional_state(stream, "initial_state", in.initial_state, parameters, state_shape(s));
  check_covers(documents, "q", s.N);
}

struct SavedShapes {
  bool m, aqk, all;
  Shape matrix, x, states;
};

SavedShapes saved_shapes(const DeltaRuleShape& s, const DeltaRuleOptions& options) {
  const bool chunkwise = options.form == DeltaForm::kChunkwise;
  const bool matrices = chunkwise && options.save_level >= SaveLevel::kMatrices;
  const int64_t C = options.chunk_size;
  return {.m = matrices && has_delta(options),
          .aqk = matrices,
          .all = chunkwise && options.save_level == SaveLevel::kAll,
          .matrix = {s.N, s.HV, C},
          .x = {s.N, s.HV, s.V},
          .states = {std::max<int64_t>(s.N - 1, 0) / C, s.HV, s.K, s.V}};
}

void check_saved(const Stream& stream, const DeltaRuleSaved& saved, DType dtype, const DeltaRuleShape& s,
                 const DeltaRuleOptions& options) {
  const SavedShapes shapes = saved_shapes(s, options);
  check_presence(stream, "saved m", saved.m, shapes.m, dtype, shapes.matrix);
  check_presence(stream, "saved aqk", saved.aqk, shapes.aqk, dtype, shapes.matrix);
  check_presence(stream, "saved x", saved.x, shapes.all, dtype, shapes.x);
  check_presence(stream, "saved states", saved.states, shapes.all, statistics_dtype(dtype), shapes.states);
  if (shapes.all) check_contiguous("saved states", saved.states);
}

}  // namespace

DeltaRuleShape delta_rule_shape(const DeltaRuleInputs& in, const Documents& documents) {
  CHECK(in.q.num_dims() == 3 && in.v.num_dims() == 3, "q is ", in.q.str(), " and v is ", in.v.str(),
        ", expected [N, H, K] and [N, HV, V]");
  return {.N = in.q.dim(0),
          .H = in.q.dim(1),
          .HV = in.v.dim(1),
          .K = in.q.dim(2),
          .V = in.v.dim(2),
          .num_states = documents.num_states()};
}

DeltaRuleSaved allocate_delta_rule_saved(Arena& arena, DType dtype, const DeltaRuleShape& shape,
                                         const DeltaRuleOptions& options) {
  const SavedShapes shapes = saved_shapes(shape, options);
  DeltaRuleSaved saved;
  if (shapes.m) saved.m = arena.allocate(dtype, shapes.matrix);
  if (shapes.aqk) saved.aqk = arena.allocate(dtype, shapes.matrix);
  if (shapes.all) {
    saved.x = arena.allocate(dtype, shapes.x);
    saved.states = arena.allocate(statistics_dtype(dtype), shapes.states);
  }
  return saved;
}

void check_delta_rule_supported(Device device, const DeltaRuleShape& s, const DeltaRuleOptions& options) {
  const char* where = name_of(device);
  if (s.K < 1 || s.K > kMaxKeySize)
    throw_user_error("delta rule on ", where, ": key size ", s.K, " is not supported; supported are 1 to ",
                     kMaxKeySize);
  if (s.V < 1)
    throw_user_error("delta rule on ", where, ": value size ", s.V, " is not supported; supported is any from 1");
  if (s.H < 1 || s.HV < 1 || s.HV % s.H != 0)
    throw_user_error("delta rule on ", where, ": ", s.HV, " value heads on ", s.H,
                     " key heads are not supported; the value heads must be a multiple of the key heads");
  const int64_t C = options.chunk_size;
  if (C != 16 && C != 32 && C != 64)
    throw_user_error("delta rule on ", where, ": chunk size ", C, " is not supported; supported are 16, 32 and 64");
  if (options.gate == Gate::kFixed && options.decay != Decay::kScalar)
    throw_user_error("delta rule: the fixed gate needs scalar decay");
  if (options.decay != Decay::kNone && options.gate == Gate::kBounded && !(options.gate_lower_bound < 0))
    throw_user_error("delta rule: gate_lower_bound ", options.gate_lower_bound, " must be below 0");
  if (has_delta(options) && !(options.beta_scale > 0))
    throw_user_error("delta rule: beta_scale ", options.beta_scale, " must be above 0");
  if (options.l2norm_qk && !(options.l2norm_eps > 0))
    throw_user_error("delta rule: l2norm_eps ", options.l2norm_eps, " must be above 0");
}

void delta_rule_forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved,
                        const DeltaRuleInputs& in, const DeltaRuleOptions& options, const Documents& documents) {
  const DeltaRuleShape s = delta_rule_shape(in, documents);
  const DType dtype = in.q.dtype(), parameters = statistics_dtype(dtype);
  check_delta_rule_supported(stream.device(), s, options);
  check_inputs(stream, in, s, options, documents);
  CHECK(out.o.defined() || out.final_state.defined(), "neither o nor final_state is wanted");
  if (out.o.defined()) check_operand(stream, "o", out.o, dtype, {s.N, s.HV, s.V});
  check_optional_state(stream, "final_state", out.final_state, parameters, state_shape(s));
  check_saved(stream, saved, dtype, s, options);
  PALIMPSEST_DISPATCH_ALWAYS(stream, delta_rule_forward(stream, out, saved, in, options, documents));
}

void delta_rule_backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o, const Tensor& d_final_state,
                         const DeltaRuleSaved& saved, const DeltaRuleInputs& in, const DeltaRuleOptions& options,
                         const Documents& documents) {
  const DeltaRuleShape s = delta_rule_shape(in, documents);
  const DType dtype = in.q.dtype(), parameters = statistics_dtype(dtype);
  const bool all = grads.dq.defined() || !grads.d_initial_state.defined();
  const bool gate = all && has_gate(options);
  check_delta_rule_supported(stream.device(), s, options);
  check_inputs(stream, in, s, options, documents);
  check_saved(stream, saved, dtype, s, options);
  check_operand(stream, "d_o", d_o, dtype, {s.N, s.HV, s.V});
  check_optional_state(stream, "d_final_state", d_final_state, parameters, state_shape(s));
  check_presence(stream, "dq", grads.dq, all, dtype, {s.N, s.H, s.K});
  check_presence(stream, "dk", grads.dk, all, dtype, {s.N, s.H, s.K});
  check_presence(stream, "dv", grads.dv, all, dtype, {s.N, s.HV, s.V});
  check_presence(stream, "dbeta_logit", grads.dbeta_logit, all && has_delta(options), dtype, {s.N, s.HV});
  check_presence(stream, "dgate_logit", grads.dgate_logit, gate, dtype, gate_shape(s, options.decay));
  check_presence(stream, "dA_log", grads.dA_log, gate, parameters, {s.HV});
  check_presence(stream, "ddt_bias", grads.ddt_bias, gate, parameters, dt_bias_shape(s, options.decay));
  if (gate) {
    check_contiguous("dA_log", grads.dA_log);
    check_contiguous("ddt_bias", grads.ddt_bias);
  }
  check_optional_state(stream, "d_initial_state", grads.d_initial_state, parameters, state_shape(s));
  PALIMPSEST_DISPATCH_ALWAYS(stream,
                             delta_rule_backward(stream, grads, d_o, d_final_state, saved, in, options, documents));
}

}  // namespace palimpsest
