#include "kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t N = 13, V = 157;
constexpr double kZLoss = 1e-2, kGradScale = 0.37;

OwnedTensor targets_of(const std::vector<double>& ids) {
  OwnedTensor targets(DType::kI32, {static_cast<int64_t>(ids.size())});
  set_values(targets, ids);
  return targets;
}

OwnedTensor mixed_targets() {
  return targets_of({0, 156, 7, -1, 7, 99, 98, 100, -1, 3, 150, 1, 2});
}

struct Losses {
  std::vector<double> loss, z;
};
Losses plain_losses(const std::vector<double>& logits, const std::vector<double>& targets) {
  Losses losses;
  for (size_t n = 0; n < targets.size(); ++n) {
    double sum = 0;
    for (int64_t i = 0; i < V; ++i) sum += std::exp(logits[n * V + i]);
    const double lse = std::log(sum);
    const bool scored = targets[n] >= 0;
    losses.loss.push_back(scored ? lse - logits[n * V + static_cast<int64_t>(targets[n])] : 0);
    losses.z.push_back(scored ? kZLoss * lse * lse : 0);
  }
  return losses;
}

class CrossEntropyOfType : public ::testing::TestWithParam<DType> {};

TEST_P(CrossEntropyOfType, MatchesPlainLoops) {
  const DType dtype = GetParam();
  CpuStream stream;
  const OwnedTensor logits = random_tensor(dtype, {N, V}, 1, 3, 5), targets = mixed_targets();
  const OwnedTensor stats(dtype, {N, 3}), loss(dtype, {N}), z(dtype, {N});
  cross_entropy_stats(stream, stats, logits, targets, 0);
  cross_entropy_loss(stream, loss, z, stats, targets, kZLoss);
  const Losses expected = plain_losses(values_of(logits), values_of(targets));
  const double tolerance = dtype == DType::kF32 ? 1e-6 : 1e-14;
  EXPECT_TRUE(is_close(loss, expected.loss, tolerance));
  EXPECT_TRUE(is_close(z, expected.z, tolerance));
  EXPECT_EQ(values_of(loss)[3], 0);
  EXPECT_EQ(values_of(z)[8], 0);
  const OwnedTensor loss_alone(dtype, {N});
  cross_entropy_loss(stream, loss_alone, Tensor(), stats, targets, kZLoss);
  EXPECT_TRUE(is_bit_identical(loss_alone, loss));
  for (const OwnedTensor* output : {&stats, &loss, &z}) EXPECT_TRUE(output->surroundings_untouched());
}

TEST_P(CrossEntropyOfType, BackwardMatchesFiniteDifference) {
  const DType dtype = GetParam(), wide = DType::kF64;
  CpuStream stream;
  const OwnedTensor logits = converted(random_tensor(DType::kF32, {N, V}, 1, 2), wide), targets = mixed_targets();
  const OwnedTensor stats(wide, {N, 3}), loss(wide, {N}), z(wide, {N}), ones(wide, {N});
  fill(ones, kGradScale);
  auto total = [&] {
    cross_entropy_stats(stream, stats, logits, targets, 0);
    cross_entropy_loss(stream, loss, z, stats, targets, kZLoss);
    return dot(loss, ones) + dot(z, ones);
  };
  total();
  const OwnedTensor gradient = converted(logits, wide, 3);
  cross_entropy_backward(stream, gradient, stats, targets, 0, kZLoss, kGradScale);
  EXPECT_TRUE(gradient_matches(total, logits, gradient, 1e-8, 300));
  for (const int64_t ignored : {3, 8}) EXPECT_EQ(values_of(gradient.tensor().rows(ignored, 1)), std::vector<double>(V));

  const OwnedTensor gradient2 = converted(logits, dtype, 2), stats2(dtype, {N, 3});
  cross_entropy_stats(stream, stats2, gradient2, targets, 0);
  cross_entropy_backward(stream, gradient2, stats2, targets, 0, kZLoss, kGradScale);
  EXPECT_TRUE(is_close(gradient2, gradient, dtype == DType::kF32 ? 1e-6 : 1e-14));
  EXPECT_TRUE(gradient2.surroundings_untouched());
}

