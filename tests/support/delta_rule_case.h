// One call of the delta rule's forward and backward on numbers given as double, for tests. Inputs lie in memory
// surrounded by NaN, with gaps of NaN between their rows when asked for; outputs and workspace are filled with NaN
// first; nothing outside an output may change; the workspace is exactly what planning counted.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "kernels/delta_rule.h"

namespace palimpsest::support {

using NamedArrays = std::map<std::string, std::vector<double>>;

struct DeltaRuleCase {
  DeltaRuleOptions options;
  int64_t H = 1, HV = 1, K = 1, V = 1;
  std::vector<int64_t> offsets;  // documents, see kernels/documents.h
  // q, k, v, beta_logit, gate_logit, A_log, dt_bias, initial_state as the op takes them, and grad_output,
  // grad_final_state, the weights of the loss sum(o * grad_output) + sum(S_T * grad_final_state). Absent: not given.
  NamedArrays in;

  int64_t num_tokens() const { return offsets.back(); }
  int64_t num_documents() const { return static_cast<int64_t>(offsets.size()) - 1; }
  // Shape of a tensor of this case by its name, gradients and outputs included.
  Shape shape_of(const std::string& name) const;
};

// The op's inputs, each tensor from input(its name in the case); `initial_state` is left to the caller.
template <class Input>
DeltaRuleInputs delta_rule_inputs(Input&& input) {
  return {.q = input("q"),
          .k = input("k"),
          .v = input("v"),
          .beta_logit = input("beta_logit"),
          .gate_logit = input("gate_logit"),
          .A_log = input("A_log"),
          .dt_bias = input("dt_bias")};
}

enum class RowSpacing : uint8_t { kNone, kGaps };

// `output`, `final_state`, and the gradient of every input X as `grad.X`. On the CPU f32 or f64, on a GPU f32 or bf16.
NamedArrays run_delta_rule(const DeltaRuleCase& c, DType dtype, RowSpacing spacing = RowSpacing::kNone,
                           Device device = Device::kCpu);

// The loss of the case, by the op's forward in f64.
double delta_rule_loss(const DeltaRuleCase& c);

// `output` and `final_state` by a plain loop over tokens in f64 that shares nothing with the op.
NamedArrays plain_delta_rule(const DeltaRuleCase& c);

// A case with every tensor that its options call for, states and their gradients included, with normal values that
// are a pure function of the seed. A_log is such that exp(A_log) lies in (0.5, 2).
DeltaRuleCase random_delta_rule_case(const DeltaRuleOptions& options, int64_t H, int64_t HV, int64_t K, int64_t V,
                                     std::vector<int64_t> offsets, uint64_t seed);

// The raw logit whose softplus gate is g < 0 when A_log and dt_bias are 0.
double logit_of_gate(double g);

// Every array of the reference is in `got`, within its tolerance: norm of the difference over norm of the reference.
// Gradients of A_log and dt_bias, sums over all tokens, have `parameter_tolerance`.
::testing::AssertionResult all_close(const NamedArrays& got, const NamedArrays& reference, double tolerance,
                                     double parameter_tolerance);
inline ::testing::AssertionResult all_close(const NamedArrays& got, const NamedArrays& reference, double tolerance) {
  return all_close(got, reference, tolerance, tolerance);
}

// A [N, ...] array's tokens begin .. end-1, for an array of num_tokens tokens.
std::vector<double> token_range(const std::vector<double>& array, int64_t num_tokens, int64_t begin, int64_t end);

}  // namespace palimpsest::support
