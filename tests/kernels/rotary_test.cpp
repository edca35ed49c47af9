#include "kernels/rotary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <numbers>

#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t N = 37, H = 3, D = 301;

OwnedTensor frequencies(int64_t pairs) {
  OwnedTensor inv_freq(DType::kF64, {pairs});
  for (int64_t i = 0; i < pairs; ++i)
    set_value(inv_freq, i, std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(pairs)));
  return inv_freq;
}

OwnedTensor positions_of(int64_t count) {
  OwnedTensor positions(DType::kI32, {count});
  for (int64_t n = 0; n < count; ++n) set_value(positions, n, static_cast<double>(n * 523 % 9000));
  return positions;
}

// Pairs as complex numbers, turned by e^{i phi}.
std::vector<double> turned(std::vector<double> x, int64_t heads, const std::vector<double>& position,
                           const std::vector<double>& frequency, const RotaryOptions& options, double direction) {
  const auto pairs = static_cast<int64_t>(frequency.size());
  for (size_t n = 0; n < position.size(); ++n)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < pairs; ++i) {
        double* head = x.data() + (n * heads + h) * D + options.offset;
        const bool interleaved = options.pairs == RotaryPairs::kInterleaved;
        double& a = head[interleaved ? 2 * i : i];
        double& b = head[interleaved ? 2 * i + 1 : i + pairs];
        const auto z =
            std::complex<double>(a, b) * std::polar(options.amplitude, direction * position[n] * frequency[i]);
        a = z.real();
        b = z.imag();
      }
  return x;
}

TEST(Rotary, TurnsPairsBothWays) {
  CpuStream stream;
  const OwnedTensor positions = positions_of(N);
  const RotaryOptions cases[] = {
      {0, RotaryPairs::kHalfSplit, 1.0}, {7, RotaryPairs::kInterleaved, 1.0}, {40, RotaryPairs::kHalfSplit, 1.25}};
  for (const RotaryOptions& options : cases)
    for (const int64_t pairs : {1, 5, 130})  // 130: more than one table of sines
      for (const DType dtype : {DType::kF32, DType::kF64})
        for (const bool has_heads : {true, false}) {
          const Shape shape = has_heads ? Shape{N, H, D} : Shape{N, D};
          const OwnedTensor inv_freq = frequencies(pairs), x = random_tensor(dtype, shape, 1, 1, 3);
          const OwnedTensor dx = converted(x, dtype, 2);
          const auto before = values_of(x);
          rotary_forward(stream, x, positions, inv_freq, options);
          rotary_backward(stream, dx, positions, inv_freq, options);
          const double tolerance = dtype == DType::kF32 ? 1e-7 : 1e-14;
          const int64_t heads = has_heads ? H : 1;
          EXPECT_TRUE(
              is_close(x, turned(before, heads, values_of(positions), values_of(inv_freq), options, 1), tolerance));
          EXPECT_TRUE(
              is_close(dx, turned(before, heads, values_of(positions), values_of(inv_freq), options, -1), tolerance));
          EXPECT_TRUE(x.surroundings_untouched());
        }
}

TEST(Rotary, QuarterTurnByHand) {
  CpuStream stream;
  const OwnedTensor x(DType::kF64, {2, 4}), positions(DType::kI32, {2}), inv_freq(DType::kF64, {2});
  set_values(x, {1, 2, 3, 4, 1, 2, 3, 4});
  set_values(positions, {0, 1});
  set_values(inv_freq, {std::numbers::pi / 2, std::numbers::pi});
  rotary_forward(stream, x, positions, inv_freq, {0, RotaryPairs::kHalfSplit, 1.0});
  EXPECT_TRUE(is_close(x, {1, 2, 3, 4, -3, -2, 1, -4}, 1e-15));
  set_values(x, {1, 2, 3, 4, 1, 2, 3, 4});
  rotary_forward(stream, x, positions, inv_freq, {0, RotaryPairs::kInterleaved, 1.0});
  EXPECT_TRUE(is_close(x, {1, 2, 3, 4, -2, 1, -3, -4}, 1e-15));
}

TEST(Rotary, LatePositionsKeepTheirAngles) {
  CpuStream stream;
  const OwnedTensor x(DType::kF32, {1, 2}), positions(DType::kI32, {1}), inv_freq(DType::kF64, {1});
  set_values(x, {1, 0});
  set_value(positions, 0, 1000003);
  set_value(inv_freq, 0, 0.7310585786300049);
  rotary_forward(stream, x, positions, inv_freq, {});
  const double angle = 1000003 * 0.7310585786300049;
  EXPECT_TRUE(is_close(x, {std::cos(angle), std::sin(angle)}, 1e-7));
}

TEST(Rotary, PairsBeyondTheHeadAreErrors) {
  CpuStream stream;
  const OwnedTensor x(DType::kF32, {2, 8}), positions(DType::kI32, {2}), inv_freq = frequencies(3);
  EXPECT_THROW(rotary_forward(stream, x, positions, inv_freq, {3, RotaryPairs::kHalfSplit, 1.0}), Error);
  EXPECT_THROW(rotary_forward(stream, x, positions, inv_freq, {-1, RotaryPairs::kHalfSplit, 1.0}), Error);
}

}  // namespace
}  // namespace palimpsest