// Two ranges of the vocabulary, merged as ranks merge them: the larger maximum, sums brought to it, logits added.
TEST_P(CrossEntropyOfType, TwoRangesOfTheVocabularyMergeToTheSameResult) {
  const DType dtype = GetParam();
  CpuStream stream;
  const OwnedTensor logits = random_tensor(dtype, {N, V}, 1, 3), targets = mixed_targets();
  const OwnedTensor whole(dtype, {N, 3}), merged(dtype, {N, 3}), loss(dtype, {N}), loss_merged(dtype, {N});
  cross_entropy_stats(stream, whole, logits, targets, 0);
  const int64_t cut = 99;
  const Tensor parts[] = {logits.tensor().columns(0, cut), logits.tensor().columns(cut, V - cut)};
  std::vector<double> halves[2];
  for (int half = 0; half < 2; ++half) {
    const OwnedTensor stats(dtype, {N, 3});
    cross_entropy_stats(stream, stats, parts[half], targets, half * cut);
    halves[half] = values_of(stats);
  }
  for (int64_t n = 0; n < N; ++n) {
    const double *a = &halves[0][n * 3], *b = &halves[1][n * 3], maximum = std::max(a[0], b[0]);
    set_value(merged, n * 3, maximum);
    set_value(merged, n * 3 + 1, a[1] * std::exp(a[0] - maximum) + b[1] * std::exp(b[0] - maximum));
    set_value(merged, n * 3 + 2, a[2] + b[2]);
  }
  const double tolerance = dtype == DType::kF32 ? 1e-6 : 1e-14;
  EXPECT_TRUE(is_close(merged, whole, tolerance));
  cross_entropy_loss(stream, loss, Tensor(), whole, targets, 0);
  cross_entropy_loss(stream, loss_merged, Tensor(), merged, targets, 0);
  EXPECT_TRUE(is_close(loss_merged, loss, tolerance));

  const OwnedTensor gradient = converted(logits, dtype), gradient_merged = converted(logits, dtype);
  cross_entropy_backward(stream, gradient, whole, targets, 0, kZLoss, kGradScale);
  cross_entropy_backward(stream, gradient_merged.tensor().columns(0, cut), merged, targets, 0, kZLoss, kGradScale);
  cross_entropy_backward(stream, gradient_merged.tensor().columns(cut, V - cut), merged, targets, cut, kZLoss,
                         kGradScale);
  EXPECT_TRUE(is_close(gradient_merged, gradient, tolerance));
}

TEST_P(CrossEntropyOfType, UniformLogitsGiveTheLogOfTheVocabulary) {
  const DType dtype = GetParam();
  CpuStream stream;
  const OwnedTensor logits(dtype, {2, 50257}), targets = targets_of({0, 50256}), stats(dtype, {2, 3}), loss(dtype, {2});
  fill(logits, 0);
  cross_entropy_stats(stream, stats, logits, targets, 0);
  cross_entropy_loss(stream, loss, Tensor(), stats, targets, 0);
  for (double value : values_of(loss)) EXPECT_NEAR(value, 10.824905, 5e-6);
}

TEST_P(CrossEntropyOfType, LargeLogitsAreFinite) {
  const DType dtype = GetParam();
  CpuStream stream;
  const OwnedTensor logits(dtype, {1, 3}), targets = targets_of({1}), stats(dtype, {1, 3}), loss(dtype, {1});
  set_values(logits, {1e4, 1e4 - 2, -1e4});
  cross_entropy_stats(stream, stats, logits, targets, 0);
  cross_entropy_loss(stream, loss, Tensor(), stats, targets, 0);
  EXPECT_NEAR(values_of(loss)[0], 2 + std::log1p(std::exp(-2)), 1e-6);
  cross_entropy_backward(stream, logits, stats, targets, 0, 0, 1);
  const double p = 1 / (1 + std::exp(-2));
  EXPECT_TRUE(is_close(logits, {p, -p, 0}, 1e-6));
}

INSTANTIATE_TEST_SUITE_P(Types, CrossEntropyOfType, ::testing::Values(DType::kF32, DType::kF64),
                         [](const auto& info) { return name_of(info.param); });

TEST(CrossEntropy, ANanLogitIsSeen) {
  CpuStream stream;
  const OwnedTensor logits = random_tensor(DType::kF32, {1, V}, 1), targets = targets_of({1});
  const OwnedTensor stats(DType::kF32, {1, 3}), loss(DType::kF32, {1});
  set_value(logits, 40, std::numeric_limits<double>::quiet_NaN());
  cross_entropy_stats(stream, stats, logits, targets, 0);
  cross_entropy_loss(stream, loss, Tensor(), stats, targets, 0);
  EXPECT_TRUE(std::isnan(values_of(loss)[0]));
}

TEST(SumInto, AddsInF64InAFixedOrder) {
  CpuStream stream;
  constexpr int64_t kCount = 100003;
  const OwnedTensor x = random_tensor(DType::kF32, {kCount}, 1), sum(DType::kF64, {1}), again(DType::kF64, {1});
  double expected = 5;
  for (double value : values_of(x)) expected += value;
  fill(sum, 5);
  fill(again, 5);
  with_threads(1, [&] { sum_into(stream, sum, x); });
  with_threads(3, [&] { sum_into(stream, again, x); });
  EXPECT_NEAR(values_of(sum)[0], expected, 1e-9);
  EXPECT_TRUE(is_bit_identical(again, sum));
  const OwnedTensor none(DType::kF64, {0});
  sum_into(stream, sum, none);
  EXPECT_TRUE(is_bit_identical(again, sum));
  // 2^24 + 1 + 1 ...: ones that an f32 sum would lose.
  const OwnedTensor steps(DType::kF32, {4});
  set_values(steps, {16777216, 1, 1, 1});
  fill(sum, 0);
  sum_into(stream, sum, steps);
  EXPECT_EQ(values_of(sum)[0], 16777219);
}

}  // namespace
}  // namespace palimpsest
