// What both forms of the delta rule share on the CPU: how the work is cut into documents and heads, the rows and
// gradients of one of them, the activations of the raw inputs, and the sums of the gate's parameter gradients.
#pragma once

#include <omp.h>

#include <algorithm>
#include <utility>

#include "kernels/cpu/vector_math.h"
#include "kernels/delta_rule.h"

namespace palimpsest::cpu {

// ---- rows and memory ----

// One head of a [N, heads, size] or [N, heads] tensor: the numbers of token t start at rows[t].
template <class T>
struct HeadRows {
  T* data = nullptr;
  int64_t stride = 0;
  HeadRows() = default;
  HeadRows(T* first, int64_t row_stride) : data(first), stride(row_stride) {}
  HeadRows(const Tensor& tensor, int64_t head) {
    if (!tensor.defined()) return;
    data = tensor.data<std::remove_const_t<T>>() + head * (tensor.num_dims() == 3 ? tensor.dim(2) : 1);
    stride = tensor.row_stride();
  }
  T* operator[](int64_t token) const { return data + token * stride; }
  HeadRows from(int64_t token) const { return {data + token * stride, stride}; }
};

// Asks for n rows of `size` numbers ahead of their use: rows of one head lie far apart, which hardware does not
// foresee. Inlined, since a compiler may drop the call of a function without results.
template <class T>
[[gnu::always_inline]] inline void prefetch_rows(int64_t n, int64_t size, HeadRows<T> rows) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (rows.data == nullptr) return;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < size; j += kLine) __builtin_prefetch(rows[i] + j, 0, 2);
}

// The block [K, V] of one row and head in a [rows, HV, K, V] tensor; null without the tensor, or in row -1.
template <class T>
T* state_of(const Tensor& states, int64_t row, int64_t value_head) {
  if (!states.defined() || row < 0) return nullptr;
  return states.data<std::remove_const_t<T>>() + (row * states.dim(1) + value_head) * states.dim(2) * states.dim(3);
}

// Hands out pieces of one block of memory. Over a null block it only counts, so that the size of a workspace and its
// use come from the same lines.
template <class T>
class Carver {
 public:
  explicit Carver(T* block) : block_(block) {}
  T* take(int64_t count) {
    T* piece = block_ == nullptr ? nullptr : block_ + used_;
    used_ += (count + kUnit - 1) / kUnit * kUnit;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kUnit = 64 / sizeof(T);  // keeps the pieces on cache lines
  T* block_;
  int64_t used_ = 0;
};

// The buffers of each thread, in one tensor. make(Carver<T>&) returns those of one.
template <class T, class Make>
class ThreadBuffers {
 public:
  ThreadBuffers(Arena& arena, int threads, Make make) : make_(std::move(make)) {
    Carver<T> counter(nullptr);
    make_(counter);
    size_ = counter.used();
    block_ = arena.allocate(DTypeOf<T>::value, {threads, size_});
  }
  auto of(int thread) const {
    Carver<T> carver(block_.template data<T>() + thread * size_);
    return make_(carver);
  }

 private:
  Make make_;
  int64_t size_ = 0;
  Tensor block_;  // [threads, size_]
};

template <class T, class Make>
ThreadBuffers<T, Make> thread_buffers(Arena& arena, int threads, Make make) {
  return {arena, threads, std::move(make)};
}

// ---- tasks ----

// Documents fall into at most kDocumentGroups runs of neighbours, by where they begin. The groups depend on the
// documents alone, so no result depends on the number of threads, and what is kept per group has a size that does not
// depend on the documents.
constexpr int64_t kDocumentGroups = 32;

inline int64_t first_document_of_group(const Documents& documents, int64_t group) {
  if (group == 0) return 0;
  if (group >= kDocumentGroups) return documents.count();
  const int64_t token = (group * documents.num_tokens() + kDocumentGroups - 1) / kDocumentGroups;
  const auto first = documents.offsets().begin();
  return std::lower_bound(first, first + documents.count(), token) - first;
}

// Threads for a call of this size: a few tokens, as in decoding, are done before a second thread has woken up.
inline int num_threads_for(const DeltaRuleShape& s) {
  constexpr int64_t kWorthASecondThread = 1 << 18;  // state elements touched
  return s.N * s.HV * s.K * s.V < kWorthASecondThread ? 1 : omp_get_max_threads();
}

// Calls body(thread, group, document, value_head) for every document and value head. One thread takes heads_per_task
// heads of a group, head by head, each in the order of the documents.
template <class Body>
void for_each_document_head(const Documents& documents, int64_t HV, int64_t heads_per_task, int threads, Body body) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int64_t group = 0; group < kDocumentGroups; ++group) {
    for (int64_t task = 0; task < HV / heads_per_task; ++task) {
      const int64_t begin = first_document_of_group(documents, group);
      const int64_t end = first_document_of_group(documents, group + 1);
      for (int64_t value_head = task * heads_per_task; value_head < (task + 1) * heads_per_task; ++value_head)
        for (int64_t document = begin; document < end; ++document)
          body(omp_get_thread_num(), group, document, value_head);
    }
  }
}

