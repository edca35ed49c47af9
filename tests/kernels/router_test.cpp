#include "kernels/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/adamw.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t N = 37, E = 12, K = 3;

struct OwnedRouting {
  OwnedRouting(DType dtype, int64_t n, int64_t e, int64_t k)
      : scores(dtype, {n, e}, 2), experts(DType::kI32, {n, k}), weights(dtype, {n, k}, 1) {}
  Routing view() const { return {.scores = scores, .experts = experts, .weights = weights}; }
  OwnedTensor scores, experts, weights;
};

// The published rule, written down once more with sorts over whole rows.
struct Expected {
  std::vector<std::vector<int64_t>> experts;  // sorted by number
  std::vector<std::vector<double>> weights;   // of those
};

Expected expected_routing(const std::vector<double>& logits, const std::vector<double>& bias,
                          const RouterOptions& options) {
  Expected result;
  const int64_t group_size = E / options.num_groups;
  for (int64_t n = 0; n < N; ++n) {
    std::vector<double> s(E);
    double sum = 0;
    for (int64_t e = 0; e < E; ++e) {
      const double x = logits[static_cast<size_t>(n * E + e)];
      s[e] = options.score == RouterScore::kSigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x);
      sum += s[e];
    }
    if (options.score == RouterScore::kSoftmax)
      for (double& x : s) x /= sum;
    std::vector<std::pair<double, int64_t>> groups, candidates;
    for (int64_t g = 0; g < options.num_groups; ++g) {
      std::vector<double> of_group;
      for (int64_t e = g * group_size; e < (g + 1) * group_size; ++e) of_group.push_back(s[e] + bias[e]);
      std::sort(of_group.rbegin(), of_group.rend());
      groups.emplace_back(-(of_group[0] + of_group[1]), g);
    }
    std::sort(groups.begin(), groups.end());
    for (int64_t i = 0; i < options.top_groups; ++i)
      for (int64_t e = groups[i].second * group_size; e < (groups[i].second + 1) * group_size; ++e)
        candidates.emplace_back(-(s[e] + bias[e]), e);
    std::sort(candidates.begin(), candidates.end());
    std::vector<int64_t>& experts = result.experts.emplace_back();
    for (int64_t j = 0; j < K; ++j) experts.push_back(candidates[j].second);
    std::sort(experts.begin(), experts.end());
    double total = 0;
    for (int64_t e : experts) total += s[e];
    std::vector<double>& weights = result.weights.emplace_back();
    for (int64_t e : experts) weights.push_back(options.scale * s[e] / (options.renormalize ? total : 1.0));
  }
  return result;
}

class RouterOfKind : public testing::TestWithParam<RouterOptions> {
 protected:
  // Without a bias where the published kind has none.
  std::vector<double> bias() const {
    const OwnedTensor random = random_tensor(DType::kF64, {E}, 2, 0.3);
    return GetParam().score == RouterScore::kSigmoid ? values_of(random) : std::vector<double>(E, 0.0);
  }
};

TEST_P(RouterOfKind, ChoosesAndWeighsAsPublished) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    CpuStream stream;
    const OwnedTensor logits = random_tensor(dtype, {N, E}, 1, 1.5, 3);
    OwnedTensor biases(dtype, {E});
    set_values(biases, bias());
    const OwnedRouting out(dtype, N, E, K);
    router_forward(stream, out.view(), logits, biases, GetParam());
    const Expected expected = expected_routing(values_of(logits), values_of(biases), GetParam());
    const int32_t* experts = out.experts.tensor().data<int32_t>();
    const std::vector<double> weights = values_of(out.weights);
    for (int64_t n = 0; n < N; ++n) {
      std::vector<std::pair<int64_t, double>> got;
      for (int64_t j = 0; j < K; ++j) got.emplace_back(experts[n * K + j], weights[static_cast<size_t>(n * K + j)]);
      std::sort(got.begin(), got.end());
      for (int64_t j = 0; j < K; ++j) {
        EXPECT_EQ(got[j].first, expected.experts[n][j]) << "token " << n;
        EXPECT_NEAR(got[j].second, expected.weights[n][j], dtype == DType::kF64 ? 1e-14 : 2e-6) << "token " << n;
      }
    }
    for (const OwnedTensor* tensor : {&out.scores, &out.experts, &out.weights})
      EXPECT_TRUE(tensor->surroundings_untouched());
  }
}

