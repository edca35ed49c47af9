// The chunkwise form of the delta rule, forward. The equations stand in kernels/cpu/delta_rule_chunk.h.
#include "kernels/cpu/delta_rule_chunk.h"
#include "kernels/cpu/delta_rule_forms.h"

namespace palimpsest::cpu {

namespace {

// The inputs of n tokens, while there is something to compute before they are needed.
template <class T>
[[gnu::always_inline]] inline void prefetch_chunk(const DocumentHead<T>& head, int64_t first, int64_t n) {
  prefetch_rows(n, head.K, head.q.from(first));
  prefetch_rows(n, head.K, head.k.from(first));
  prefetch_rows(n, head.V, head.v.from(first));
  prefetch_rows(n, head.gate.channels(), head.gate_logit.from(first));
}

}  // namespace

template <class T, Decay decay, DeltaRule delta>
void forward_chunks(const DocumentHead<T>& head, ChunkForwardBuffers<T, decay, delta>& b, Matrices source,
                    const ChunkStore<T>& store, HeadRows<T> o, T* final_state) {
  const int64_t C = b.sizes.C, K = b.sizes.K, V = b.sizes.V, Kp = b.sizes.Kp, Vp = b.sizes.Vp;
  ChunkInputs<T, decay>& in = b.in;
  ChunkMatrices<T, decay, delta>& matrices = b.matrices;
  load_state(b.sizes, head.initial_state, b.state);
  for (int64_t first = 0; first < head.length; first += C) {
    const int64_t n = std::min(C, head.length - first);
    if (first > 0 && store.states != nullptr) store_state(b.sizes, b.state, store.state(first / C));
    in.load(head, first, n);
    prefetch_chunk(head, first + n, std::min(C, head.length - first - n));

    if (source == Matrices::kCompute) {
      matrices.compute_scores(in);
      if constexpr (delta == DeltaRule::kOn) matrices.invert(in);
      if (store.aqk.data != nullptr) store_rows(n, C, matrices.aqk, C, store.aqk.from(first));
      if (store.m.data != nullptr) store_rows(n, C, matrices.n, C, store.m.from(first));
    } else {
      load_rows<T>(n, C, {store.aqk[first], store.aqk.stride}, in.rows, C, matrices.aqk);
      if constexpr (delta == DeltaRule::kOn)
        load_rows<T>(n, C, {store.m[first], store.m.stride}, in.rows, C, matrices.n);
    }

    const bool zero_state = first == 0 && head.initial_state == nullptr;
    if constexpr (delta == DeltaRule::kOn) {
      load_rows(n, V, head.v.from(first), in.rows, Vp, b.br);
      if (!zero_state) product(n, Vp, K, T(-1), rows_of(in.Kb, Kp), b.state, Vp, Into::kAdd, b.br, Vp);
      for (int64_t i = 0; i < in.rows; ++i) {
#pragma omp simd
        for (int64_t j = 0; j < Vp; ++j) b.br[i * Vp + j] *= in.beta[i];
      }
      std::copy_n(b.br, in.rows * Vp, b.x);
      product<Part::kLower>(n, Vp, n, T(1), rows_of(matrices.n, C), b.br, Vp, Into::kAdd, b.x, Vp);
    } else {
      load_rows(n, V, head.v.from(first), in.rows, Vp, b.x);
    }
    if (store.x.data != nullptr) store_rows(n, V, b.x, Vp, store.x.from(first));

    if (o.data != nullptr) {
      product<Part::kLower>(n, Vp, n, head.scale, rows_of(matrices.aqk, C), b.x, Vp, Into::kSet, b.o, Vp);
      if (!zero_state) product(n, Vp, K, head.scale, rows_of(in.Qb, Kp), b.state, Vp, Into::kAdd, b.o, Vp);
      store_rows(n, V, b.o, Vp, o.from(first));
    }
    in.decay_state(b.state);
    product(K, Vp, n, T(1), columns_of(in.Kt, Kp), b.x, Vp, Into::kAdd, b.state, Vp);
  }
  store_state(b.sizes, b.state, final_state);
}

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
    Carver<T> counter(nullptr);
    Buffers(counter, sizes);
    const int64_t size = counter.used();
    const Tensor workspace = stream.scratch().allocate(DTypeOf<T>::value, {threads, size});
    if (stream.is_planning()) return;
    T* const block = workspace.data<T>();
    for_each_document_head(documents, s.HV, 1, threads, [&](int thread, int64_t, int64_t document, int64_t value_head) {
      Carver<T> carver(block + thread * size);
      Buffers buffers(carver, sizes);
      const DocumentHead<T> head(in, options, documents, document, value_head, s.HV / s.H);
      const int64_t first = documents.begin(document);
      forward_chunks(head, buffers, Matrices::kCompute, saved_store<T>(saved, sizes.C, first, value_head),
                     HeadRows<T>(out.o, value_head).from(first), state_of<T>(out.final_state, document, value_head));
    });
  });
}

template void delta_rule_chunkwise_forward<float>(Stream&, const DeltaRuleOutputs&, const DeltaRuleSaved&,
                                                  const DeltaRuleInputs&, const DeltaRuleOptions&, const Documents&);
template void delta_rule_chunkwise_forward<double>(Stream&, const DeltaRuleOutputs&, const DeltaRuleSaved&,
                                                   const DeltaRuleInputs&, const DeltaRuleOptions&, const Documents&);

#define INSTANTIATE(T, decay, delta)                                                                            \
  template void forward_chunks(const DocumentHead<T>&, ChunkForwardBuffers<T, Decay::decay, DeltaRule::delta>&, \
                               Matrices, const ChunkStore<T>&, HeadRows<T>, T*)
#define INSTANTIATE_KINDS(T)     \
  INSTANTIATE(T, kNone, kOff);   \
  INSTANTIATE(T, kNone, kOn);    \
  INSTANTIATE(T, kScalar, kOff); \
  INSTANTIATE(T, kScalar, kOn);  \
  INSTANTIATE(T, kVector, kOff); \
  INSTANTIATE(T, kVector, kOn)
INSTANTIATE_KINDS(float);
INSTANTIATE_KINDS(double);

}  // namespace palimpsest::cpu
