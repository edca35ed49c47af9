// The chunkwise form of the delta rule, forward over all documents and heads.
#include "kernels/cpu/delta_rule_chunk_forward.h"
#include "kernels/cpu/delta_rule_forms.h"

namespace palimpsest::cpu {

template <class T>
void delta_rule_chunkwise_forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved,
                                  const DeltaRuleInputs& in, const DeltaRuleOptions& options,
                                  const Documents& documents) {
  const DeltaRuleShape s = delta_rule_shape(in, documents);
  const ChunkSizes sizes = ChunkSizes::of<T>(s, options);
  with_kind(options, [&]<Decay decay, DeltaRule delta>() {
    using Buffers = ChunkForwardBuffers<T, decay, delta>;
    Arena::Scope scope(stream.scratch());
    const int threads = num_threads_for(s);
    const auto buffers_of_threads =
        thread_buffers<T>(stream.scratch(), threads, [&](Carver<T>& carver) { return Buffers(carver, sizes); });
    if (stream.is_planning()) return;
    for_each_document_head(documents, s.HV, 1, threads, [&](int thread, int64_t, int64_t document, int64_t value_head) {
      T* const final_state = state_of<T>(out.final_state, documents.leaving(document), value_head);
      if (!out.o.defined() && final_state == nullptr) return;
      Buffers buffers = buffers_of_threads.of(thread);
      const DocumentHead<T> head(in, options, documents, document, value_head, s.HV / s.H);
      const int64_t first = documents.begin(document);
      forward_chunks(head, buffers, Matrices::kCompute, saved_store<T>(saved, sizes.C, first, value_head),
                     HeadRows<T>(out.o, value_head).from(first), final_state);
    });
  });
}

template void delta_rule_chunkwise_forward<float>(Stream&, const DeltaRuleOutputs&, const DeltaRuleSaved&,
                                                  const DeltaRuleInputs&, const DeltaRuleOptions&, const Documents&);
template void delta_rule_chunkwise_forward<double>(Stream&, const DeltaRuleOutputs&, const DeltaRuleSaved&,
                                                   const DeltaRuleInputs&, const DeltaRuleOptions&, const Documents&);

}  // namespace palimpsest::cpu
