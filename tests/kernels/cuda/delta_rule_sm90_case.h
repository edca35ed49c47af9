// Cases for the Hopper delta rule: random raw inputs in bf16, and every output and gradient from the recurrence token
// by token in f64, with its reverse sweep.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cuda/delta_rule_sm90.h"

namespace palimpsest::cuda {

struct DeltaRuleCase {
  std::string name;
  std::vector<int64_t> lengths;  // of the documents
  int64_t H = 1, HV = 1, K = 128, V = 128;
  bool vector_decay = true;
  DeltaGateKind gate = DeltaGateKind::kBounded;
  float gate_lower_bound = -5.0F;
  float A_log = 0.0F;        // mean
  float logit_scale = 1.0F;  // of the gate
  float beta_scale = 1.0F;
  float qk_scale = 1.0F;               // of the raw q and k
  bool l2norm = true, states = false;  // initial state and gradient of the final one
  bool mixed_gate = false;             // some channels at the bound, some without decay
  int64_t spacing = 0;                 // elements between the rows of a token
  // Rows of the states that documents begin with and leave, -1: none. Empty: their own numbers.
  std::vector<int64_t> entering = {}, leaving = {};
  int segment = -1;  // chunks that a scan goes through

  int64_t N() const {
    int64_t sum = 0;
    for (const int64_t length : lengths) sum += length;
    return sum;
  }
  int64_t W() const { return vector_decay ? K : 1; }
  int64_t num_states() const {
    if (entering.empty()) return static_cast<int64_t>(lengths.size());
    return 1 + std::max(*std::max_element(entering.begin(), entering.end()),
                        *std::max_element(leaving.begin(), leaving.end()));
  }
  int64_t entering_row(size_t document) const {
    return entering.empty() ? static_cast<int64_t>(document) : entering[document];
  }
  int64_t leaving_row(size_t document) const {
    return leaving.empty() ? static_cast<int64_t>(document) : leaving[document];
  }
};

inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// Rows of a token: `size` numbers, `stride` apart.
struct HostRows {
  int64_t size = 0, stride = 0;
  std::vector<uint16_t> bits;
  HostRows() = default;
  HostRows(int64_t N, int64_t row_size, int64_t spacing)
      : size(row_size), stride(row_size + spacing), bits(static_cast<size_t>(N * (row_size + spacing)), 0x7fc0) {}
  double at(int64_t token, int64_t i) const { return bf16_to_float(bits[static_cast<size_t>(token * stride + i)]); }
};

struct DeltaRuleHost {
  HostRows q, k, v, beta_logit, gate_logit, d_o;
  std::vector<float> A_log, dt_bias, initial_state, d_final_state;
};

inline DeltaRuleHost random_inputs(const DeltaRuleCase& c, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  DeltaRuleHost host;
  const int64_t N = c.N();
  const auto fill = [&](HostRows& rows, int64_t size, float scale) {
    rows = HostRows(N, size, c.spacing);
    for (int64_t t = 0; t < N; ++t)
      for (int64_t i = 0; i < size; ++i)
        rows.bits[static_cast<size_t>(t * rows.stride + i)] = float_to_bf16(scale * normal(random));
  };
  fill(host.q, c.H * c.K, c.qk_scale);
  fill(host.k, c.H * c.K, c.qk_scale);
  fill(host.v, c.HV * c.V, 1.0F);
  fill(host.beta_logit, c.HV, 1.0F);
  fill(host.gate_logit, c.HV * c.W(), c.logit_scale);
  fill(host.d_o, c.HV * c.V, 1.0F);
  if (c.mixed_gate) {
    for (int64_t t = 0; t < N; ++t)
      for (int64_t i = 0; i < host.gate_logit.size; ++i) {
        const uint32_t draw = random() % 4;
        if (draw < 3)
          host.gate_logit.bits[static_cast<size_t>(t * host.gate_logit.stride + i)] =
              float_to_bf16(draw == 0   ? 30.0F
                            : draw == 1 ? -30.0F
                                        : -4.0F);
      }
  }
  const auto numbers = [&](std::vector<float>& to, int64_t count, float mean, float scale) {
    to.resize(static_cast<size_t>(count));
    for (float& x : to) x = mean + scale * normal(random);
  };
  numbers(host.A_log, c.HV, c.A_log, 0.2F);
  numbers(host.dt_bias, c.HV * c.W(), 0.0F, 0.3F);
  if (c.states) {
    const auto count = c.num_states() * c.HV * c.K * c.V;
    numbers(host.initial_state, count, 0.0F, 0.3F);
    numbers(host.d_final_state, count, 0.0F, 0.3F);
  }
  return host;
}

// Results in rows without spacing; gradients of the parameters are sums over all tokens.
struct DeltaRuleResults {
  std::vector<double> o, dq, dk, dv, dbeta_logit, dgate_logit, dA_log, ddt_bias, final_state, d_initial_state;
};

inline DeltaRuleResults reference_results(const DeltaRuleCase& c, const DeltaRuleHost& in) {
  const int64_t N = c.N(), H = c.H, HV = c.HV, K = c.K, V = c.V, W = c.W(), group = HV / H;
  const double scale = 1.0 / std::sqrt(static_cast<double>(K)), eps = 1e-6;
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  DeltaRuleResults r;
  r.o.assign(size(N * HV * V), 0);
  r.dv = r.o;
  r.dq.assign(size(N * H * K), 0);
  r.dk = r.dq;
  r.dbeta_logit.assign(size(N * HV), 0);
  r.dgate_logit.assign(size(N * HV * W), 0);
  r.dA_log.assign(size(HV), 0);
  r.ddt_bias.assign(size(HV * W), 0);
  r.final_state.assign(size(c.num_states() * HV * K * V), 0);
  r.d_initial_state = r.final_state;
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto key_head_results = [&](int64_t key_head) {
    for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      const double rate = std::exp(static_cast<double>(in.A_log[size(head)]));
      int64_t begin = 0;
      for (size_t document = 0; document < c.lengths.size(); ++document) {
        const int64_t L = c.lengths[document];
        std::vector<double> S(size(K * V), 0), q(size(L * K)), k(q), g(q), y(size(L * W)), beta(size(L));
        std::vector<double> decayed(size(L * K * V)), error(size(L * V)), q_norm(size(L)), k_norm(size(L));
        const int64_t entering = c.entering_row(document), leaving = c.leaving_row(document);
        const int64_t first = (entering * HV + head) * K * V, last = (leaving * HV + head) * K * V;
        if (c.states && entering >= 0)
          for (int64_t i = 0; i < K * V; ++i) S[size(i)] = in.initial_state[size(first + i)];
        for (int64_t t = 0; t < L; ++t) {
          double qq = 0, kk = 0;
          for (int64_t i = 0; i < K; ++i) {
            qq += std::pow(in.q.at(begin + t, key_head * K + i), 2);
            kk += std::pow(in.k.at(begin + t, key_head * K + i), 2);
          }
          q_norm[size(t)] = c.l2norm ? 1 / std::sqrt(qq + eps) : 1;
          k_norm[size(t)] = c.l2norm ? 1 / std::sqrt(kk + eps) : 1;
          for (int64_t i = 0; i < W; ++i) {
            const double x = in.gate_logit.at(begin + t, head * W + i) + in.dt_bias[size(head * W + i)];
            y[size(t * W + i)] = x;
          }
          for (int64_t i = 0; i < K; ++i) {
            q[size(t * K + i)] = in.q.at(begin + t, key_head * K + i) * q_norm[size(t)];
            k[size(t * K + i)] = in.k.at(begin + t, key_head * K + i) * k_norm[size(t)];
            const double x = y[size(t * W + i % W)];
            g[size(t * K + i)] = c.gate == DeltaGateKind::kConstant  ? std::log1p(-std::exp2(-5.0 - head))
                                 : c.gate == DeltaGateKind::kBounded ? c.gate_lower_bound * sigmoid(rate * x)
                                                                     : -rate * (x > 30 ? x : std::log1p(std::exp(x)));
          }
          beta[size(t)] = c.beta_scale * sigmoid(in.beta_logit.at(begin + t, head));
          for (int64_t i = 0; i < K; ++i)
            for (int64_t j = 0; j < V; ++j) S[size(i * V + j)] *= std::exp(g[size(t * K + i)]);
          std::copy(S.begin(), S.end(), decayed.begin() + t * K * V);
          for (int64_t j = 0; j < V; ++j) error[size(t * V + j)] = in.v.at(begin + t, head * V + j);
          for (int64_t i = 0; i < K; ++i)
            for (int64_t j = 0; j < V; ++j) error[size(t * V + j)] -= S[size(i * V + j)] * k[size(t * K + i)];
          double* o = r.o.data() + ((begin + t) * HV + head) * V;
          for (int64_t i = 0; i < K; ++i)
            for (int64_t j = 0; j < V; ++j) {
              S[size(i * V + j)] += beta[size(t)] * k[size(t * K + i)] * error[size(t * V + j)];
              o[j] += scale * S[size(i * V + j)] * q[size(t * K + i)];
            }
        }
        if (leaving >= 0) std::copy(S.begin(), S.end(), r.final_state.begin() + last);
        std::vector<double> dS(size(K * V), 0), dq(size(K)), dk(size(K)), dg(size(W)), de(size(V));
        if (c.states && leaving >= 0)
          for (int64_t i = 0; i < K * V; ++i) dS[size(i)] = in.d_final_state[size(last + i)];
        for (int64_t t = L - 1; t >= 0; --t) {
          const double* e = error.data() + t * V;
          const double* before = decayed.data() + t * K * V;
          const double b = beta[size(t)];
          double dbeta = 0;
          std::fill(de.begin(), de.end(), 0);
          std::fill(dg.begin(), dg.end(), 0);
          for (int64_t i = 0; i < K; ++i) {
            double read = 0, write = 0;
            for (int64_t j = 0; j < V; ++j) {
              const double d_o = in.d_o.at(begin + t, head * V + j);
              double& ds = dS[size(i * V + j)];
              ds += scale * q[size(t * K + i)] * d_o;
              read += (before[i * V + j] + b * k[size(t * K + i)] * e[j]) * d_o;
              write += ds * e[j];
              de[size(j)] += b * ds * k[size(t * K + i)];
            }
            dq[size(i)] = scale * read;
            dk[size(i)] = b * write;
            dbeta += k[size(t * K + i)] * write;
          }
          for (int64_t i = 0; i < K; ++i)
            for (int64_t j = 0; j < V; ++j) {
              double& ds = dS[size(i * V + j)];
              dk[size(i)] -= before[i * V + j] * de[size(j)];
              ds -= k[size(t * K + i)] * de[size(j)];
              dg[size(i % W)] += before[i * V + j] * ds;
              ds *= std::exp(g[size(t * K + i)]);
            }
          for (int64_t j = 0; j < V; ++j) r.dv[size(((begin + t) * HV + head) * V + j)] = de[size(j)];
          r.dbeta_logit[size((begin + t) * HV + head)] = dbeta * b * (1 - b / c.beta_scale);
          for (int64_t i = 0; i < W && c.gate != DeltaGateKind::kConstant; ++i) {
            const double x = y[size(t * W + i)];
            double dy;
            if (c.gate == DeltaGateKind::kBounded) {
              const double z = sigmoid(rate * x);
              dy = dg[size(i)] * c.gate_lower_bound * z * sigmoid(-rate * x) * rate;
              r.dA_log[size(head)] += dy * x;
            } else {
              dy = -dg[size(i)] * rate * sigmoid(x);
              r.dA_log[size(head)] += dg[size(i)] * g[size(t * K + i)];
            }
            r.dgate_logit[size(((begin + t) * HV + head) * W + i)] = dy;
            r.ddt_bias[size(head * W + i)] += dy;
          }
          const auto normalised = [&](const double* x, const double* dx, double norm, double* to) {
            double along = 0;
            for (int64_t i = 0; i < K && c.l2norm; ++i) along += x[i] * dx[i];
            for (int64_t i = 0; i < K; ++i) to[i] += norm * (dx[i] - x[i] * along);
          };
          const int64_t row = ((begin + t) * H + key_head) * K;
          normalised(q.data() + t * K, dq.data(), q_norm[size(t)], r.dq.data() + row);
          normalised(k.data() + t * K, dk.data(), k_norm[size(t)], r.dk.data() + row);
        }
        if (entering >= 0) std::copy(dS.begin(), dS.end(), r.d_initial_state.begin() + first);
        begin += L;
      }
    }
  };
  std::vector<std::thread> threads;
  for (int64_t key_head = 0; key_head < H; ++key_head) threads.emplace_back(key_head_results, key_head);
  for (std::thread& thread : threads) thread.join();
  return r;
}

// Norm of the difference over the norm of the reference; NaN where a number was not written.
inline double relative_error(const std::vector<double>& result, const std::vector<double>& reference) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    difference += std::pow(result[i] - reference[i], 2);
    norm += reference[i] * reference[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

inline std::vector<double> widen(const HostRows& rows) {
  std::vector<double> wide;
  const auto N = static_cast<int64_t>(rows.bits.size()) / std::max<int64_t>(rows.stride, 1);
  for (int64_t t = 0; t < N; ++t)
    for (int64_t i = 0; i < rows.size; ++i) wide.push_back(rows.at(t, i));
  return wide;
}
inline std::vector<double> widen(const std::vector<float>& numbers) {
  return {numbers.begin(), numbers.end()};
}

}  // namespace palimpsest::cuda