TEST_P(RouterOfKind, BackwardMatchesFiniteDifference) {
  CpuStream stream;
  // Far apart, so that no choice turns within the differences.
  OwnedTensor logits(DType::kF64, {N, E});
  std::vector<double> values = values_of(random_tensor(DType::kF64, {N, E}, 3, 0.02));
  for (int64_t n = 0; n < N; ++n)
    for (int64_t e = 0; e < E; ++e)
      values[static_cast<size_t>(n * E + e)] += 0.31 * static_cast<double>((e * 7 + n) % E);
  set_values(logits, values);
  OwnedTensor biases(DType::kF64, {E});
  set_values(biases, bias());
  const OwnedTensor d_weights = random_tensor(DType::kF64, {N, K}, 4), slope = random_tensor(DType::kF64, {E}, 5);
  const auto loss = [&] {
    const OwnedRouting out(DType::kF64, N, E, K);
    router_forward(stream, out.view(), logits, biases, GetParam());
    double balance = 0;
    const std::vector<double> scores = values_of(out.scores), slopes = values_of(slope);
    for (size_t i = 0; i < scores.size(); ++i) balance += scores[i] * slopes[i % E];
    return dot(out.weights, d_weights) + balance;
  };
  const OwnedRouting out(DType::kF64, N, E, K);
  router_forward(stream, out.view(), logits, biases, GetParam());
  const OwnedTensor d_logits(DType::kF64, {N, E}, 1);
  router_backward(stream, d_logits, d_weights, out.view(), slope, GetParam());
  EXPECT_TRUE(gradient_matches(loss, logits, d_logits, 1e-7, 60));
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, RouterOfKind,
    testing::Values(RouterOptions{.scale = 2.446}, RouterOptions{.num_groups = 4, .top_groups = 2, .scale = 2.5},
                    RouterOptions{.renormalize = false}, RouterOptions{.score = RouterScore::kSoftmax},
                    RouterOptions{.score = RouterScore::kSoftmax, .renormalize = false, .scale = 0.5}));

TEST(Router, OfEqualScoresTakesTheFirst) {
  CpuStream stream;
  const OwnedTensor logits(DType::kF32, {1, 5});
  set_values(logits, {0.0, 1.0, 1.0, 1.0, 0.0});
  const OwnedRouting out(DType::kF32, 1, 5, 2);
  router_forward(stream, out.view(), logits, {}, {});
  EXPECT_EQ(out.experts.tensor().data<int32_t>()[0], 1);
  EXPECT_EQ(out.experts.tensor().data<int32_t>()[1], 2);
}

TEST(Router, SendsATokenThatIsNotANumberToDifferentExperts) {
  for (const int64_t groups : {1, 4}) {
    CpuStream stream;
    const OwnedTensor logits(DType::kF32, {1, E});
    fill_nan(logits);
    const OwnedRouting out(DType::kF32, 1, E, K);
    router_forward(stream, out.view(), logits, {}, {.num_groups = groups, .top_groups = groups == 1 ? 1 : 2});
    const int32_t* experts = out.experts.tensor().data<int32_t>();
    for (int64_t j = 0; j < K; ++j) {
      EXPECT_GE(experts[j], 0);
      EXPECT_LT(experts[j], E);
      for (int64_t i = 0; i < j; ++i) EXPECT_NE(experts[i], experts[j]);
    }
  }
}

TEST(ExpertBalance, IsTheSwitchTermOverAllLayers) {
  CpuStream stream;
  const OwnedTensor load(DType::kF64, {2, 3}), mass(DType::kF64, {2, 3}), sum(DType::kF64, {1}),
      slope(DType::kF64, {3});
  set_values(load, {4, 2, 2, 1, 5, 2});              // 4 tokens, k = 2
  set_values(mass, {2.0, 1.0, 1.0, 0.5, 2.5, 1.0});  // of 4 tokens
  fill(sum, 7.0);
  balance_experts(stream, sum, slope, load, mass, {.top_k = 2, .coefficient = 0.1, .slope_scale = 0.5});
  // f = k * (5, 7, 4) / 16, P = (2.5, 3.5, 2) / 8; the sum is over the 4 tokens.
  const double f[] = {0.625, 0.875, 0.5}, P[] = {0.3125, 0.4375, 0.25};
  double term = 0;
  for (int e = 0; e < 3; ++e) term += f[e] * P[e];
  EXPECT_NEAR(values_of(sum)[0], 7.0 + 0.1 * 3 * term * 4, 1e-14);
  for (int e = 0; e < 3; ++e) EXPECT_NEAR(values_of(slope)[e], 0.5 * 0.1 * 3 / 2 * f[e], 1e-15);
}

TEST(SelectionBias, StepsTowardsExpertsWithFewTokens) {
  CpuStream stream;
  const OwnedTensor load(DType::kF64, {4}), control(DType::kF64, {kStepControlSize});
  set_values(load, {10, 2, 4, 8});  // mean 6
  const OwnedTensor bias(DType::kF32, {3});
  set_values(bias, {0.5, 0.5, 0.5});
  fill(control, 1.0);
  selection_bias_step(stream, bias, load, 1, 0.125, control);  // experts 1, 2, 3
  EXPECT_EQ(values_of(bias), (std::vector<double>{0.625, 0.625, 0.375}));
  set_values(load, {6, 6, 6, 6});
  selection_bias_step(stream, bias, load, 1, 0.125, control);
  EXPECT_EQ(values_of(bias), (std::vector<double>{0.625, 0.625, 0.375}));
  set_values(load, {10, 2, 4, 8});
  set_value(control, kFinite, 0.0);
  selection_bias_step(stream, bias, load, 1, 0.125, control);
  EXPECT_EQ(values_of(bias), (std::vector<double>{0.625, 0.625, 0.375}));
}

}  // namespace
}  // namespace palimpsest