// ---- activations ----

// x^ = x / sqrt(sum x^2 + eps) of one row; returns the factor. Without the norm the factor is 1.
template <class T>
T normalise_row(const DeltaRuleOptions& options, int64_t K, const T* __restrict x, T* __restrict normalised) {
  T factor = 1;
  if (options.l2norm_qk) {
    const T sum = lane_sum<T>(K, [x](int64_t c) { return x[c] * x[c]; });
    factor = T(1) / std::sqrt(sum + static_cast<T>(options.l2norm_eps));
  }
#pragma omp simd
  for (int64_t c = 0; c < K; ++c) normalised[c] = x[c] * factor;
  return factor;
}

enum class Write : uint8_t { kOverwrite, kAdd };

// dx = factor * (dx^ - x^ (x^ . dx^)), written or added.
template <class T>
void normalise_row_backward(const DeltaRuleOptions& options, int64_t K, T factor, const T* __restrict normalised,
                            const T* __restrict dnormalised, T* __restrict dx, Write write) {
  const T along = options.l2norm_qk ? lane_sum<T>(K, [=](int64_t c) { return normalised[c] * dnormalised[c]; }) : T(0);
  if (write == Write::kAdd) {
#pragma omp simd
    for (int64_t c = 0; c < K; ++c) dx[c] += factor * (dnormalised[c] - normalised[c] * along);
    return;
  }
#pragma omp simd
  for (int64_t c = 0; c < K; ++c) dx[c] = factor * (dnormalised[c] - normalised[c] * along);
}

// The gate of one value head: log decays g from raw logits, W = K (vector) or 1 (scalar) channels, 0 without decay.
template <class T>
class HeadGate {
 public:
  HeadGate(const DeltaRuleInputs& in, const DeltaRuleOptions& options, int64_t value_head)
      : bounded_(options.gate == Gate::kBounded), lower_bound_(static_cast<T>(options.gate_lower_bound)) {
    if (options.decay == Decay::kNone) return;
    if (options.gate == Gate::kFixed) {
      W_ = 1;
      fixed_g_ =
          static_cast<T>(std::log1p(-std::exp2(-5.0 - static_cast<double>(options.first_value_head + value_head))));
      return;
    }
    W_ = in.dt_bias.row_size();
    rate_ = std::exp(in.A_log.data<T>()[value_head]);
    dt_bias_ = in.dt_bias.data<T>() + value_head * W_;
  }
  int64_t channels() const { return W_; }
  bool has_gradient() const { return dt_bias_ != nullptr; }

  void forward(const T* __restrict logit, T* __restrict g) const {
    const T* __restrict bias = dt_bias_;
    const T rate = rate_, bound = lower_bound_;
    if (!has_gradient()) {
      std::fill_n(g, W_, fixed_g_);
      return;
    }
    if (bounded_) {
#pragma omp simd
      for (int64_t c = 0; c < W_; ++c) g[c] = bound * vector_sigmoid(rate * (logit[c] + bias[c]));
      return;
    }
#pragma omp simd
    for (int64_t c = 0; c < W_; ++c) g[c] = -rate * vector_softplus(logit[c] + bias[c]);
  }

  // dlogit of one token from its g and dg; adds to the sum over tokens ddt_bias [W] and returns the share of dA_log.
  T backward(const T* __restrict logit, const T* __restrict g, const T* __restrict dg, T* __restrict dlogit,
             T* __restrict ddt_bias) const {
    const T* __restrict bias = dt_bias_;
    const T rate = rate_, bound = lower_bound_;
    if (bounded_) {
#pragma omp simd
      for (int64_t c = 0; c < W_; ++c) {
        // sigmoid(z) sigmoid(-z) = u / (1 + u)^2
        const T u = vector_exp(-std::fabs(rate * (logit[c] + bias[c])));
        const T d = dg[c] * bound * rate * u / ((T(1) + u) * (T(1) + u));
        dlogit[c] = d;
        ddt_bias[c] += d;
      }
      return lane_sum<T>(W_, [=](int64_t c) { return dlogit[c] * (logit[c] + bias[c]); });
    }
#pragma omp simd
    for (int64_t c = 0; c < W_; ++c) {
      const T d = -dg[c] * rate * vector_sigmoid(logit[c] + bias[c]);
      dlogit[c] = d;
      ddt_bias[c] += d;
    }
    return lane_sum<T>(W_, [=](int64_t c) { return dg[c] * g[c]; });
  }

 private:
  bool bounded_;
  T lower_bound_;
  int64_t W_ = 0;
  T rate_ = 0;     // exp(A_log)
  T fixed_g_ = 0;  // of the fixed gate
  const T* dt_bias_ = nullptr;
};

