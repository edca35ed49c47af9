#include "kernels/elementwise.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/part_sums.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

class ElementwiseOfType : public ::testing::TestWithParam<DType> {};

TEST_P(ElementwiseOfType, MatchesPlainLoopsWithAndWithoutGaps) {
  const DType dtype = GetParam();
  CpuStream stream;
  for (const int64_t gap : {0, 5}) {
    const Shape shape = {67, 3, 101};  // more than one range of elements
    const OwnedTensor a = random_tensor(dtype, shape, 1, 1, gap), b = random_tensor(dtype, shape, 2, 1, gap ? 2 : 0);
    const OwnedTensor sum(dtype, shape, gap ? 3 : 0), same(dtype, shape, gap), gated(dtype, shape, gap);
    add(stream, sum, a, b);
    copy(stream, same, a);
    sigmoid_gate_forward(stream, gated, a, b);
    const auto x = values_of(a), z = values_of(b);
    std::vector<double> sum_expected(x.size()), gated_expected(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      sum_expected[i] = x[i] + z[i];
      gated_expected[i] = x[i] * sigmoid(z[i]);
    }
    const double tolerance = dtype == DType::kF32 ? 1e-6 : 1e-15;
    EXPECT_TRUE(is_close(sum, sum_expected, tolerance));
    EXPECT_TRUE(is_close(gated, gated_expected, tolerance));
    EXPECT_TRUE(is_bit_identical(same, a));
    fill_zero(stream, sum);
    EXPECT_EQ(values_of(sum), std::vector<double>(x.size()));
    for (const OwnedTensor* output : {&sum, &same, &gated}) EXPECT_TRUE(output->surroundings_untouched());
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ElementwiseOfType, ::testing::Values(DType::kF32, DType::kF64),
                         [](const auto& info) { return name_of(info.param); });

TEST(Elementwise, AddWorksInPlace) {
  CpuStream stream;
  const OwnedTensor a = random_tensor(DType::kF32, {9, 31}, 1), b = random_tensor(DType::kF32, {9, 31}, 2);
  const OwnedTensor sum(DType::kF32, {9, 31}), in_place = converted(a, DType::kF32), other = converted(b, DType::kF32);
  add(stream, sum, a, b);
  add(stream, in_place, in_place, b);
  add(stream, other, a, other);
  EXPECT_TRUE(is_bit_identical(in_place, sum));
  EXPECT_TRUE(is_bit_identical(other, sum));
}

TEST_P(ElementwiseOfType, PartsAreAddedInTheirOrder) {
  const DType dtype = GetParam();
  CpuStream stream;
  const int64_t n = 23, D = 701;  // more than one range of elements
  for (const int64_t count : {1, 3, 7}) {
    const OwnedTensor own = random_tensor(dtype, {n, D}, 1), parts = random_tensor(dtype, {count * n, D}, 2);
    const OwnedTensor sum(dtype, {n, D}), in_place = converted(own, dtype), expected = converted(own, dtype);
    for (int64_t part = 0; part < count; ++part) add(stream, expected, expected, parts.tensor().rows(part * n, n));
    add_parts(stream, sum, own, parts);
    add_parts(stream, in_place, in_place, parts);
    EXPECT_TRUE(is_bit_identical(sum, expected)) << count;
    EXPECT_TRUE(is_bit_identical(in_place, expected)) << count;
    EXPECT_TRUE(sum.surroundings_untouched());
  }
  const OwnedTensor own(dtype, {n, D}), odd(dtype, {n + 1, D});
  EXPECT_THROW(add_parts(stream, own, own, odd), Error);
}

// Sums of a residual stream in f64 keep what f32 would lose.
TEST(Elementwise, WideStreamsAreAddedToAndRounded) {
  CpuStream stream;
  const Shape shape = {9, 31};
  const OwnedTensor x = random_tensor(DType::kF64, shape, 1, 1, 2), b = random_tensor(DType::kF32, shape, 2, 1e-8, 3);
  const OwnedTensor sum(DType::kF64, shape, 1), rounded(DType::kF32, shape, 4);
  add(stream, sum, x, b);
  copy(stream, rounded, x);
  const std::vector<double> wide = values_of(x), small = values_of(b);
  std::vector<double> sum_expected, rounded_expected;
  for (size_t i = 0; i < wide.size(); ++i) {
    sum_expected.push_back(wide[i] + small[i]);
    rounded_expected.push_back(static_cast<float>(wide[i]));
  }
  EXPECT_EQ(values_of(sum), sum_expected);
  EXPECT_EQ(values_of(rounded), rounded_expected);
  EXPECT_TRUE(sum.surroundings_untouched());
  EXPECT_TRUE(rounded.surroundings_untouched());
  EXPECT_THROW(copy(stream, sum, rounded), Error);  // the other way nothing is missing, and nothing asks for it
  EXPECT_THROW(add(stream, rounded, x, b), Error);
}

TEST(Elementwise, ManyCopiesAreThoseOfEach) {
  CpuStream stream;
  const OwnedTensor a = random_tensor(DType::kF64, {9, 31}, 1, 1, 2), b = random_tensor(DType::kF32, {5, 8}, 2);
  const OwnedTensor rounded(DType::kF32, {9, 31}, 4), expected(DType::kF32, {9, 31}), same(DType::kF32, {5, 8});
  const std::vector<CopyOperands> operands = {{.y = rounded, .x = a}, {.y = same, .x = b}};
  copy_all(stream, operands);
  copy(stream, expected, a);
  EXPECT_TRUE(is_bit_identical(rounded, expected));
  EXPECT_TRUE(is_bit_identical(same, b));
  const std::vector<CopyOperands> unlike = {{.y = same, .x = b}, {.y = same, .x = a}};
  EXPECT_THROW(copy_all(stream, unlike), Error);
}

TEST(SigmoidGate, BackwardMatchesFiniteDifference) {
  CpuStream stream;
  const Shape shape = {7, 13};
  const OwnedTensor x = random_tensor(DType::kF64, shape, 1), z = random_tensor(DType::kF64, shape, 2, 2);
  const OwnedTensor dy = random_tensor(DType::kF64, shape, 3), y(DType::kF64, shape);
  const OwnedTensor dx(DType::kF64, shape, 2), dz(DType::kF64, shape, 3);
  sigmoid_gate_backward(stream, dx, dz, dy, x, z);
  auto loss = [&] {
    sigmoid_gate_forward(stream, y, x, z);
    return dot(y, dy);
  };
  EXPECT_TRUE(gradient_matches(loss, x, dx));
  EXPECT_TRUE(gradient_matches(loss, z, dz));

  const OwnedTensor in_place = converted(dy, DType::kF64), dz_again(DType::kF64, shape);
  sigmoid_gate_backward(stream, in_place, dz_again, in_place, x, z);
  EXPECT_TRUE(is_bit_identical(in_place, dx));
  EXPECT_TRUE(is_bit_identical(dz_again, dz));
}

TEST(Elementwise, DifferentShapesAreErrors) {
  CpuStream stream;
  const OwnedTensor a(DType::kF32, {3, 4}), b(DType::kF32, {4, 3}), c(DType::kF64, {3, 4});
  EXPECT_THROW(add(stream, a, a, b), Error);
  EXPECT_THROW(copy(stream, c, a), Error);
  EXPECT_THROW(sigmoid_gate_forward(stream, b, a, a), Error);
}

}  // namespace
}  // namespace palimpsest
