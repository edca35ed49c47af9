// One call of the delta rule's forward and backward on numbers given as double, for tests. Inputs lie in memory
// surrounded by NaN, with gaps of NaN between their rows when asked for; outputs and workspace are filled with NaN
// first; nothing outside an output may change; the workspace is exactly what planning counted.
#pragma once

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

enum class RowSpacing : uint8_t { kNone, kGaps };

// `output`, `final_state`, and the gradient of every input X as `grad.X`.
NamedArrays run_delta_rule(const DeltaRuleCase& c, DType dtype, RowSpacing spacing = RowSpacing::kNone);

}  // namespace palimpsest::support
