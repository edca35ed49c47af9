#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/wide_sum.h"

namespace palimpsest::cpu {

namespace {

// One token's statistics, as they lie in `stats`.
template <class T>
struct TokenStats {
  T maximum, sum, target_logit;
};

template <class T>
TokenStats<T>* stats_of(const Tensor& stats) {
  static_assert(sizeof(TokenStats<T>) == 3 * sizeof(T));
  return reinterpret_cast<TokenStats<T>*>(stats.data<T>());
}

template <class T>
T maximum_of(const T* x, int64_t n) {
  T maximum = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < n; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}

}  // namespace

void cross_entropy_stats(Stream&, Tensor stats, const Tensor& logits, const Tensor& targets, int64_t vocab_begin) {
  with_real(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t Vl = logits.dim(1);
    const Rows<T> rows(logits);
    const int32_t* target = targets.data<int32_t>();
    TokenStats<T>* out = stats_of<T>(stats);
    parallel_ranges(logits.dim(0), 1, [=](int64_t n, int64_t) {
      const T* row = rows[n];
      const T maximum = maximum_of(row, Vl);
      const T sum = lane_sum<T>(Vl, [=](int64_t i) { return vector_exp(row[i] - maximum); });
      const int64_t local = target[n] - vocab_begin;
      const bool is_here = target[n] != kIgnoreTarget && local >= 0 && local < Vl;
      out[n] = {maximum, sum, is_here ? row[local] : T(0)};
    });
  });
}

void cross_entropy_merge_stats(Stream&, Tensor stats, const Tensor& parts) {
  with_real(stats.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = stats.dim(0), num_parts = n > 0 ? parts.dim(0) / n : 0;
    const TokenStats<T>* in = stats_of<T>(parts);
    TokenStats<T>* out = stats_of<T>(stats);
    for (int64_t row = 0; row < n; ++row) {
      TokenStats<T> merged = {-std::numeric_limits<T>::infinity(), T(0), T(0)};
      for (int64_t part = 0; part < num_parts; ++part)
        merged.maximum = std::max(merged.maximum, in[part * n + row].maximum);
      for (int64_t part = 0; part < num_parts; ++part) {
        const TokenStats<T>& share = in[part * n + row];
        merged.sum += share.sum * std::exp(share.maximum - merged.maximum);
        merged.target_logit += share.target_logit;
      }
      out[row] = merged;
    }
  });
}

void cross_entropy_loss(Stream&, Tensor token_loss, Tensor z_term, const Tensor& stats, const Tensor& targets,
                        double z_loss) {
  with_real(stats.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int32_t* target = targets.data<int32_t>();
    const TokenStats<T>* in = stats_of<T>(stats);
    T* loss = token_loss.data<T>();
    T* z = z_term.defined() ? z_term.data<T>() : nullptr;
    for (int64_t n = 0; n < stats.dim(0); ++n) {
      const bool scored = target[n] != kIgnoreTarget;
      const T log_sum = std::log(in[n].sum);
      const T lse = in[n].maximum + log_sum;
      loss[n] = scored ? (in[n].maximum - in[n].target_logit) + log_sum : T(0);
      if (z != nullptr) z[n] = scored ? static_cast<T>(z_loss) * lse * lse : T(0);
    }
  });
}

void cross_entropy_backward(Stream&, Tensor logits, const Tensor& stats, const Tensor& targets, int64_t vocab_begin,
                            double z_loss, double grad_scale) {
  with_real(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t Vl = logits.dim(1);
    const Rows<T> rows(logits);
    const int32_t* target = targets.data<int32_t>();
    const TokenStats<T>* in = stats_of<T>(stats);
    parallel_ranges(logits.dim(0), 1, [=](int64_t n, int64_t) {
      T* row = rows[n];
      if (target[n] == kIgnoreTarget) {
        std::fill_n(row, Vl, T(0));
        return;
      }
      const T maximum = in[n].maximum;
      const double lse = maximum + std::log(static_cast<double>(in[n].sum));
      const auto scale = static_cast<T>(grad_scale * (1.0 + 2.0 * z_loss * lse) / in[n].sum);
#pragma omp simd
      for (int64_t i = 0; i < Vl; ++i) row[i] = scale * vector_exp(row[i] - maximum);
      const int64_t local = target[n] - vocab_begin;
      if (local >= 0 && local < Vl) row[local] -= static_cast<T>(grad_scale);
    });
  });
}

void sum_into(Stream&, Tensor sum, const Tensor& x) {
  with_real(x.dtype(), [&](auto zero) {
    const auto* values = x.data<decltype(zero)>();
    *sum.data<double>() += wide_sum(x.numel(), [=](int64_t i) { return static_cast<double>(values[i]); });
  });
}

}  // namespace palimpsest::cpu
