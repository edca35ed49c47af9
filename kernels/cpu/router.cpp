#include "kernels/router.h"

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/cpu/loops.h"

namespace palimpsest::cpu {

namespace {

constexpr int64_t kTokens = 32;  // of one range

template <class T>
void score(const T* logits, T* scores, int64_t E, RouterScore kind) {
  if (kind == RouterScore::kSigmoid) {
    for (int64_t e = 0; e < E; ++e) scores[e] = T(1) / (T(1) + std::exp(-logits[e]));
    return;
  }
  const T largest = *std::max_element(logits, logits + E);
  T sum = 0;
  for (int64_t e = 0; e < E; ++e) sum += scores[e] = std::exp(logits[e] - largest);
  for (int64_t e = 0; e < E; ++e) scores[e] /= sum;
}

// Position of the largest of values[0, n); of equals the first.
template <class T>
int64_t largest_of(const T* values, int64_t n) {
  return std::max_element(values, values + n) - values;
}

// Leaves -infinity in `keys` for the experts of all but the best groups.
template <class T>
void keep_best_groups(std::vector<T>& keys, std::vector<T>& sums, const RouterOptions& options) {
  constexpr T kOut = -std::numeric_limits<T>::infinity();
  const int64_t size = static_cast<int64_t>(keys.size()) / options.num_groups;
  for (int64_t group = 0; group < options.num_groups; ++group) {
    T best = kOut, second = kOut;
    for (int64_t e = group * size; e < (group + 1) * size; ++e) {
      if (keys[e] > best) {
        second = best;
        best = keys[e];
      } else if (keys[e] > second) {
        second = keys[e];
      }
    }
    sums[group] = size > 1 ? best + second : best;
  }
  std::vector<T> left = sums;
  std::vector<bool> kept(sums.size(), false);
  for (int64_t i = 0; i < options.top_groups; ++i) {
    const int64_t group = largest_of(left.data(), options.num_groups);
    kept[group] = true;
    left[group] = kOut;
  }
  for (int64_t group = 0; group < options.num_groups; ++group)
    if (!kept[group]) std::fill_n(keys.begin() + group * size, size, kOut);
}

template <class T>
void choose(const Routing& routing, const Tensor& logits, const Tensor& bias, const RouterOptions& options) {
  const int64_t E = logits.dim(1), k = routing.experts.dim(1);
  const Rows<T> in(logits), scores(routing.scores), weights(routing.weights);
  const Rows<int32_t> experts(routing.experts);
  const T* b = bias.defined() ? bias.data<T>() : nullptr;
  parallel_ranges(logits.dim(0), kTokens, [=, &options](int64_t begin, int64_t end) {
    constexpr T kOut = -std::numeric_limits<T>::infinity();
    std::vector<T> keys(static_cast<size_t>(E)), sums(static_cast<size_t>(options.num_groups));
    for (int64_t n = begin; n < end; ++n) {
      T* s = scores[n];
      score(in[n], s, E, options.score);
      for (int64_t e = 0; e < E; ++e) {
        const T key = b ? s[e] + b[e] : s[e];
        // Every expert can be chosen, whatever its score: a row of NaN must still send its token somewhere.
        keys[e] = key > kOut ? key : std::numeric_limits<T>::lowest() / 4;
      }
      if (options.num_groups > 1) keep_best_groups(keys, sums, options);
      T sum = 0;
      for (int64_t j = 0; j < k; ++j) {
        const int64_t e = largest_of(keys.data(), E);
        experts[n][j] = static_cast<int32_t>(e);
        weights[n][j] = s[e];
        sum += s[e];
        keys[e] = kOut;
      }
      const T factor = static_cast<T>(options.scale) / (options.renormalize ? sum + T(1e-20) : T(1));
      for (int64_t j = 0; j < k; ++j) weights[n][j] *= factor;
    }
  });
}

template <class T>
void choose_backward(Tensor d_logits, const Tensor& d_weights, const Routing& routing, const Tensor& slope,
                     const RouterOptions& options) {
  const int64_t E = d_logits.dim(1), k = d_weights.dim(1);
  const Rows<T> out(d_logits), gradient(d_weights), scores(routing.scores), weights(routing.weights);
  const Rows<int32_t> experts(routing.experts);
  const double* extra = slope.defined() ? slope.data<double>() : nullptr;
  parallel_ranges(d_logits.dim(0), kTokens, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const T* s = scores[n];
      T* d = out[n];
      // 1. by the scores: w_j = c s_j, or c s_j / sum, with c = scale
      for (int64_t e = 0; e < E; ++e) d[e] = extra ? static_cast<T>(extra[e]) : T(0);
      const T scale = static_cast<T>(options.scale);
      T sum = T(1), mean = T(0);
      if (options.renormalize) {
        sum = T(1e-20);
        for (int64_t j = 0; j < k; ++j) sum += s[experts[n][j]];
        for (int64_t j = 0; j < k; ++j) mean += gradient[n][j] * s[experts[n][j]] / sum;
      }
      for (int64_t j = 0; j < k; ++j) d[experts[n][j]] += scale / sum * (gradient[n][j] - mean);
      // 2. by the logits
      if (options.score == RouterScore::kSigmoid) {
        for (int64_t e = 0; e < E; ++e) d[e] *= s[e] * (T(1) - s[e]);
      } else {
        T dot = 0;
        for (int64_t e = 0; e < E; ++e) dot += d[e] * s[e];
        for (int64_t e = 0; e < E; ++e) d[e] = s[e] * (d[e] - dot);
      }
    }
  });
}

}  // namespace

