#include "kernels/linear.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cpu/blas_check.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t N = 13, I = 37, O = 29;

double tolerance_of(DType dtype) {
  return dtype == DType::kF32 ? 1e-6 : 1e-14;
}

// op(a) op(b) + c of row-major matrices.
std::vector<double> product(const std::vector<double>& a, bool transpose_a, const std::vector<double>& b,
                            bool transpose_b, std::vector<double> c, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l)
        c[i * n + j] += (transpose_a ? a[l * m + i] : a[i * k + l]) * (transpose_b ? b[j * k + l] : b[l * n + j]);
  return c;
}

class LinearOfType : public ::testing::TestWithParam<DType> {};

TEST_P(LinearOfType, MatchesPlainLoops) {
  const DType dtype = GetParam();
  CpuStream stream;
  const OwnedTensor x = random_tensor(dtype, {N, I}, 1, 1, 3), w = random_tensor(dtype, {O, I}, 2, 1, 5);
  const OwnedTensor dy = random_tensor(dtype, {N, O}, 3, 1, 2);
  const OwnedTensor y(dtype, {N, O}, 7), dx(dtype, {N, I}, 1), dw = random_tensor(dtype, {O, I}, 4, 1, 6);
  const std::vector<double> none_y(N * O), none_x(N * I), dw_before = values_of(dw);

  linear_forward(stream, y, x, w, Write::kOverwrite);
  const auto y_expected = product(values_of(x), false, values_of(w), true, none_y, N, O, I);
  EXPECT_TRUE(is_close(y, y_expected, tolerance_of(dtype)));
  linear_forward(stream, y, x, w, Write::kAccumulate);
  EXPECT_TRUE(is_close(y, product(values_of(x), false, values_of(w), true, y_expected, N, O, I), tolerance_of(dtype)));

  linear_backward_input(stream, dx, dy, w, Write::kOverwrite);
  const auto dx_expected = product(values_of(dy), false, values_of(w), false, none_x, N, I, O);
  EXPECT_TRUE(is_close(dx, dx_expected, tolerance_of(dtype)));
  linear_backward_input(stream, dx, dy, w, Write::kAccumulate);
  EXPECT_TRUE(
      is_close(dx, product(values_of(dy), false, values_of(w), false, dx_expected, N, I, O), tolerance_of(dtype)));

  linear_backward_weight(stream, dw, dy, x);
  EXPECT_TRUE(is_close(dw, product(values_of(dy), true, values_of(x), false, dw_before, O, I, N), tolerance_of(dtype)));
  for (const OwnedTensor* output : {&y, &dx, &dw}) EXPECT_TRUE(output->surroundings_untouched());
}

TEST_P(LinearOfType, NoTokensAreHarmless) {
  const DType dtype = GetParam();
  CpuStream stream;
  const OwnedTensor x(dtype, {0, I}), dy(dtype, {0, O}), y(dtype, {0, O}), dx(dtype, {0, I});
  const OwnedTensor w = random_tensor(dtype, {O, I}, 2), dw = random_tensor(dtype, {O, I}, 4);
  const OwnedTensor before = converted(dw, dtype);
  linear_forward(stream, y, x, w, Write::kOverwrite);
  linear_backward_input(stream, dx, dy, w, Write::kOverwrite);
  linear_backward_weight(stream, dw, dy, x);
  EXPECT_TRUE(is_bit_identical(dw, before));
}

INSTANTIATE_TEST_SUITE_P(Types, LinearOfType, ::testing::Values(DType::kF32, DType::kF64),
                         [](const auto& info) { return name_of(info.param); });

TEST(Linear, StackedProjectionsAreColumnRanges) {
  CpuStream stream;
  const OwnedTensor x = random_tensor(DType::kF64, {N, I}, 1), w = random_tensor(DType::kF64, {O, I}, 2);
  const OwnedTensor whole(DType::kF64, {N, O}), parts(DType::kF64, {N, O});
  linear_forward(stream, whole, x, w, Write::kOverwrite);
  const Tensor& stacked = parts;
  linear_forward(stream, stacked.columns(0, 11), x, w.tensor().rows(0, 11), Write::kOverwrite);
  linear_forward(stream, stacked.columns(11, O - 11), x, w.tensor().rows(11, O - 11), Write::kOverwrite);
  EXPECT_TRUE(is_close(parts, whole, 1e-15));
}

