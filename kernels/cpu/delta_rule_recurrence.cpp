// The delta rule token by token: the plain form, as the equations of kernels/delta_rule.h stand.
//
// The reverse sweep, for one head, from the last token to the first, with dS the cotangent of S_t:
//   dS  += scale q_t do_t^T            dq_t = scale S_t do_t
//   dbeta_t = k_t^T dS e_t             dk_t = beta_t dS e_t
//   with the delta rule: de_t = beta_t dS^T k_t,  dk_t -= S'_t de_t,  dS -= k_t de_t^T
//   dv_t = de_t                        dg_t = rowsum(S'_t * dS)            dS <- Diag(exp g_t) dS
// It needs S'_t, the decayed state. Forward leaves none, so backward runs forward once more, keeps the state at every
// kBlock-th token, and replays one block at a time with all its S'_t in memory.
#include "kernels/cpu/delta_rule_forms.h"
#include "kernels/cpu/delta_rule_heads.h"

namespace palimpsest::cpu {

namespace {

constexpr int64_t kBlock = 64;  // tokens

// One token's activated inputs.
template <class T>
struct Token {
  T *q, *k, *g, *decay;  // [K] each; g and decay = exp(g) are spread over the channels
  T q_factor = 1, k_factor = 1, beta = 1;

  Token(Carver<T>& carver, int64_t K)
      : q(carver.take(K)), k(carver.take(K)), g(carver.take(K)), decay(carver.take(K)) {}