// ---- one document and head ----

// The tokens of one document as one value head sees them; rows count from the document's first token.
template <class T>
struct DocumentHead {
  HeadRows<const T> q, k, v, beta_logit, gate_logit;
  HeadGate<T> gate;
  int64_t length, K, V;
  T scale, beta_scale;
  bool delta;
  const T* initial_state;  // [K, V], or null: zero
  const DeltaRuleOptions& options;

  DocumentHead(const DeltaRuleInputs& in, const DeltaRuleOptions& op, const Documents& documents, int64_t document,
               int64_t value_head, int64_t heads_per_key)
      : q(in.q, value_head / heads_per_key),
        k(in.k, value_head / heads_per_key),
        v(in.v, value_head),
        beta_logit(in.beta_logit, value_head),
        gate_logit(in.gate_logit, value_head),
        gate(in, op, value_head),
        length(documents.length(document)),
        K(in.q.dim(2)),
        V(in.v.dim(2)),
        scale(static_cast<T>(op.scale)),
        beta_scale(static_cast<T>(op.beta_scale)),
        delta(op.delta_rule == DeltaRule::kOn),
        initial_state(state_of<const T>(in.initial_state, documents.entering(document), value_head)),
        options(op) {
    const int64_t first = documents.begin(document);
    for (HeadRows<const T>* rows : {&q, &k, &v, &beta_logit, &gate_logit}) *rows = rows->from(first);
  }
};

// What flows into the backward of one document and value head, and where its gradients go.
template <class T>
struct DocumentHeadGrads {
  HeadRows<const T> d_o;
  const T* d_final_state;  // [K, V], or null: zero
  T* d_initial_state;      // [K, V], or null
  HeadRows<T> dq, dk, dv, dbeta_logit, dgate_logit;
  Write write;         // of dq and dk: the first value head of a key head overwrites
  double* parameters;  // [W + 1]: sums of ddt_bias, then of dA_log

  // Only d_initial_state is wanted.
  bool state_alone() const { return dq.data == nullptr; }

  DocumentHeadGrads(const DeltaRuleGrads& grads, const Tensor& d_o_all, const Tensor& d_final_states,
                    const Documents& documents, int64_t document, int64_t value_head, int64_t heads_per_key,
                    double* parameter_sums)
      : d_o(d_o_all, value_head),
        d_final_state(state_of<const T>(d_final_states, documents.leaving(document), value_head)),
        d_initial_state(state_of<T>(grads.d_initial_state, documents.entering(document), value_head)),
        dq(grads.dq, value_head / heads_per_key),
        dk(grads.dk, value_head / heads_per_key),
        dv(grads.dv, value_head),
        dbeta_logit(grads.dbeta_logit, value_head),
        dgate_logit(grads.dgate_logit, value_head),
        write(value_head % heads_per_key == 0 ? Write::kOverwrite : Write::kAdd),
        parameters(parameter_sums) {
    const int64_t first = documents.begin(document);
    d_o = d_o.from(first);
    if (state_alone()) return;
    for (HeadRows<T>* rows : {&dq, &dk, &dv, &dbeta_logit, &dgate_logit}) *rows = rows->from(first);
  }
};

// Sums of the gradients of dt_bias and A_log: one partial sum for each group of documents, added up in their order.
class GateParameterSums {
 public:
  GateParameterSums(Arena& scratch, int64_t HV, const Tensor& dt_bias)
      : HV_(HV),
        W_(dt_bias.defined() ? dt_bias.row_size() : 0),
        sums_(scratch.allocate(DType::kF64, {kDocumentGroups, HV, W_ + 1})) {}

  void clear() const { std::fill_n(sums_.data<double>(), sums_.numel(), 0.0); }
  double* of(int64_t group, int64_t value_head) const {
    return sums_.data<double>() + (group * HV_ + value_head) * (W_ + 1);
  }

  template <class T>
  void add_to(const DeltaRuleGrads& grads) const {
    if (!grads.ddt_bias.defined()) return;
    T* dA_log = grads.dA_log.data<T>();
    T* ddt_bias = grads.ddt_bias.data<T>();
    for (int64_t group = 1; group < kDocumentGroups; ++group)
      for (int64_t i = 0; i < HV_ * (W_ + 1); ++i) of(0, 0)[i] += of(group, 0)[i];
    for (int64_t head = 0; head < HV_; ++head) {
      for (int64_t c = 0; c < W_; ++c) ddt_bias[head * W_ + c] += static_cast<T>(of(0, head)[c]);
      dA_log[head] += static_cast<T>(of(0, head)[W_]);
    }
  }

 private:
  int64_t HV_, W_;
  Tensor sums_;  // [groups, HV, W + 1] f64
};

}  // namespace palimpsest::cpu
