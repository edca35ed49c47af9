// Rotary frequencies of every kind of scaling; the expected numbers are the public library's (in f32).
#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

constexpr double kF32 = 2e-6;  // the library computes in f32

void expect_each_close(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], kF32 * expected[i]) << "pair " << i;
}

TEST(RopeScaling, DefaultIsThePowersOfTheta) {
  const std::vector<double> got = rope_frequencies(6, 1000.0, {});
  EXPECT_TRUE(support::relative_error(got, {1.0, 0.1, 0.01}) < 1e-15);
  EXPECT_EQ(rope_attention_factor({}), 1.0);
  EXPECT_EQ(rope_softmax_factor({}), 1.0);
}

TEST(RopeScaling, Llama3BlendsBetweenTheTwoFrequencies) {
  const RopeScalingConfig scaling = {.kind = RopeScalingKind::kLlama3,
                                     .factor = 8.0,
                                     .original_max_positions = 8192,
                                     .low_freq_factor = 1.0,
                                     .high_freq_factor = 4.0};
  expect_each_close(
      rope_frequencies(16, 500000.0, scaling),
      {1.0, 0.193922758, 0.0376060307, 0.00729266508, 0.000524846022, 3.42810235e-05, 6.64786967e-06, 1.28917316e-06});
  EXPECT_EQ(rope_attention_factor(scaling), 1.0);
}

TEST(RopeScaling, YarnWithWholeBorderPairs) {
  const RopeScalingConfig scaling = {.kind = RopeScalingKind::kYarn, .factor = 8.0, .original_max_positions = 64};
  expect_each_close(rope_frequencies(12, 10000.0, scaling),
                    {1.0, 0.121186942, 0.00580198551, 0.00124999997, 0.000269304292, 5.80198684e-05});
  EXPECT_NEAR(rope_attention_factor(scaling), 1.2079441541679836, 1e-15);
  EXPECT_EQ(rope_softmax_factor(scaling), 1.0);
}

TEST(RopeScaling, YarnWithBorderPairsAsTheyFall) {
  const RopeScalingConfig scaling = {.kind = RopeScalingKind::kYarn,
                                     .factor = 8.0,
                                     .original_max_positions = 64,
                                     .beta_fast = 4,
                                     .beta_slow = 0.5,
                                     .truncate = false,
                                     .mscale = 0.7,
                                     .mscale_all_dim = 1.3};
  expect_each_close(rope_frequencies(12, 10000.0, scaling),
                    {1.0, 0.161018804, 0.00580198551, 0.00124999997, 0.000269304292, 5.80198684e-05});
  EXPECT_NEAR(rope_attention_factor(scaling), 0.9017839869787123, 1e-15);
  const double mscale = 0.1 * 1.3 * std::log(8.0) + 1.0;
  EXPECT_NEAR(rope_softmax_factor(scaling), mscale * mscale, 1e-15);
}

TEST(RopeScaling, YarnOfDeepseekV3) {
  const RopeScalingConfig scaling = {.kind = RopeScalingKind::kYarn,
                                     .factor = 40.0,
                                     .original_max_positions = 4096,
                                     .mscale = 1.0,
                                     .mscale_all_dim = 1.0};
  const std::vector<double> got = rope_frequencies(64, 10000.0, scaling);
  ASSERT_EQ(got.size(), 32u);
  EXPECT_NEAR(got[10], 0.0562341288, 1e-8);
  EXPECT_NEAR(got[11], 0.0390069261, 1e-8);  // the ramp's first
  EXPECT_NEAR(got[16], 0.00550000044, 1e-9);
  EXPECT_NEAR(got[22], 0.00017782794, 1e-10);  // its last
  EXPECT_NEAR(got[31], 3.33380353e-06, 1e-12);
  EXPECT_EQ(rope_attention_factor(scaling), 1.0);
  EXPECT_NEAR(rope_softmax_factor(scaling), std::pow(0.1 * std::log(40.0) + 1.0, 2), 1e-15);
}

TEST(RopeScaling, AGivenAttentionFactorIsTaken) {
  const RopeScalingConfig scaling = {.kind = RopeScalingKind::kYarn, .factor = 8.0, .attention_factor = 1.5};
  EXPECT_EQ(rope_attention_factor(scaling), 1.5);
}
}  // namespace
}  // namespace palimpsest
