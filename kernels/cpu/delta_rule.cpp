// Chooses the form and the dtype of the delta rule on the CPU.
#include "kernels/cpu/delta_rule_forms.h"

namespace palimpsest::cpu {

namespace {

template <class T>
void forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
             const DeltaRuleOptions& options, const Documents& documents) {
  if (options.form == DeltaForm::kRecurrence) {
    delta_rule_recurrence_forward<T>(stream, out, in, options, documents);
  } else {
    delta_rule_chunkwise_forward<T>(stream, out, saved, in, options, documents);
  }
}

template <class T>
void backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o, const Tensor& d_final_state,
              const DeltaRuleSaved& saved, const DeltaRuleInputs& in, const DeltaRuleOptions& options,
              const Documents& documents) {
  if (options.form == DeltaForm::kRecurrence) {
    delta_rule_recurrence_backward<T>(stream, grads, d_o, d_final_state, in, options, documents);
  } else {
    delta_rule_chunkwise_backward<T>(stream, grads, d_o, d_final_state, saved, in, options, documents);
  }
}

}  // namespace

void delta_rule_forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved,
                        const DeltaRuleInputs& in, const DeltaRuleOptions& options, const Documents& documents) {
  const auto run = in.q.dtype() == DType::kF64 ? forward<double> : forward<float>;
  run(stream, out, saved, in, options, documents);
}

void delta_rule_backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o, const Tensor& d_final_state,
                         const DeltaRuleSaved& saved, const DeltaRuleInputs& in, const DeltaRuleOptions& options,
                         const Documents& documents) {
  const auto run = in.q.dtype() == DType::kF64 ? backward<double> : backward<float>;
  run(stream, grads, d_o, d_final_state, saved, in, options, documents);
}

}  // namespace palimpsest::cpu
