// One case on a device: a Device gives memory and runs the op (the GPU here; anything that executes the kernels can
// take its place). Outputs and workspace are filled with NaN first.
#pragma once

#include <array>
#include <memory>

#include "tests/kernels/cuda/delta_rule_sm90_case.h"

namespace palimpsest::cuda {

// What of forward is kept for backward.
enum class Keep : int { kNothing, kMatrices, kAll };

template <class Device>
class DeviceCase {
 public:
  DeviceCase(Device& device, const DeltaRuleCase& c, const DeltaRuleHost& host, Keep keep)
      : device_(device), case_(c), host_(host) {
    op_.N = c.N();
    op_.H = c.H;
    op_.HV = c.HV;
    op_.K = c.K;
    op_.V = c.V;
    op_.num_documents = static_cast<int64_t>(c.lengths.size());
    std::vector<int64_t> offsets(1, 0);
    for (const int64_t length : c.lengths) offsets.push_back(offsets.back() + length);
    op_.offsets = upload(offsets);
    if (!c.entering.empty()) {
      op_.entering = upload(c.entering);
      op_.leaving = upload(c.leaving);
    }
    op_.vector_decay = c.vector_decay;
    op_.gate = c.gate;
    op_.constant_decays = c.gate == DeltaGateKind::kConstant;
    op_.gate_lower_bound = c.gate_lower_bound;
    op_.beta_scale = c.beta_scale;
    op_.scale = 1.0F / std::sqrt(static_cast<float>(c.K));
    op_.l2norm_qk = c.l2norm;
    op_.segment = c.segment;
    op_.q = rows_in(host.q);
    op_.k = rows_in(host.k);
    op_.v = rows_in(host.v);
    op_.beta_logit = rows_in(host.beta_logit);
    op_.d_o = rows_in(host.d_o);
    if (c.gate != DeltaGateKind::kConstant) {
      op_.gate_logit = rows_in(host.gate_logit);
      op_.A_log = upload(host.A_log);
      op_.dt_bias = upload(host.dt_bias);
      op_.dA_log = upload(std::vector<float>(host.A_log.size(), 0.0F));
      op_.ddt_bias = upload(std::vector<float>(host.dt_bias.size(), 0.0F));
      op_.dgate_logit = rows_out(host.gate_logit);
    }
    op_.o = rows_out(host.v);
    op_.dq = rows_out(host.q);
    op_.dk = rows_out(host.k);
    op_.dv = rows_out(host.v);
    op_.dbeta_logit = rows_out(host.beta_logit);
    if (c.states) {
      op_.initial_state = upload(host.initial_state);
      op_.d_final_state = upload(host.d_final_state);
      op_.final_state = static_cast<float*>(room(static_cast<int64_t>(host.initial_state.size()) * 4));
      op_.d_initial_state = static_cast<float*>(room(static_cast<int64_t>(host.initial_state.size()) * 4));
    }
    const int64_t rows = op_.N * op_.HV;
    if (keep != Keep::kNothing) {
      op_.m = saved(rows * 64);
      op_.aqk = saved(rows * 64);
    }
    if (keep == Keep::kAll) {
      op_.x = saved(rows * op_.V);
      op_.states = saved(std::max<int64_t>(op_.N - 1, 0) / 64 * op_.HV * op_.K * op_.V);
    }
    workspace_ = room(std::max(delta_rule_sm90_forward_workspace(op_), delta_rule_sm90_backward_workspace(op_)));
  }

  const DeltaRuleSm90& op() const { return op_; }
  void* workspace() const { return workspace_; }

  DeltaRuleResults results() const {
    DeltaRuleResults r;
    r.o = download(op_.o.data, host_.v);
    r.dq = download(op_.dq.data, host_.q);
    r.dk = download(op_.dk.data, host_.k);
    r.dv = download(op_.dv.data, host_.v);
    r.dbeta_logit = download(op_.dbeta_logit.data, host_.beta_logit);
    if (op_.dgate_logit.data != nullptr) {
      r.dgate_logit = download(op_.dgate_logit.data, host_.gate_logit);
      r.dA_log = download(op_.dA_log, host_.A_log.size());
      r.ddt_bias = download(op_.ddt_bias, host_.dt_bias.size());
    }
    if (op_.final_state != nullptr) {
      r.final_state = states(op_.final_state, case_.leaving);
      r.d_initial_state = states(op_.d_initial_state, case_.entering);
    }
    return r;
  }

