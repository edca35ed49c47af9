#include "kernels/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace palimpsest {
namespace {

// The published answers of Philox4x32-10. Key, high counter words and low counter words are seed, stream and index;
// the result is the first two of the four output words, low word first.
TEST(Random, ReproducesThePublishedPhiloxAnswers) {
  EXPECT_EQ(random_bits(0, 0, 0), 0xe169c58d6627e8d5ull);
  EXPECT_EQ(random_bits(~0ull, ~0ull, ~0ull), 0x41c83b0e408f276dull);
  EXPECT_EQ(random_bits(0x299f31d0a4093822ull, 0x0370734413198a2eull, 0x85a308d3243f6a88ull), 0x94fdccebd16cfe09ull);
}

TEST(Random, NormalIsBoxMullerOfBothWords) {
  auto unit = [](uint64_t bits) { return (static_cast<double>(bits / 4096) + 0.5) / 4503599627370496.0; };
  const double u = unit(0xe169c58d6627e8d5ull), v = unit(0x9b00dbd8bc57ac4cull);
  EXPECT_DOUBLE_EQ(random_normal(0, 0, 0), std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
}

TEST(Random, HashIsFnv1a) {
  EXPECT_EQ(hash_of(""), 0xcbf29ce484222325ull);
  EXPECT_EQ(hash_of("a"), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(hash_of("foobar"), 0x85944171f73967e8ull);
}

TEST(Random, UniformHasItsMomentsAndRange) {
  constexpr int kCount = 200000;
  double sum = 0, squares = 0, smallest = 1, largest = 0;
  for (int i = 0; i < kCount; ++i) {
    const double u = random_uniform(7, hash_of("uniform"), i);
    sum += u;
    squares += u * u;
    smallest = std::min(smallest, u);
    largest = std::max(largest, u);
  }
  EXPECT_GT(smallest, 0.0);
  EXPECT_LT(largest, 1.0);
  EXPECT_LT(smallest, 1e-4);
  EXPECT_GT(largest, 1 - 1e-4);
  // Four standard errors: sqrt(1/12 / n) and sqrt(4/45 / n).
  EXPECT_NEAR(sum / kCount, 0.5, 4 * std::sqrt(1.0 / 12 / kCount));
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 4 * std::sqrt(4.0 / 45 / kCount));
}

TEST(Random, NormalHasItsMoments) {
  constexpr int kCount = 200000;
  double moments[5] = {};
  int beyond_two = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = random_normal(7, hash_of("normal"), i);
    for (int p = 1; p <= 4; ++p) moments[p] += std::pow(x, p) / kCount;
    beyond_two += std::fabs(x) > 2;
  }
  // Four standard errors of each: variances of x, x^2, x^3, x^4 are 1, 2, 15, 96.
  const double error = 4 / std::sqrt(double{kCount});
  EXPECT_NEAR(moments[1], 0, error);
  EXPECT_NEAR(moments[2], 1, error * std::sqrt(2));
  EXPECT_NEAR(moments[3], 0, error * std::sqrt(15));
  EXPECT_NEAR(moments[4], 3, error * std::sqrt(96));
  EXPECT_NEAR(beyond_two / double{kCount}, 0.0455, 4 * std::sqrt(0.0455 / kCount));
}

TEST(Random, SeedStreamAndIndexEachMatter) {
  const uint64_t base = random_bits(1, 2, 3);
  EXPECT_EQ(random_bits(1, 2, 3), base);
  EXPECT_NE(random_bits(2, 2, 3), base);
  EXPECT_NE(random_bits(1, 3, 3), base);
  EXPECT_NE(random_bits(1, 2, 4), base);
  EXPECT_NE(random_bits(1ull << 32, 2, 3), random_bits(0, 2, 3));
  EXPECT_NE(random_bits(1, 1ull << 32, 3), random_bits(1, 0, 3));
  EXPECT_NE(random_bits(1, 2, 1ull << 32), random_bits(1, 2, 0));
  std::vector<uint64_t> seen;
  for (uint64_t i = 0; i < 10000; ++i) seen.push_back(random_bits(5, 6, i));
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
}

}  // namespace
}  // namespace palimpsest
