#include "kernels/rms_norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr double kEps = 1e-5;
constexpr int64_t N = 67, H = 3, D = 37;  // N: two blocks of tokens

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// y and rstd of rows of D values; gates may be empty.
struct Expected {
  std::vector<double> y, rstd;
};
Expected plain_norm(const std::vector<double>& x, const std::vector<double>& w, double centre,
                    const std::vector<double>& gates) {
  Expected expected{std::vector<double>(x.size()), std::vector<double>(x.size() / D)};
  for (size_t row = 0; row < x.size() / D; ++row) {
    double mean = 0;
    for (int64_t i = 0; i < D; ++i) mean += x[row * D + i] * x[row * D + i] / D;
    expected.rstd[row] = 1 / std::sqrt(mean + kEps);
    for (int64_t i = 0; i < D; ++i) {
      const size_t at = row * D + i;
      expected.y[at] = (w[i] + centre) * x[at] * expected.rstd[row] * (gates.empty() ? 1 : gates[at]);
    }
  }
  return expected;
}

struct NormCase {
  DType dtype;
  Shape shape;
  NormWeight kind;
};

class RmsNormCase : public ::testing::TestWithParam<NormCase> {};

TEST_P(RmsNormCase, MatchesPlainLoops) {
  const auto [dtype, shape, kind] = GetParam();
  const bool has_heads = shape.num_dims() == 3;
  CpuStream stream;
  const OwnedTensor x = random_tensor(dtype, shape, 1, 2, 5), w = random_tensor(dtype, {D}, 2);
  const OwnedTensor y(dtype, shape, 3), rstd(dtype, has_heads ? Shape{N, H} : Shape{N});
  rms_norm_forward(stream, y, rstd, x, w, kEps, kind);
  const Expected expected = plain_norm(values_of(x), values_of(w), kind == NormWeight::kOneCentred ? 1 : 0, {});
  const double tolerance = dtype == DType::kF32 ? 1e-6 : 1e-14;
  EXPECT_TRUE(is_close(y, expected.y, tolerance));
  EXPECT_TRUE(is_close(rstd, expected.rstd, tolerance));
  EXPECT_TRUE(y.surroundings_untouched());
  EXPECT_TRUE(rstd.surroundings_untouched());
}

TEST_P(RmsNormCase, BackwardMatchesFiniteDifference) {
  const auto [dtype, shape, kind] = GetParam();
  const DType wide = DType::kF64;
  const Shape rstd_shape = shape.num_dims() == 3 ? Shape{N, H} : Shape{N};
  CpuStream stream;
  // Values that f32 holds too, so that both types compute the same gradient.
  const OwnedTensor x = converted(random_tensor(DType::kF32, shape, 1), wide, 5);
  const OwnedTensor w = converted(random_tensor(DType::kF32, {D}, 2), wide);
  const OwnedTensor dy = converted(random_tensor(DType::kF32, shape, 3), wide, 1);
  const OwnedTensor dw_before = converted(random_tensor(DType::kF32, {D}, 4), wide);
  const OwnedTensor y(wide, shape), rstd(wide, rstd_shape), dx(wide, shape, 2), dw(wide, {D});
  auto loss = [&, kind = kind] {
    rms_norm_forward(stream, y, rstd, x, w, kEps, kind);
    return dot(y, dy);
  };
  loss();
  fill(dw, 0);
  rms_norm_backward(stream, dx, dw, dy, x, w, rstd, kind);
  EXPECT_TRUE(gradient_matches(loss, x, dx));
  EXPECT_TRUE(gradient_matches(loss, w, dw));
  EXPECT_TRUE(dx.surroundings_untouched());
  EXPECT_TRUE(dw.surroundings_untouched());

  // In the type of the case: dw accumulates, and dx may be dy.
  const OwnedTensor x2 = converted(x, dtype, 1), w2 = converted(w, dtype), dx2 = converted(dy, dtype, 4);
  const OwnedTensor dw2 = converted(dw_before, dtype), rstd2(dtype, rstd_shape), y2(dtype, shape);
  rms_norm_forward(stream, y2, rstd2, x2, w2, kEps, kind);
  rms_norm_backward(stream, dx2, dw2, dx2, x2, w2, rstd2, kind);
  std::vector<double> dw_expected = values_of(dw), before = values_of(dw_before);
  for (int64_t i = 0; i < D; ++i) dw_expected[i] += before[i];
  const double tolerance = dtype == DType::kF32 ? 2e-6 : 1e-14;
  EXPECT_TRUE(is_close(dx2, dx, tolerance));
  EXPECT_TRUE(is_close(dw2, dw_expected, tolerance));
  EXPECT_TRUE(dx2.surroundings_untouched());
}