  // The same call for the states alone: without o and what is kept, and without gradients but theirs.
  DeltaRuleSm90 states_alone() const {
    DeltaRuleSm90 op = op_;
    op.o = op.dq = op.dk = op.dv = op.dbeta_logit = op.dgate_logit = {};
    op.m = op.aqk = op.x = op.states = nullptr;
    op.dA_log = op.ddt_bias = nullptr;
    return op;
  }

 private:
  // Rows that no document has must be as they were, NaN; they come back as 0.
  std::vector<double> states(const float* data, const std::vector<int64_t>& rows) const {
    std::vector<double> all = download(data, host_.initial_state.size());
    const auto num_rows = case_.num_states();
    const size_t size = all.size() / static_cast<size_t>(num_rows);
    for (int64_t row = 0; row < num_rows && !rows.empty(); ++row) {
      if (std::find(rows.begin(), rows.end(), row) != rows.end()) continue;
      for (size_t i = static_cast<size_t>(row) * size; i < static_cast<size_t>(row + 1) * size; ++i)
        all[i] = std::isnan(all[i]) ? 0.0 : 1.0;
    }
    return all;
  }
  void* room(int64_t bytes) { return device_.allocate(bytes); }
  __nv_bfloat16* saved(int64_t count) { return static_cast<__nv_bfloat16*>(room(count * 2)); }
  template <class T>
  T* upload(const std::vector<T>& numbers) {
    T* to = static_cast<T*>(room(static_cast<int64_t>(numbers.size() * sizeof(T))));
    device_.upload(to, numbers.data(), numbers.size() * sizeof(T));
    return to;
  }
  DeltaRows<const __nv_bfloat16> rows_in(const HostRows& rows) {
    return {reinterpret_cast<const __nv_bfloat16*>(upload(rows.bits)), rows.stride};
  }
  DeltaRows<__nv_bfloat16> rows_out(const HostRows& rows) {
    return {static_cast<__nv_bfloat16*>(room(static_cast<int64_t>(rows.bits.size()) * 2)), rows.stride};
  }
  std::vector<double> download(const __nv_bfloat16* data, const HostRows& like) const {
    HostRows rows = like;
    device_.download(rows.bits.data(), data, rows.bits.size() * 2);
    return widen(rows);
  }
  std::vector<double> download(const float* data, size_t count) const {
    std::vector<float> numbers(count);
    device_.download(numbers.data(), data, count * 4);
    return widen(numbers);
  }

