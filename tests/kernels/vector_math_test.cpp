#include "kernels/cpu/vector_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace palimpsest::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// Largest error in units in the last place of f(x) over [low, high], computed in a vectorised loop.
template <class Function, class Exact>
double worst_ulp(double low, double high, Function function, Exact exact) {
  constexpr int kCount = 1 << 18;
  std::vector<float> x(kCount), y(kCount);
  for (int i = 0; i < kCount; ++i) x[i] = static_cast<float>(low + (high - low) * i / kCount);
#pragma omp simd
  for (int i = 0; i < kCount; ++i) y[i] = function(x[i]);
  double worst = 0;
  for (int i = 0; i < kCount; ++i) {
    const double expected = exact(static_cast<double>(x[i]));
    const auto rounded = static_cast<float>(expected);
    const double ulp = std::nextafter(rounded, kInfinity) - rounded;
    worst = std::max(worst, std::fabs(y[i] - expected) / ulp);
  }
  return worst;
}

TEST(VectorMath, ExpIsAccurateToTwoUnits) {
  EXPECT_LE(worst_ulp(
                -87.3, 88.7, [](float x) { return vector_exp(x); }, [](double x) { return std::exp(x); }),
            2.0);
  EXPECT_LE(worst_ulp(
                -1, 1, [](float x) { return vector_exp(x); }, [](double x) { return std::exp(x); }),
            2.0);
}

TEST(VectorMath, ExpReachesItsLimits) {
  EXPECT_EQ(vector_exp(0.0f), 1.0f);
  EXPECT_EQ(vector_exp(-kInfinity), 0.0f);
  EXPECT_EQ(vector_exp(-1e30f), 0.0f);
  EXPECT_EQ(vector_exp(-104.0f), 0.0f);
  EXPECT_NEAR(vector_exp(-95.0f), std::exp(-95.0), 1e-44);  // a subnormal number, in its own steps of 1.4e-45
  EXPECT_EQ(vector_exp(88.8f), kInfinity);
  EXPECT_EQ(vector_exp(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(vector_exp(kNan)));
}

TEST(VectorMath, SigmoidIsAccurateAndReachesItsLimits) {
  EXPECT_LE(worst_ulp(
                -87, 87, [](float x) { return vector_sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); }),
            3.0);
  EXPECT_EQ(vector_sigmoid(-kInfinity), 0.0f);
  EXPECT_EQ(vector_sigmoid(kInfinity), 1.0f);
  EXPECT_EQ(vector_sigmoid(0.0f), 0.5f);
  EXPECT_TRUE(std::isnan(vector_sigmoid(kNan)));
  EXPECT_DOUBLE_EQ(vector_sigmoid(-3.0), 1 / (1 + std::exp(3.0)));
}

TEST(VectorMath, SoftplusIsAccurateAndReachesItsLimits) {
  EXPECT_LE(worst_ulp(
                -87, 87, [](float x) { return vector_softplus(x); }, [](double x) { return std::log1p(std::exp(x)); }),
            3.0);
  EXPECT_EQ(vector_softplus(-kInfinity), 0.0f);
  EXPECT_EQ(vector_softplus(kInfinity), kInfinity);
  EXPECT_EQ(vector_softplus(1e30f), 1e30f);
  EXPECT_TRUE(std::isnan(vector_softplus(kNan)));
  EXPECT_DOUBLE_EQ(vector_softplus(-30.0), std::log1p(std::exp(-30.0)));
  EXPECT_DOUBLE_EQ(vector_softplus(800.0), 800.0);
}

TEST(VectorMath, LaneSumIsTheSumWhereverTheDataLies) {
  std::vector<float> memory(1100);
  for (const int64_t n : {0, 1, 31, 32, 33, 63, 64, 1000}) {
    float first = 0;
    for (int64_t shift = 0; shift < 20; ++shift) {
      double expected = 0;
      for (int64_t i = 0; i < n; ++i) {
        memory[shift + i] = static_cast<float>(std::sin(static_cast<double>(i) * i));
        expected += memory[shift + i];
      }
      const float* data = memory.data() + shift;
      const float sum = lane_sum<float>(n, [=](int64_t i) { return data[i]; });
      EXPECT_NEAR(sum, expected, 1e-5);
      if (shift == 0) first = sum;
      EXPECT_EQ(sum, first) << "n " << n << " shift " << shift;
    }
  }
}

}  // namespace
}  // namespace palimpsest::cpu
