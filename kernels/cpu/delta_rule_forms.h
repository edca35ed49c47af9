// The two forms of the delta rule on the CPU. Arguments are those of the op; each takes its workspace from
// stream.scratch() and stops there when the stream is planning.
#pragma once

#include "kernels/delta_rule.h"

namespace palimpsest::cpu {

template <class T>
void delta_rule_recurrence_forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleInputs& in,
                                   const DeltaRuleOptions& options, const Documents& documents);
template <class T>
void delta_rule_recurrence_backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o,
                                    const Tensor& d_final_state, const DeltaRuleInputs& in,
                                    const DeltaRuleOptions& options, const Documents& documents);

template <class T>
void delta_rule_chunkwise_forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved,
                                  const DeltaRuleInputs& in, const DeltaRuleOptions& options,
                                  const Documents& documents);
template <class T>
void delta_rule_chunkwise_backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o,
                                   const Tensor& d_final_state, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
                                   const DeltaRuleOptions& options, const Documents& documents);

}  // namespace palimpsest::cpu