void router_forward(Stream&, const Routing& routing, const Tensor& logits, const Tensor& bias,
                    const RouterOptions& options) {
  with_real(logits.dtype(), [&](auto zero) { choose<decltype(zero)>(routing, logits, bias, options); });
}

void router_backward(Stream&, Tensor d_logits, const Tensor& d_weights, const Routing& routing, const Tensor& slope,
                     const RouterOptions& options) {
  with_real(d_logits.dtype(),
            [&](auto zero) { choose_backward<decltype(zero)>(d_logits, d_weights, routing, slope, options); });
}

void tally_experts(Stream&, Tensor load, Tensor mass, const Tensor& offsets, const Tensor& scores) {
  const int64_t E = scores.dim(1), N = scores.dim(0);
  const int32_t* offset = offsets.data<int32_t>();
  double* loads = load.data<double>();
  for (int64_t e = 0; e < E; ++e) loads[e] += offset[e + 1] - offset[e];
  if (!mass.defined()) return;
  double* sums = mass.data<double>();
  with_real(scores.dtype(), [&](auto zero) {
    const Rows<decltype(zero)> rows(scores);
    constexpr int64_t kExperts = 16;
    parallel_ranges(E, kExperts, [=](int64_t begin, int64_t end) {
      for (int64_t n = 0; n < N; ++n)
        for (int64_t e = begin; e < end; ++e) sums[e] += static_cast<double>(rows[n][e]);
    });
  });
}

void balance_experts(Stream&, Tensor sum, Tensor slope, const Tensor& load, const Tensor& mass,
                     const BalanceOptions& options) {
  const int64_t L = load.dim(0), E = load.dim(1);
  const Rows<double> loads(load), masses(mass);
  double total = 0;
  for (int64_t l = 0; l < L; ++l)
    for (int64_t e = 0; e < E; ++e) total += loads[l][e];
  for (int64_t e = 0; e < E; ++e) {
    double given = 0, scores = 0;
    for (int64_t l = 0; l < L; ++l) {
      given += loads[l][e];
      scores += masses[l][e];
    }
    const double share = total > 0 ? static_cast<double>(options.top_k) * given / total : 0.0;
    const double by_score = options.coefficient * static_cast<double>(E) / static_cast<double>(L) * share;
    sum.data<double>()[0] += by_score * scores;
    slope.data<double>()[e] = by_score * options.slope_scale;
  }
}

void selection_bias_step(Stream&, Tensor bias, const Tensor& load, int64_t first, double speed, const Tensor& control) {
  if (control.data<double>()[kFinite] == 0.0) return;
  const int64_t E = load.dim(0);
  const double* loads = load.data<double>();
  double total = 0;
  for (int64_t e = 0; e < E; ++e) total += loads[e];
  const double mean = total / static_cast<double>(E);
  with_real(bias.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* b = bias.data<T>();
    for (int64_t i = 0; i < bias.dim(0); ++i) {
      const double given = loads[first + i];
      if (given != mean) b[i] += static_cast<T>(given < mean ? speed : -speed);
    }
  });
}

}  // namespace palimpsest::cpu