  Device& device_;
  DeltaRuleCase case_;
  const DeltaRuleHost& host_;
  DeltaRuleSm90 op_;
  void* workspace_ = nullptr;
};

struct NamedError {
  const char* name;
  double error, limit;
};

// Limits of issue-grade accuracy where `strict`, else those of bf16 operands on any input.
inline std::vector<NamedError> compare(const DeltaRuleResults& got, const DeltaRuleResults& want, bool strict,
                                       bool backward) {
  std::vector<NamedError> errors;
  const auto add = [&](const char* name, const std::vector<double>& a, const std::vector<double>& b, double limit) {
    if (!a.empty()) errors.push_back({name, relative_error(a, b), limit});
  };
  add("o", got.o, want.o, strict ? 3.5e-3 : 1e-2);
  add("final_state", got.final_state, want.final_state, 1e-2);
  if (!backward) return errors;
  add("dq", got.dq, want.dq, strict ? 3.7e-3 : 1e-2);
  add("dk", got.dk, want.dk, strict ? 3.7e-3 : 1e-2);
  add("dv", got.dv, want.dv, strict ? 3.7e-3 : 1e-2);
  add("dbeta", got.dbeta_logit, want.dbeta_logit, strict ? 3.7e-3 : 3e-2);
  add("dg", got.dgate_logit, want.dgate_logit, strict ? 5e-3 : 2e-2);
  add("dA_log", got.dA_log, want.dA_log, 5e-2);
  add("ddt_bias", got.ddt_bias, want.ddt_bias, 5e-2);
  add("d_initial", got.d_initial_state, want.d_initial_state, 2e-2);
  return errors;
}

// Of a call for the states alone.
inline std::vector<NamedError> compare_states(const DeltaRuleResults& got, const DeltaRuleResults& want) {
  DeltaRuleResults states;
  states.final_state = got.final_state;
  states.d_initial_state = got.d_initial_state;
  return compare(states, want, false, true);
}

// Documents whose states enter from and leave to rows of their own choice, or none; one is empty, one a token long.
inline DeltaRuleCase rows_of_states(bool vector_decay, int64_t head_size, int64_t last_length) {
  return {.name = vector_decay ? "rows of states" : "scalar, rows of states",
          .lengths = {3, 67, 0, 1, last_length},
          .H = 2,
          .HV = 2,
          .K = head_size,
          .V = head_size,
          .vector_decay = vector_decay,
          .states = true,
          .entering = {-1, 3, -1, -1, 0},
          .leaving = {2, -1, -1, -1, 0}};
}

// Documents of several segments, and of one; decay slow enough for states to reach from segment to segment.
inline DeltaRuleCase segments(bool vector_decay, int64_t head_size, int64_t longest, int segment) {
  return {.name = "segments of " + std::to_string(segment) + (vector_decay ? "" : ", scalar"),
          .lengths = {3, longest, 0, 64, 130},
          .H = 1,
          .HV = 2,
          .K = head_size,
          .V = head_size,
          .vector_decay = vector_decay,
          .gate = DeltaGateKind::kSoftplus,
          .A_log = -4.0F,
          .states = true,
          .entering = {-1, 3, -1, -1, 0},
          .leaving = {2, 1, -1, -1, 0},
          .segment = segment};
}

inline std::vector<DeltaRuleCase> check_cases() {
  std::vector<DeltaRuleCase> cases;
  const auto add = [&](DeltaRuleCase c) { cases.push_back(std::move(c)); };
  add({.name = "T 512, bounded", .lengths = {512}, .H = 4, .HV = 4});
  add({.name = "T 1", .lengths = {1}, .H = 2, .HV = 2, .states = true});
  add({.name = "T 63, softplus", .lengths = {63}, .gate = DeltaGateKind::kSoftplus, .A_log = 1.0F});
  add({.name = "T 65, K 64, V 192", .lengths = {65}, .H = 2, .HV = 2, .K = 64, .V = 192, .states = true});
  add({.name = "documents 1 3 37 0 130", .lengths = {1, 3, 37, 0, 130}, .H = 2, .HV = 2, .states = true, .spacing = 8});
  for (const bool vector_decay : {true, false}) add(rows_of_states(vector_decay, 128, 129));
  for (const int segment : {1, 3})
    for (const bool vector_decay : {true, false}) add(segments(vector_decay, 128, 700, segment));
  add({.name = "grouped heads", .lengths = {100, 71}, .H = 2, .HV = 6, .V = 64});
  add({.name = "gates at the bound and 0", .lengths = {200}, .H = 2, .HV = 2, .states = true, .mixed_gate = true});
  add({.name = "softplus, A = 16",
       .lengths = {150},
       .gate = DeltaGateKind::kSoftplus,
       .A_log = 2.77F,
       .logit_scale = 5.0F,
       .mixed_gate = true});
  add({.name = "beta x 2", .lengths = {129}, .H = 4, .HV = 4, .beta_scale = 2.0F});
  add({.name = "no l2 norm", .lengths = {190}, .qk_scale = 0.08F, .l2norm = false});
  add({.name = "slow decay", .lengths = {300}, .gate = DeltaGateKind::kSoftplus, .A_log = -4.6F, .states = true});
  add({.name = "scalar, T 200", .lengths = {200}, .H = 2, .HV = 2, .vector_decay = false, .states = true});
  add({.name = "scalar, grouped, documents",
       .lengths = {1, 3, 37, 130},
       .H = 2,
       .HV = 8,
       .vector_decay = false,
       .gate = DeltaGateKind::kSoftplus,
       .A_log = 1.0F});
  add({.name = "scalar, A = 16",
       .lengths = {65},
       .K = 64,
       .V = 64,
       .vector_decay = false,
       .gate = DeltaGateKind::kSoftplus,
       .A_log = 2.77F,
       .logit_scale = 5.0F,
       .mixed_gate = true});
  add({.name = "constant decay",
       .lengths = {140},
       .H = 3,
       .HV = 3,
       .vector_decay = false,
       .gate = DeltaGateKind::kConstant});
  return cases;
}

}  // namespace palimpsest::cuda
