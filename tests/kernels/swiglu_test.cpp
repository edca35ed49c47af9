#include "kernels/swiglu.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t N = 19, F = 43;

class SwigluOfType : public ::testing::TestWithParam<DType> {};

TEST_P(SwigluOfType, MatchesPlainLoops) {
  const DType dtype = GetParam();
  CpuStream stream;
  const OwnedTensor gate_up = random_tensor(dtype, {N, 2 * F}, 1, 2, 3), h(dtype, {N, F}, 5);
  swiglu_forward(stream, h, gate_up);
  const auto in = values_of(gate_up);
  std::vector<double> expected(N * F);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t i = 0; i < F; ++i) {
      const double gate = in[n * 2 * F + i], up = in[n * 2 * F + F + i];
      expected[n * F + i] = gate / (1 + std::exp(-gate)) * up;
    }
  EXPECT_TRUE(is_close(h, expected, dtype == DType::kF32 ? 1e-6 : 1e-14));
  EXPECT_TRUE(h.surroundings_untouched());
}

TEST_P(SwigluOfType, BackwardMatchesFiniteDifference) {
  const DType dtype = GetParam(), wide = DType::kF64;
  CpuStream stream;
  const OwnedTensor gate_up = converted(random_tensor(DType::kF32, {N, 2 * F}, 1, 2), wide, 3);
  const OwnedTensor dh = converted(random_tensor(DType::kF32, {N, F}, 2), wide, 1);
  const OwnedTensor h(wide, {N, F}), d_gate_up(wide, {N, 2 * F}, 2);
  swiglu_backward(stream, d_gate_up, Tensor(), dh, gate_up);
  auto loss = [&] {
    swiglu_forward(stream, h, gate_up);
    return dot(h, dh);
  };
  EXPECT_TRUE(gradient_matches(loss, gate_up, d_gate_up));
  loss();

  // In the type of the case, in place and with h recomputed.
  const OwnedTensor in_place = converted(gate_up, dtype, 4), dh2 = converted(dh, dtype), h2(dtype, {N, F}, 6);
  swiglu_backward(stream, in_place, h2, dh2, in_place);
  const double tolerance = dtype == DType::kF32 ? 1e-6 : 1e-14;
  EXPECT_TRUE(is_close(in_place, d_gate_up, tolerance));
  EXPECT_TRUE(is_close(h2, h, tolerance));
  EXPECT_TRUE(in_place.surroundings_untouched());
  EXPECT_TRUE(h2.surroundings_untouched());
}

INSTANTIATE_TEST_SUITE_P(Types, SwigluOfType, ::testing::Values(DType::kF32, DType::kF64),
                         [](const auto& info) { return name_of(info.param); });

TEST(Swiglu, LargeGatesAreFinite) {
  CpuStream stream;
  const OwnedTensor gate_up(DType::kF32, {1, 4}), dh(DType::kF32, {1, 2}), h(DType::kF32, {1, 2});
  set_values(gate_up, {200, -200, 3, 3});
  fill(dh, 1);
  swiglu_forward(stream, h, gate_up);
  EXPECT_EQ(values_of(h), (std::vector<double>{600, 0}));
  swiglu_backward(stream, gate_up, h, dh, gate_up);
  EXPECT_EQ(values_of(gate_up), (std::vector<double>{3, 0, 200, 0}));
}

}  // namespace
}  // namespace palimpsest