INSTANTIATE_TEST_SUITE_P(Cases, RmsNormCase,
                         ::testing::Values(NormCase{DType::kF32, {N, D}, NormWeight::kPlain},
                                           NormCase{DType::kF32, {N, H, D}, NormWeight::kOneCentred},
                                           NormCase{DType::kF64, {N, D}, NormWeight::kOneCentred},
                                           NormCase{DType::kF64, {N, H, D}, NormWeight::kPlain}));

// The stream's x in f64 beside operands and gradients in f32: as in f64 throughout, to the rounding of those.
TEST(RmsNorm, TakesAWideStreamAndAddsToItsGradient) {
  CpuStream stream;
  for (const Shape& shape : {Shape{N, D}, Shape{N, H, D}}) {
    const Shape rstd_shape = shape.num_dims() == 3 ? Shape{N, H} : Shape{N};
    const OwnedTensor x = random_tensor(DType::kF64, shape, 1, 2, 5), w = random_tensor(DType::kF32, {D}, 2);
    const OwnedTensor dy = random_tensor(DType::kF32, shape, 3), before = random_tensor(DType::kF32, shape, 4);
    const OwnedTensor y(DType::kF32, shape, 3), rstd(DType::kF32, rstd_shape), dw(DType::kF32, {D});
    const OwnedTensor dx = converted(before, DType::kF32, 2), dx_alone(DType::kF32, shape);
    const OwnedTensor kept(DType::kF64, shape, 1), rounded(DType::kF32, shape, 4);
    rms_norm_forward(stream, y, rstd, x, w, kEps, NormWeight::kPlain, rounded);
    rms_norm_forward(stream, y, rstd, x, w, kEps, NormWeight::kPlain, kept);
    fill(dw, 0);
    rms_norm_backward(stream, dx, dw, dy, x, w, rstd, NormWeight::kPlain, Write::kAccumulate);
    rms_norm_backward(stream, dx_alone, dw, dy, x, w, rstd, NormWeight::kPlain);

    const OwnedTensor w64 = converted(w, DType::kF64), dy64 = converted(dy, DType::kF64), y64(DType::kF64, shape);
    const OwnedTensor rstd64(DType::kF64, rstd_shape), dx64(DType::kF64, shape), dw64(DType::kF64, {D});
    rms_norm_forward(stream, y64, rstd64, x, w64, kEps, NormWeight::kPlain);
    fill(dw64, 0);
    rms_norm_backward(stream, dx64, dw64, dy64, x, w64, rstd64, NormWeight::kPlain);
    std::vector<double> sum = values_of(dx64), twice = values_of(dw64);
    const std::vector<double> old = values_of(before);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += old[i];
    for (double& value : twice) value *= 2;
    EXPECT_EQ(values_of(kept), values_of(x));
    EXPECT_EQ(values_of(rounded), values_of(converted(x, DType::kF32)));
    EXPECT_TRUE(kept.surroundings_untouched());
    EXPECT_TRUE(rounded.surroundings_untouched());
    EXPECT_TRUE(is_close(y, y64, 1e-6));
    EXPECT_TRUE(is_close(rstd, rstd64, 1e-6));
    EXPECT_TRUE(is_close(dx_alone, dx64, 1e-6));
    EXPECT_TRUE(is_close(dx, sum, 1e-6));
    EXPECT_TRUE(is_close(dw, twice, 1e-6));
    for (const OwnedTensor* output : {&y, &dx, &dw}) EXPECT_TRUE(output->surroundings_untouched());
  }
}

class GatedRmsNorm : public ::testing::TestWithParam<std::tuple<DType, GateActivation>> {};

