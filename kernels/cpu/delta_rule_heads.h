// What both forms of the delta rule share on the CPU: rows of one head, the activations of the raw inputs and their
// gradients, how documents are cut into tasks, and the sums of the gate's parameter gradients.
#pragma once

#include <algorithm>

#include "kernels/cpu/vector_math.h"
#include "kernels/delta_rule.h"

namespace palimpsest::cpu {

// One head of a [N, heads, size] (or [N, heads]) tensor: token t's `size` numbers start at rows[t].
template <class T>
struct HeadRows {
  T* data = nullptr;
  int64_t stride = 0;
  HeadRows() = default;
  HeadRows(const Tensor& tensor, int64_t head) {
    if (!tensor.defined()) return;
    data = tensor.data<std::remove_const_t<T>>() + head * (tensor.num_dims() == 3 ? tensor.dim(2) : 1);
    stride = tensor.row_stride();
  }
  HeadRows(T* first, int64_t row_stride) : data(first), stride(row_stride) {}
  T* operator[](int64_t token) const { return data + token * stride; }
  HeadRows from(int64_t token) const { return {data + token * stride, stride}; }
};

// The block [K, V] of one document and head in a [documents, HV, K, V] tensor, or null.
template <class T>
T* state_of(const Tensor& states, int64_t document, int64_t value_head) {
  if (!states.defined()) return nullptr;
  return states.data<std::remove_const_t<T>>() +
         (document * states.dim(1) + value_head) * states.dim(2) * states.dim(3);
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
  static constexpr int64_t kUnit = 64 / sizeof(T);
  T* block_;
  int64_t used_ = 0;
};

// ---- tasks
// ----------------------------------------------------------------------------------------------------------- Documents
// fall into at most kDocumentGroups runs of neighbours, by where they begin. A task is one group and one key head. The
// groups depend on the documents alone, so no result depends on the number of threads, and what is kept per group has a
// size that does not depend on the documents.
constexpr int64_t kDocumentGroups = 64;

inline int64_t first_document_of_group(const Documents& documents, int64_t group) {
  if (group >= kDocumentGroups) return documents.count();
  const int64_t token = (group * documents.num_tokens() + kDocumentGroups - 1) / kDocumentGroups;
  const auto first = documents.offsets().begin();
  return std::lower_bound(first, first + documents.count(), token) - first;
}

// ---- activations
// ------------------------------------------------------------------------------------------------------- x^ = x /
// sqrt(sum x^2 + eps) of one row; returns the factor. Without the norm the factor is 1.
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

// dx = factor * (dx^ - x^ (x^ . dx^)), written or added to dx.
template <class T>
void normalise_row_backward(const DeltaRuleOptions& options, int64_t K, T factor, const T* __restrict normalised,
                            const T* __restrict dnormalised, T* __restrict dx, Write write) {
  const T along = options.l2norm_qk ? lane_sum<T>(K, [=](int64_t c) { return normalised[c] * dnormalised[c]; }) : T(0);
  if (write == Write::kAdd) {
#pragma omp simd
    for (int64_t c = 0; c < K; ++c) dx[c] += factor * (dnormalised[c] - normalised[c] * along);
  } else {
#pragma omp simd
    for (int64_t c = 0; c < K; ++c) dx[c] = factor * (dnormalised[c] - normalised[c] * along);
  }
}

// The gate of one value head: log decays g from raw logits, W = K (vector) or 1 (scalar) channels.
template <class T>
class HeadGate {
 public:
  HeadGate() = default;
  HeadGate(const DeltaRuleInputs& in, const DeltaRuleOptions& options, int64_t value_head)
      : bounded_(options.gate == Gate::kBounded), lower_bound_(static_cast<T>(options.gate_lower_bound)) {
    if (options.decay == Decay::kNone) return;
    W_ = in.dt_bias.row_size();
    rate_ = std::exp(in.A_log.data<T>()[value_head]);
    dt_bias_ = in.dt_bias.data<T>() + value_head * W_;
  }
  int64_t channels() const { return W_; }