  void load(const DocumentHead<T>& head, int64_t t) {
    q_factor = normalise_row(head.options, head.K, head.q[t], q);
    k_factor = normalise_row(head.options, head.K, head.k[t], k);
    if (head.delta) beta = head.beta_scale * vector_sigmoid(head.beta_logit[t][0]);
    std::fill_n(g, head.K, T(0));
    if (head.gate.channels() > 0) head.gate.forward(head.gate_logit[t], g);
    if (head.gate.channels() == 1) std::fill_n(g, head.K, g[0]);
    for (int64_t c = 0; c < head.K; ++c) decay[c] = std::exp(g[c]);
  }
};

template <class T>
void decay_rows(int64_t K, int64_t V, const T* decay, T* state) {
  for (int64_t c = 0; c < K; ++c)
    for (int64_t j = 0; j < V; ++j) state[c * V + j] *= decay[c];
}

// y += factor * S^T x
template <class T>
void add_transposed_product(int64_t K, int64_t V, const T* state, const T* x, T factor, T* __restrict y) {
  for (int64_t c = 0; c < K; ++c) {
    const T weight = factor * x[c];
#pragma omp simd
    for (int64_t j = 0; j < V; ++j) y[j] += weight * state[c * V + j];
  }
}

// S += factor * x y^T
template <class T>
void add_outer_product(int64_t K, int64_t V, const T* x, const T* y, T factor, T* __restrict state) {
  for (int64_t c = 0; c < K; ++c) {
    const T weight = factor * x[c];
#pragma omp simd
    for (int64_t j = 0; j < V; ++j) state[c * V + j] += weight * y[j];
  }
}

template <class T>
T dot(int64_t n, const T* a, const T* b) {
  return lane_sum<T>(n, [a, b](int64_t i) { return a[i] * b[i]; });
}

// e = v - S'^T k, or v without the delta rule.
template <class T>
void prediction_error(const DocumentHead<T>& head, const Token<T>& token, int64_t t, const T* decayed, T* error) {
  std::copy_n(head.v[t], head.V, error);
  if (head.delta) add_transposed_product(head.K, head.V, decayed, token.k, T(-1), error);
}

template <class T>
void start_state(const T* initial, int64_t size, T* state) {
  if (initial != nullptr) {
    std::copy_n(initial, size, state);
  } else {
    std::fill_n(state, size, T(0));
  }
}

template <class T>
struct ForwardBuffers {
  Token<T> token;
  T *state, *error;  // [K, V], [V]
  ForwardBuffers(Carver<T>& carver, int64_t K, int64_t V)
      : token(carver, K), state(carver.take(K * V)), error(carver.take(V)) {}
};

template <class T>
void forward_document(const DocumentHead<T>& head, ForwardBuffers<T>& buffers, HeadRows<T> o, T* final_state) {
  const int64_t K = head.K, V = head.V;
  T* state = buffers.state;
  start_state(head.initial_state, K * V, state);
  for (int64_t t = 0; t < head.length; ++t) {
    buffers.token.load(head, t);
    decay_rows(K, V, buffers.token.decay, state);
    prediction_error(head, buffers.token, t, state, buffers.error);
    add_outer_product(K, V, buffers.token.k, buffers.error, buffers.token.beta, state);
    if (o.data == nullptr) continue;
    std::fill_n(o[t], V, T(0));
    add_transposed_product(K, V, state, buffers.token.q, head.scale, o[t]);
  }
  if (final_state != nullptr) std::copy_n(state, K * V, final_state);
}

template <class T>
struct BackwardBuffers {
  Token<T> token;
  T* entries;           // [blocks, K, V] state before each block
  T *decayed, *errors;  // [kBlock, K, V] S'_t and [kBlock, V] e_t of one block
  T *state, *dstate;    // [K, V]
  T *dq, *dk, *dg;      // [K], of the activated inputs
  T *de, *ddt_bias;     // [V], [K]
  // N tokens at most in a document
  BackwardBuffers(Carver<T>& carver, int64_t K, int64_t V, int64_t N)
      : token(carver, K),
        entries(carver.take((N + kBlock - 1) / kBlock * K * V)),
        decayed(carver.take(kBlock * K * V)),
        errors(carver.take(kBlock * V)),
        state(carver.take(K * V)),
        dstate(carver.take(K * V)),
        dq(carver.take(K)),
        dk(carver.take(K)),
        dg(carver.take(K)),
        de(carver.take(V)),
        ddt_bias(carver.take(K)) {}
};

// S'_t and e_t of the tokens [begin, end), from the state before them.
template <class T>
void replay_block(const DocumentHead<T>& head, BackwardBuffers<T>& b, const T* entry, int64_t begin, int64_t end) {
  const int64_t K = head.K, V = head.V;
  std::copy_n(entry, K * V, b.state);
  for (int64_t t = begin; t < end; ++t) {
    T* decayed = b.decayed + (t - begin) * K * V;
    T* error = b.errors + (t - begin) * V;
    b.token.load(head, t);
    decay_rows(K, V, b.token.decay, b.state);
    std::copy_n(b.state, K * V, decayed);
    prediction_error(head, b.token, t, decayed, error);
    add_outer_product(K, V, b.token.k, error, b.token.beta, b.state);
  }
}

template <class T>
void reverse_token(const DocumentHead<T>& head, BackwardBuffers<T>& b, const DocumentHeadGrads<T>& grads, int64_t t,
                   const T* d_o, const T* decayed, const T* error) {
  const int64_t K = head.K, V = head.V;
  Token<T>& token = b.token;
  token.load(head, t);
  add_outer_product(K, V, token.q, d_o, head.scale, b.dstate);
  if (grads.state_alone()) {
    if (head.delta) {
      std::fill_n(b.de, V, T(0));
      add_transposed_product(K, V, b.dstate, token.k, token.beta, b.de);
      add_outer_product(K, V, token.k, b.de, T(-1), b.dstate);
    }
    decay_rows(K, V, token.decay, b.dstate);
    return;
  }
  // S_t do = S'_t do + beta k (e . do)
  const T error_read = token.beta * dot(V, error, d_o);
  T dbeta = 0;
  std::fill_n(b.de, V, T(0));
  add_transposed_product(K, V, b.dstate, token.k, token.beta, b.de);
  for (int64_t c = 0; c < K; ++c) {
    b.dq[c] = head.scale * (dot(V, decayed + c * V, d_o) + token.k[c] * error_read);
    const T written = dot(V, b.dstate + c * V, error);
    b.dk[c] = token.beta * written;
    dbeta += token.k[c] * written;
  }
  if (head.delta) {
    for (int64_t c = 0; c < K; ++c) b.dk[c] -= dot(V, decayed + c * V, b.de);
    add_outer_product(K, V, token.k, b.de, T(-1), b.dstate);
    grads.dbeta_logit[t][0] = dbeta * token.beta * vector_sigmoid(-head.beta_logit[t][0]);
  }
  std::copy_n(b.de, V, grads.dv[t]);
  if (head.gate.has_gradient()) {
    for (int64_t c = 0; c < K; ++c) b.dg[c] = dot(V, decayed + c * V, b.dstate + c * V);
    if (head.gate.channels() == 1) b.dg[0] = lane_sum<T>(K, [&b](int64_t c) { return b.dg[c]; });
    std::fill_n(b.ddt_bias, head.gate.channels(), T(0));
    const T dA_log = head.gate.backward(head.gate_logit[t], token.g, b.dg, grads.dgate_logit[t], b.ddt_bias);
    for (int64_t c = 0; c < head.gate.channels(); ++c) grads.parameters[c] += static_cast<double>(b.ddt_bias[c]);
    grads.parameters[head.gate.channels()] += static_cast<double>(dA_log);
  }
  decay_rows(K, V, token.decay, b.dstate);
  normalise_row_backward(head.options, K, token.q_factor, token.q, b.dq, grads.dq[t], grads.write);
  normalise_row_backward(head.options, K, token.k_factor, token.k, b.dk, grads.dk[t], grads.write);
}

template <class T>
void backward_document(const DocumentHead<T>& head, BackwardBuffers<T>& b, const DocumentHeadGrads<T>& grads) {
  const int64_t K = head.K, V = head.V;
  const int64_t num_blocks = (head.length + kBlock - 1) / kBlock;
  if (num_blocks > 0) start_state(head.initial_state, K * V, b.entries);
  for (int64_t block = 0; block + 1 < num_blocks; ++block) {
    replay_block(head, b, b.entries + block * K * V, block * kBlock, (block + 1) * kBlock);
    std::copy_n(b.state, K * V, b.entries + (block + 1) * K * V);
  }
  start_state(grads.d_final_state, K * V, b.dstate);
  for (int64_t block = num_blocks - 1; block >= 0; --block) {
    const int64_t begin = block * kBlock, end = std::min(head.length, begin + kBlock);
    replay_block(head, b, b.entries + block * K * V, begin, end);
    for (int64_t t = end - 1; t >= begin; --t)
      reverse_token(head, b, grads, t, grads.d_o[t], b.decayed + (t - begin) * K * V, b.errors + (t - begin) * V);
  }
  if (grads.d_initial_state != nullptr) std::copy_n(b.dstate, K * V, grads.d_initial_state);
}

}  // namespace

template <class T>
void delta_rule_recurrence_forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleInputs& in,
                                   const DeltaRuleOptions& options, const Documents& documents) {
  const DeltaRuleShape s = delta_rule_shape(in, documents);
  Arena::Scope scope(stream.scratch());
  const int threads = num_threads_for(s);
  const auto buffers_of_threads = thread_buffers<T>(
      stream.scratch(), threads, [&](Carver<T>& carver) { return ForwardBuffers<T>(carver, s.K, s.V); });
  if (stream.is_planning()) return;
  for_each_document_head(documents, s.HV, 1, threads, [&](int thread, int64_t, int64_t document, int64_t value_head) {
    T* const final_state = state_of<T>(out.final_state, documents.leaving(document), value_head);
    if (!out.o.defined() && final_state == nullptr) return;
    ForwardBuffers<T> buffers = buffers_of_threads.of(thread);
    const DocumentHead<T> head(in, options, documents, document, value_head, s.HV / s.H);
    forward_document(head, buffers, HeadRows<T>(out.o, value_head).from(documents.begin(document)), final_state);
  });
}