TEST_P(GatedRmsNorm, MatchesPlainLoops) {
  const auto [dtype, activation] = GetParam();
  CpuStream stream;
  const Shape shape = {N, H, D};
  const OwnedTensor o = random_tensor(dtype, shape, 1, 2, 5), z = random_tensor(dtype, shape, 2, 2, 7);
  const OwnedTensor w = random_tensor(dtype, {D}, 3), y(dtype, shape, 3), rstd(dtype, {N, H});
  gated_rms_norm_forward(stream, y, rstd, o, z, w, kEps, activation);
  std::vector<double> gates = values_of(z);
  for (double& gate : gates) gate = activation == GateActivation::kSigmoid ? sigmoid(gate) : gate * sigmoid(gate);
  const Expected expected = plain_norm(values_of(o), values_of(w), 0, gates);
  const double tolerance = dtype == DType::kF32 ? 1e-6 : 1e-14;
  EXPECT_TRUE(is_close(y, expected.y, tolerance));
  EXPECT_TRUE(is_close(rstd, expected.rstd, tolerance));
  EXPECT_TRUE(y.surroundings_untouched());
}

TEST_P(GatedRmsNorm, BackwardMatchesFiniteDifference) {
  const auto [dtype, activation] = GetParam();
  const DType wide = DType::kF64;
  CpuStream stream;
  const Shape shape = {N, H, D};
  const OwnedTensor o = converted(random_tensor(DType::kF32, shape, 1), wide, 5);
  const OwnedTensor z = converted(random_tensor(DType::kF32, shape, 2, 2), wide, 1);
  const OwnedTensor w = converted(random_tensor(DType::kF32, {D}, 3), wide);
  const OwnedTensor dy = converted(random_tensor(DType::kF32, shape, 4), wide, 2);
  const OwnedTensor y(wide, shape), rstd(wide, {N, H}), d_o(wide, shape, 2), dz(wide, shape, 3), dw(wide, {D});
  auto loss = [&, activation = activation] {
    gated_rms_norm_forward(stream, y, rstd, o, z, w, kEps, activation);
    return dot(y, dy);
  };
  loss();
  fill(dw, 0);
  gated_rms_norm_backward(stream, d_o, dz, dw, dy, o, z, w, rstd, activation);
  EXPECT_TRUE(gradient_matches(loss, o, d_o));
  EXPECT_TRUE(gradient_matches(loss, z, dz));
  EXPECT_TRUE(gradient_matches(loss, w, dw));

  const OwnedTensor o2 = converted(o, dtype, 1), z2 = converted(z, dtype), w2 = converted(w, dtype);
  const OwnedTensor dy2 = converted(dy, dtype), d_o2(dtype, shape, 4), dz2(dtype, shape, 2), y2(dtype, shape);
  const OwnedTensor rstd2(dtype, {N, H}), dw2(dtype, {D});
  fill(dw2, 1);
  gated_rms_norm_forward(stream, y2, rstd2, o2, z2, w2, kEps, activation);
  const OwnedTensor y_again(dtype, shape, 3);
  gated_rms_norm_backward(stream, d_o2, dz2, dw2, dy2, o2, z2, w2, rstd2, activation, y_again);
  std::vector<double> dw_expected = values_of(dw);
  for (double& value : dw_expected) value += 1;
  const double tolerance = dtype == DType::kF32 ? 2e-6 : 1e-14;
  EXPECT_TRUE(is_close(d_o2, d_o, tolerance));
  EXPECT_TRUE(is_close(dz2, dz, tolerance));
  EXPECT_TRUE(is_close(dw2, dw_expected, tolerance));
  EXPECT_TRUE(is_close(y_again, values_of(y2), 0.0));
  for (const OwnedTensor* output : {&d_o2, &dz2, &dw2, &y_again}) EXPECT_TRUE(output->surroundings_untouched());
}

INSTANTIATE_TEST_SUITE_P(Cases, GatedRmsNorm,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kF64),
                                            ::testing::Values(GateActivation::kSigmoid, GateActivation::kSilu)));