  void forward(const T* __restrict logit, T* __restrict g) const {
    const T* __restrict bias = dt_bias_;
    const T rate = rate_, bound = lower_bound_;
    if (bounded_) {
#pragma omp simd
      for (int64_t c = 0; c < W_; ++c) g[c] = bound * vector_sigmoid(rate * (logit[c] + bias[c]));
    } else {
#pragma omp simd
      for (int64_t c = 0; c < W_; ++c) g[c] = -rate * vector_softplus(logit[c] + bias[c]);
    }
  }

  // dlogit of one token from its g and dg; adds to the token sums ddt_bias [W] and returns dA_log's share.
  T backward(const T* __restrict logit, const T* __restrict g, const T* __restrict dg, T* __restrict dlogit,
             T* __restrict ddt_bias) const {
    const T* __restrict bias = dt_bias_;
    const T rate = rate_, bound = lower_bound_;
    if (bounded_) {
#pragma omp simd
      for (int64_t c = 0; c < W_; ++c) {
        const T z = rate * (logit[c] + bias[c]);
        dlogit[c] = dg[c] * bound * vector_sigmoid(z) * vector_sigmoid(-z) * rate;
        ddt_bias[c] += dlogit[c];
      }
      return lane_sum<T>(W_, [=](int64_t c) { return dlogit[c] * (logit[c] + bias[c]); });
    }
#pragma omp simd
    for (int64_t c = 0; c < W_; ++c) {
      dlogit[c] = -dg[c] * rate * vector_sigmoid(logit[c] + bias[c]);
      ddt_bias[c] += dlogit[c];
    }
    return lane_sum<T>(W_, [=](int64_t c) { return dg[c] * g[c]; });
  }

 private:
  bool bounded_ = false;
  T lower_bound_ = 0;
  int64_t W_ = 0;
  T rate_ = 0;  // exp(A_log)
  const T* dt_bias_ = nullptr;
};

// ---- gradients of the gate's parameters
// ------------------------------------------------------------------------------ A partial sum for each group of
// documents, added up in their order.
class GatePartials {
 public:
  GatePartials(Arena& scratch, int64_t HV, int64_t W)
      : HV_(HV), W_(W), sums_(scratch.allocate(DType::kF64, {kDocumentGroups, HV, W + 1})) {}

  // [W] of ddt_bias, then dA_log.
  double* of(int64_t group, int64_t value_head) const {
    return sums_.data<double>() + (group * HV_ + value_head) * (W_ + 1);
  }
  void clear(int64_t group, int64_t value_head) const { std::fill_n(of(group, value_head), W_ + 1, 0.0); }

  // Adds the sums over the groups to the two gradients. The groups without documents were never cleared.
  template <class T>
  void add_to(const DeltaRuleGrads& grads, const Documents& documents) const {
    if (!grads.ddt_bias.defined()) return;
    T* dA_log = grads.dA_log.data<T>();
    T* ddt_bias = grads.ddt_bias.data<T>();
    double* total = nullptr;  // the first group's sums become the total of all
    for (int64_t group = 0; group < kDocumentGroups; ++group) {
      if (first_document_of_group(documents, group) == first_document_of_group(documents, group + 1)) continue;
      double* sums = of(group, 0);
      if (total == nullptr) {
        total = sums;
        continue;
      }
      for (int64_t i = 0; i < HV_ * (W_ + 1); ++i) total[i] += sums[i];
    }
    if (total == nullptr) return;
    for (int64_t head = 0; head < HV_; ++head, total += W_ + 1) {
      for (int64_t c = 0; c < W_; ++c) ddt_bias[head * W_ + c] += static_cast<T>(total[c]);
      dA_log[head] += static_cast<T>(total[W_]);
    }
  }

 private:
  int64_t HV_, W_;
  Tensor sums_;  // [groups, HV, W + 1] f64
};

}  // namespace palimpsest::cpu