template <class T>
void delta_rule_recurrence_backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o,
                                    const Tensor& d_final_state, const DeltaRuleInputs& in,
                                    const DeltaRuleOptions& options, const Documents& documents) {
  const DeltaRuleShape s = delta_rule_shape(in, documents);
  const int64_t heads_per_key = s.HV / s.H;
  Arena::Scope scope(stream.scratch());
  const int threads = num_threads_for(s);
  const auto buffers_of_threads = thread_buffers<T>(
      stream.scratch(), threads, [&](Carver<T>& carver) { return BackwardBuffers<T>(carver, s.K, s.V, s.N); });
  const GateParameterSums sums(stream.scratch(), s.HV, in.dt_bias);
  if (stream.is_planning()) return;
  sums.clear();
  for_each_document_head(documents, s.HV, heads_per_key, threads,
                         [&](int thread, int64_t group, int64_t document, int64_t value_head) {
                           const DocumentHeadGrads<T> head_grads(grads, d_o, d_final_state, documents, document,
                                                                 value_head, heads_per_key, sums.of(group, value_head));
                           if (head_grads.state_alone() && head_grads.d_initial_state == nullptr) return;
                           BackwardBuffers<T> buffers = buffers_of_threads.of(thread);
                           const DocumentHead<T> head(in, options, documents, document, value_head, heads_per_key);
                           backward_document(head, buffers, head_grads);
                         });
  sums.add_to<T>(grads);
}

template void delta_rule_recurrence_forward<float>(Stream&, const DeltaRuleOutputs&, const DeltaRuleInputs&,
                                                   const DeltaRuleOptions&, const Documents&);
template void delta_rule_recurrence_forward<double>(Stream&, const DeltaRuleOutputs&, const DeltaRuleInputs&,
                                                    const DeltaRuleOptions&, const Documents&);
template void delta_rule_recurrence_backward<float>(Stream&, const DeltaRuleGrads&, const Tensor&, const Tensor&,
                                                    const DeltaRuleInputs&, const DeltaRuleOptions&, const Documents&);
template void delta_rule_recurrence_backward<double>(Stream&, const DeltaRuleGrads&, const Tensor&, const Tensor&,
                                                     const DeltaRuleInputs&, const DeltaRuleOptions&, const Documents&);

}  // namespace palimpsest::cpu
