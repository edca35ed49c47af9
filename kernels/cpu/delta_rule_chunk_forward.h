// The chunkwise delta rule, forward through the chunks of one document and head, and where it keeps what backward
// needs. The equations stand in kernels/cpu/delta_rule_chunk.h.
#pragma once

#include "kernels/cpu/delta_rule_chunk.h"

namespace palimpsest::cpu {

// Where the matrices, X and entry states of one document and head are kept: in the saved tensors, in workspace, or,
// null, nowhere. Rows count from the document's first token.
template <class T>
struct ChunkStore {
  HeadRows<T> m, aqk;   // rows of C
  HeadRows<T> x;        // rows of V
  T* states = nullptr;  // [K, V] at the start of the document's second, third .. chunk
  int64_t state_stride = 0;

  T* state(int64_t chunk) const { return states + (chunk - 1) * state_stride; }
};

enum class Matrices : uint8_t { kCompute, kLoad };

// Working memory of one chunk of forward. Backward has the same and more.
template <class T, Decay decay, DeltaRule delta>
struct ChunkForwardBuffers {
  ChunkSizes sizes;
  ChunkInputs<T, decay> in;
  ChunkMatrices<T, decay, delta> matrices;
  T* state;   // [Kp, Vp]
  T *x, *br;  // [C, Vp]
  T* o;       // [C, Vp]

  ChunkForwardBuffers(Carver<T>& carver, const ChunkSizes& chunk_sizes)
      : sizes(chunk_sizes),
        in(carver, chunk_sizes),
        matrices(carver, chunk_sizes),
        state(carver.take(chunk_sizes.Kp * chunk_sizes.Vp)),
        x(carver.take(chunk_sizes.C * chunk_sizes.Vp)),
        br(carver.take(chunk_sizes.C * chunk_sizes.Vp)),
        o(carver.take(chunk_sizes.C * chunk_sizes.Vp)) {}
};

// The inputs of n tokens, while there is something to compute before they are needed.
template <class T>
[[gnu::always_inline]] inline void prefetch_chunk(const DocumentHead<T>& head, int64_t first, int64_t n) {
  prefetch_rows(n, head.K, head.q.from(first));
  prefetch_rows(n, head.K, head.k.from(first));
  prefetch_rows(n, head.V, head.v.from(first));
  prefetch_rows(n, head.gate.channels(), head.gate_logit.from(first));
}

// One document and head forward: fills what `store` has room for, and o and the final state unless they are null.
// Matrices::kLoad takes the chunk matrices from the store instead.
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
      if (store.aqk.data != nullptr) store_rows(n, in.rows, matrices.aqk, C, store.aqk.from(first));
      if (store.m.data != nullptr) store_rows(n, in.rows, matrices.n, C, store.m.from(first));
    } else {
      load_rows<T>(n, in.rows, {store.aqk[first], store.aqk.stride}, in.rows, C, matrices.aqk);
      if constexpr (delta == DeltaRule::kOn)
        load_rows<T>(n, in.rows, {store.m[first], store.m.stride}, in.rows, C, matrices.n);
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

// Calls run.template operator()<decay, delta>() for the options' kind.
template <class Run>
void with_kind(const DeltaRuleOptions& options, Run run) {
  const auto with_delta = [&]<Decay decay>() {
    if (options.delta_rule == DeltaRule::kOn) {
      run.template operator()<decay, DeltaRule::kOn>();
    } else {
      run.template operator()<decay, DeltaRule::kOff>();
    }
  };
  switch (options.decay) {
    case Decay::kNone:
      with_delta.template operator()<Decay::kNone>();
      break;
    case Decay::kScalar:
      with_delta.template operator()<Decay::kScalar>();
      break;
    case Decay::kVector:
      with_delta.template operator()<Decay::kVector>();
      break;
  }
}

// The saved tensors as the store of one document and head. A document whose first token is b has its states from slot
// b / C on: the (L - 1) / C states of L tokens end before the slot of the next document.
template <class T>
ChunkStore<T> saved_store(const DeltaRuleSaved& saved, int64_t chunk_size, int64_t first_token, int64_t value_head) {
  ChunkStore<T> store;
  if (saved.m.defined()) store.m = HeadRows<T>(saved.m, value_head).from(first_token);
  if (saved.aqk.defined()) store.aqk = HeadRows<T>(saved.aqk, value_head).from(first_token);
  if (saved.x.defined()) store.x = HeadRows<T>(saved.x, value_head).from(first_token);
  if (saved.states.defined()) {
    store.states = state_of<T>(saved.states, first_token / chunk_size, value_head);
    store.state_stride = saved.states.row_size();
  }
  return store;
}

}  // namespace palimpsest::cpu