// A sum kept in bf16 would stay at 256.
TEST(Linear, WeightGradientsOfManyMicroBatchesAddUp) {
  CpuStream stream;
  const OwnedTensor one(DType::kF32, {1, 1}), dy(DType::kF32, {1, 1}), dw(DType::kF32, {1, 1});
  fill(one, 1);
  fill(dw, 0);
  for (const double gradient : {256.0, 1.0}) {
    fill(dy, gradient);
    linear_backward_weight(stream, dw, dy, one);
  }
  EXPECT_EQ(values_of(dw)[0], 257);

  const OwnedTensor dys = random_tensor(DType::kF32, {N, O}, 1), x = random_tensor(DType::kF32, {N, I}, 2);
  const OwnedTensor once(DType::kF32, {O, I}), sum(DType::kF32, {O, I});
  fill(once, 0);
  fill(sum, 0);
  linear_backward_weight(stream, once, dys, x);
  for (int micro_batch = 0; micro_batch < 64; ++micro_batch) linear_backward_weight(stream, sum, dys, x);
  std::vector<double> expected = values_of(once);
  for (double& value : expected) value *= 64;
  EXPECT_TRUE(is_close(sum, expected, 1e-6));
}

TEST(Linear, WrongOperandsAreErrors) {
  CpuStream stream;
  const OwnedTensor x(DType::kF32, {N, I}), w(DType::kF32, {O, I}), y(DType::kF32, {N, O}), wide(DType::kF64, {N, O});
  EXPECT_THROW(linear_forward(stream, y, x, x, Write::kOverwrite), Error);
  EXPECT_THROW(linear_forward(stream, x, x, w, Write::kOverwrite), Error);
  EXPECT_THROW(linear_forward(stream, wide, x, w, Write::kOverwrite), Error);
  EXPECT_THROW(linear_forward(stream, y, Tensor(), w, Write::kOverwrite), Error);
  const Tensor elsewhere(nullptr, DType::kF32, {N, I}, Device::kCuda);
  EXPECT_THROW(linear_forward(stream, y, elsewhere, w, Write::kOverwrite), Error);
  const OwnedTensor half(DType::kBF16, {N, I});
  EXPECT_THROW(linear_forward(stream, y, half, w, Write::kOverwrite), Error);
}

TEST(Linear, RehearsalChecksShapesAndTouchesNothing) {
  Arena scratch = Arena::planning("scratch", Device::kCpu), region = Arena::planning("activations", Device::kCpu);
  Stream stream(Device::kCpu, scratch);
  const Tensor x = region.allocate(DType::kF32, {N, I}), w = region.allocate(DType::kF32, {O, I});
  const Tensor y = region.allocate(DType::kF32, {N, O});
  EXPECT_NO_THROW(linear_forward(stream, y, x, w, Write::kOverwrite));
  EXPECT_THROW(linear_forward(stream, x, y, w, Write::kOverwrite), Error);
}

TEST(CheckBlas, AcceptsThisMachinesLibrary) {
  EXPECT_NO_THROW(check_blas());
}

// A product like the library's, except that `spoil` may change it.
template <class T, class Spoil>
void expect_refused(Spoil spoil) {
  auto product = [&](cpu::Transpose transpose_a, cpu::Transpose transpose_b, const T* a, const T* b, T* c) {
    constexpr int n = cpu::kBlasCheckSize;
    cpu::gemm(transpose_a, transpose_b, n, n, n, T(1), a, n, b, n, T(0), c, n);
    spoil(transpose_a, transpose_b, c);
  };
  try {
    cpu::check_product<T>(product);
    FAIL() << "a wrong product was accepted";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("OPENBLAS_CORETYPE"), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
}

TEST(CheckBlas, RefusesWrongProducts) {
  constexpr int n = cpu::kBlasCheckSize;
  using cpu::Transpose;
  expect_refused<float>([](Transpose, Transpose, float* c) { c[n * n - 1] += 1e-3f; });
  expect_refused<double>([](Transpose, Transpose, double* c) { c[17 * n + 3] *= 1 + 1e-6; });
  expect_refused<float>([](Transpose a, Transpose, float* c) { c[5] = a == Transpose::kYes ? NAN : c[5]; });
  expect_refused<double>([](Transpose, Transpose b, double* c) { c[5] = b == Transpose::kYes ? 0 : c[5]; });
}

}  // namespace
}  // namespace palimpsest