TEST(RmsNorm, ARowsResultDoesNotDependOnTheOthersNorTheThreads) {
  CpuStream stream;
  const DType dtype = DType::kF32;
  const OwnedTensor x = random_tensor(dtype, {N, D}, 1), w = random_tensor(dtype, {D}, 2);
  const OwnedTensor dy = random_tensor(dtype, {N, D}, 3), y(dtype, {N, D}), rstd(dtype, {N});
  const OwnedTensor dx(dtype, {N, D}), dw(dtype, {D}), dx3(dtype, {N, D}), dw3(dtype, {D});
  rms_norm_forward(stream, y, rstd, x, w, kEps, NormWeight::kPlain);
  fill(dw, 0);
  fill(dw3, 0);
  with_threads(1, [&] { rms_norm_backward(stream, dx, dw, dy, x, w, rstd, NormWeight::kPlain); });
  with_threads(3, [&] { rms_norm_backward(stream, dx3, dw3, dy, x, w, rstd, NormWeight::kPlain); });
  EXPECT_TRUE(is_bit_identical(dx3, dx));
  EXPECT_TRUE(is_bit_identical(dw3, dw));

  const OwnedTensor one(dtype, {1, D}), one_rstd(dtype, {1});
  rms_norm_forward(stream, one, one_rstd, x.tensor().rows(65, 1), w, kEps, NormWeight::kPlain);
  EXPECT_TRUE(is_bit_identical(one, y.tensor().rows(65, 1)));
}

TEST(RmsNorm, RowsOutsideTheViewAddNothing) {
  CpuStream stream;
  const DType dtype = DType::kF32;
  const OwnedTensor x = random_tensor(dtype, {201, D}, 1), w = random_tensor(dtype, {D}, 2);
  const OwnedTensor large(dtype, {256, D});  // NaN after row 201
  set_values(large.tensor().rows(0, 201), values_of(x));
  const OwnedTensor y(dtype, {201, D}), rstd(dtype, {201}), dx(dtype, {201, D}), dw(dtype, {D}), dw_large(dtype, {D});
  fill(dw, 0);
  fill(dw_large, 0);
  rms_norm_forward(stream, y, rstd, x, w, kEps, NormWeight::kPlain);
  rms_norm_backward(stream, dx, dw, x, x, w, rstd, NormWeight::kPlain);
  const Tensor part = large.tensor().rows(0, 201);
  rms_norm_backward(stream, dx, dw_large, part, part, w, rstd, NormWeight::kPlain);
  EXPECT_TRUE(is_bit_identical(dw_large, dw));
}

TEST(RmsNorm, AZeroRowIsSafe) {
  CpuStream stream;
  const OwnedTensor x(DType::kF32, {2, D}), w = random_tensor(DType::kF32, {D}, 2), dy(DType::kF32, {2, D});
  const OwnedTensor y(DType::kF32, {2, D}), rstd(DType::kF32, {2}), dx(DType::kF32, {2, D}), dw(DType::kF32, {D});
  fill(x, 0);
  fill(dy, 1);
  fill(dw, 0);
  rms_norm_forward(stream, y, rstd, x, w, 1e-6, NormWeight::kPlain);
  EXPECT_EQ(values_of(y), std::vector<double>(2 * D));
  rms_norm_backward(stream, dx, dw, dy, x, w, rstd, NormWeight::kPlain);
  for (double value : values_of(dx)) EXPECT_TRUE(std::isfinite(value));
  fill(dy, 0);
  rms_norm_backward(stream, dx, dw, dy, x, w, rstd, NormWeight::kPlain);
  EXPECT_EQ(values_of(dx), std::vector<double>(2 * D));
}

TEST(RmsNorm, RehearsalCountsTheWorkspace) {
  CpuStream stream;
  const DType dtype = DType::kF32;
  const OwnedTensor x = random_tensor(dtype, {N, D}, 1), w = random_tensor(dtype, {D}, 2), dx(dtype, {N, D});
  const OwnedTensor rstd(dtype, {N}), dw(dtype, {D}), y(dtype, {N, D});
  rms_norm_forward(stream, y, rstd, x, w, kEps, NormWeight::kPlain);
  rms_norm_backward(stream, dx, dw, x, x, w, rstd, NormWeight::kPlain);
  Arena plan = Arena::planning("scratch", Device::kCpu);
  Stream rehearsal(Device::kCpu, plan);
  rms_norm_backward(rehearsal, dx, dw, x, x, w, rstd, NormWeight::kPlain);
  EXPECT_GT(plan.peak(), 0);
  EXPECT_EQ(plan.peak(), stream.scratch().peak());
  EXPECT_EQ(plan.used(), 0);
}

}  // namespace
}  // namespace palimpsest
