#include "kernels/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

OwnedTensor tensor_of(DType dtype, const std::vector<double>& values) {
  OwnedTensor tensor(dtype, {static_cast<int64_t>(values.size())});
  set_values(tensor, values);
  return tensor;
}

// A control tensor as a run starts with: no steps applied.
OwnedTensor new_control() {
  return tensor_of(DType::kF64, {0, 0, 0, 0});
}

// The whole of one step: norm of these gradients, clip factor, step count.
void prepare(CpuStream& stream, const Tensor& control, std::initializer_list<Tensor> grads, double max_norm = 0) {
  set_value(control, kNormSquared, 0);
  for (const Tensor& grad : grads) accumulate_norm_squared(stream, control, grad);
  prepare_step(stream, control, max_norm);
}

TEST(GradientNorm, ThreeFourTwelveIsThirteen) {
  CpuStream stream;
  const OwnedTensor control = new_control();
  prepare(stream, control, {tensor_of(DType::kF32, {3, 4}), tensor_of(DType::kF64, {12})});
  EXPECT_EQ(values_of(control), (std::vector<double>{169, 1, 1, 1}));
  prepare(stream, control, {tensor_of(DType::kF32, {3, 4}), tensor_of(DType::kF32, {12})}, 6.5);
  EXPECT_EQ(values_of(control), (std::vector<double>{169, 0.5, 2, 1}));
  prepare(stream, control, {tensor_of(DType::kF32, {3, 4}), tensor_of(DType::kF32, {12})}, 13.5);
  EXPECT_EQ(values_of(control), (std::vector<double>{169, 1, 3, 1}));
}

TEST(GradientNorm, IsSummedInF64InAFixedOrder) {
  CpuStream stream;
  const OwnedTensor grad = random_tensor(DType::kF32, {1301, 1003}, 1), one = new_control(), three = new_control();
  double expected = 0;
  for (double value : values_of(grad)) expected += value * value;
  with_threads(1, [&] { accumulate_norm_squared(stream, one, grad); });
  with_threads(3, [&] { accumulate_norm_squared(stream, three, grad); });
  EXPECT_NEAR(values_of(one)[kNormSquared] / expected, 1, 1e-12);
  EXPECT_TRUE(is_bit_identical(three, one));
  // Squares beyond the range of f32.
  const OwnedTensor large = tensor_of(DType::kF32, {3e30, 4e30}), control = new_control();
  prepare(stream, control, {large}, 1);
  EXPECT_NEAR(values_of(control)[kClipFactor] * 5e30, 1, 1e-6);
}

TEST(GradientNorm, OfAListIsThatOfItsTensorsInTurn) {
  CpuStream stream;
  const std::vector<Tensor> none;
  const OwnedTensor a = random_tensor(DType::kF32, {17, 3}, 1), b = random_tensor(DType::kF32, {101}, 2);
  const OwnedTensor together = new_control(), in_turn = new_control();
  accumulate_norm_squared(stream, together, none);
  EXPECT_EQ(values_of(together)[kNormSquared], 0);
  accumulate_norm_squared(stream, together, std::vector<Tensor>{a, b});
  accumulate_norm_squared(stream, in_turn, a);
  accumulate_norm_squared(stream, in_turn, b);
  EXPECT_TRUE(is_bit_identical(together, in_turn));
}

TEST(Adamw, OfAListHasADecayEach) {
  CpuStream stream;
  const OwnedTensor control = tensor_of(DType::kF64, {1, 1, 1, 1});
  std::vector<OwnedTensor> tensors;
  std::vector<AdamwOperands> operands;
  for (const double decay : {0.5, 0.0}) {
    const Tensor param = tensors.emplace_back(tensor_of(DType::kF64, {2, 4}));
    const Tensor m = tensors.emplace_back(tensor_of(DType::kF64, {0, 0}));
    const Tensor v = tensors.emplace_back(tensor_of(DType::kF64, {0, 0}));
    const Tensor grad = tensors.emplace_back(tensor_of(DType::kF64, {0, 0}));
    operands.push_back({.param = param, .m = m, .v = v, .grad = grad, .weight_decay = decay});
  }
  adamw_step(stream, operands, control, {.lr = 0.1, .weight_decay = 7});
  EXPECT_EQ(values_of(operands[0].param), (std::vector<double>{1.9, 3.8}));
  EXPECT_EQ(values_of(operands[1].param), (std::vector<double>{2, 4}));
}

// Gradients 1, then -0.5, with b1 = 0.9, b2 = 0.99, lr = 0.1, eps = 0, decay 0.1 on a weight of 2:
//   step 1: m = 0.1, v = 0.01, m^ = 1, v^ = 1: 2 - 0.1*0.1*2 - 0.1 = 1.88
//   step 2: m = 0.04, v = 0.0124, m^ = 0.04/0.19, v^ = 0.0124/0.0199
TEST(Adamw, FollowsATableByHand) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    CpuStream stream;
    const OwnedTensor p = tensor_of(dtype, {2}), m = tensor_of(dtype, {0}), v = tensor_of(dtype, {0});
    const OwnedTensor grad = tensor_of(dtype, {1}), control = new_control();
    const AdamwOptions options{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 0, .weight_decay = 0.1};
    const double tolerance = dtype == DType::kF32 ? 1e-6 : 1e-12;
    prepare(stream, control, {grad});
    adamw_step(stream, p, m, v, grad, control, options);
    EXPECT_NEAR(values_of(p)[0], 1.88, tolerance);
    EXPECT_NEAR(values_of(m)[0], 0.1, tolerance);
    EXPECT_NEAR(values_of(v)[0], 0.01, tolerance);
    fill(grad, -0.5);
    prepare(stream, control, {grad});
    adamw_step(stream, p, m, v, grad, control, options);
    EXPECT_NEAR(values_of(m)[0], 0.04, tolerance);
    EXPECT_NEAR(values_of(v)[0], 0.0124, tolerance);
    EXPECT_NEAR(values_of(p)[0], 1.88 - 0.01 * 1.88 - 0.1 * (0.04 / 0.19) / std::sqrt(0.0124 / 0.0199), tolerance);
    for (const OwnedTensor* output : {&p, &m, &v}) EXPECT_TRUE(output->surroundings_untouched());
  }
}

TEST(Adamw, TenStepsMatchPlainLoops) {
  constexpr int64_t kCount = 20011;  // more than one range
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    CpuStream stream;
    const OwnedTensor p = random_tensor(dtype, {kCount}, 1), m(dtype, {kCount}), v(dtype, {kCount});
    const OwnedTensor control = new_control();
    fill(m, 0);
    fill(v, 0);
    std::vector<double> weight = values_of(p), mean(kCount), square(kCount);
    const AdamwOptions options{.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.2};
    for (int step = 1; step <= 10; ++step) {
      const OwnedTensor grad = random_tensor(dtype, {kCount}, 100 + step);
      prepare(stream, control, {grad}, 10);
      adamw_step(stream, p, m, v, grad, control, options);
      const std::vector<double> g = values_of(grad);
      double norm = 0;
      for (double value : g) norm += value * value;
      const double clip = std::min(1.0, 10 / std::sqrt(norm));
      for (int64_t i = 0; i < kCount; ++i) {
        mean[i] = 0.9 * mean[i] + 0.1 * clip * g[i];
        square[i] = 0.95 * square[i] + 0.05 * clip * g[i] * clip * g[i];
        const double mean_hat = mean[i] / (1 - std::pow(0.9, step)),
                     square_hat = square[i] / (1 - std::pow(0.95, step));
        weight[i] -= 3e-3 * 0.2 * weight[i] + 3e-3 * mean_hat / (std::sqrt(square_hat) + 1e-8);
      }
    }
    const double tolerance = dtype == DType::kF32 ? 1e-6 : 1e-13;
    EXPECT_TRUE(is_close(p, weight, tolerance));
    EXPECT_TRUE(is_close(m, mean, tolerance));
    EXPECT_TRUE(is_close(v, square, tolerance));
  }
}

TEST(Adamw, TinyStepsAddUp) {
  CpuStream stream;
  const OwnedTensor p = tensor_of(DType::kF32, {1}), m = tensor_of(DType::kF32, {0}), v = tensor_of(DType::kF32, {0});
  const OwnedTensor grad = tensor_of(DType::kF32, {0.3}), control = new_control();
  for (int step = 0; step < 100; ++step) {
    prepare(stream, control, {grad});
    adamw_step(stream, p, m, v, grad, control, {.lr = 6e-4});
  }
  EXPECT_NEAR(values_of(p)[0], 0.940, 1e-5);
  EXPECT_EQ(values_of(control)[kAppliedSteps], 100);
}

TEST(Adamw, NonFiniteGradientsLeaveEverythingBitIdentical) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    CpuStream stream;
    const DType dtype = DType::kF32;
    const OwnedTensor p = random_tensor(dtype, {5, 7}, 1), m = random_tensor(dtype, {35}, 2);
    const OwnedTensor v = random_tensor(dtype, {35}, 3, 0.1), grad = random_tensor(dtype, {5, 7}, 4);
    for (int64_t i = 0; i < 35; ++i) set_value(v, i, 1 + i);
    const OwnedTensor p0 = converted(p, dtype), m0 = converted(m, dtype), v0 = converted(v, dtype);
    const OwnedTensor control = tensor_of(DType::kF64, {0, 1, 8, 1});
    set_value(grad, 17, bad);
    prepare(stream, control, {grad}, 1);
    EXPECT_EQ(values_of(control)[kFinite], 0);
    EXPECT_EQ(values_of(control)[kAppliedSteps], 8);
    EXPECT_EQ(values_of(control)[kClipFactor], 0);
    adamw_step(stream, p, m, v, grad, control, {.lr = 0.1, .weight_decay = 0.1});
    sgd_step(stream, p, grad, control, 0.1);
    EXPECT_TRUE(is_bit_identical(p, p0));
    EXPECT_TRUE(is_bit_identical(m, m0));
    EXPECT_TRUE(is_bit_identical(v, v0));

    fill_random(grad, 5);
    prepare(stream, control, {grad}, 1);
    EXPECT_EQ(values_of(control)[kFinite], 1);
    EXPECT_EQ(values_of(control)[kAppliedSteps], 9);
    adamw_step(stream, p, m, v, grad, control, {.lr = 0.1});
    EXPECT_FALSE(is_bit_identical(p, p0));
  }
}

TEST(Adamw, DecaysOnlyWhereAsked) {
  CpuStream stream;
  const DType dtype = DType::kF32;
  const OwnedTensor decayed = random_tensor(dtype, {33}, 1), exempt = converted(decayed, dtype);
  const OwnedTensor before = converted(decayed, dtype), grad(dtype, {33}), control = new_control();
  fill(grad, 0);
  const OwnedTensor m1 = converted(grad, dtype), v1 = converted(grad, dtype), m2 = converted(grad, dtype);
  const OwnedTensor v2 = converted(grad, dtype);
  for (int step = 0; step < 10; ++step) {
    prepare(stream, control, {grad});
    adamw_step(stream, decayed, m1, v1, grad, control, {.lr = 0.01, .weight_decay = 0.1});
    adamw_step(stream, exempt, m2, v2, grad, control, {.lr = 0.01, .weight_decay = 0});
  }
  EXPECT_TRUE(is_bit_identical(exempt, before));
  std::vector<double> expected = values_of(before);
  for (double& value : expected) value *= std::pow(1 - 0.001, 10);
  EXPECT_TRUE(is_close(decayed, expected, 1e-6));
}

TEST(Sgd, StepsByTheClippedGradient) {
  CpuStream stream;
  const OwnedTensor p = tensor_of(DType::kF64, {1, 2}), grad = tensor_of(DType::kF64, {3, 4}), control = new_control();
  prepare(stream, control, {grad});
  sgd_step(stream, p, grad, control, 1);
  EXPECT_EQ(values_of(p), (std::vector<double>{-2, -2}));
  prepare(stream, control, {grad}, 2.5);
  sgd_step(stream, p, grad, control, 2);
  EXPECT_EQ(values_of(p), (std::vector<double>{-5, -6}));
}

TEST(Adamw, DifferentSizesAreErrors) {
  CpuStream stream;
  const OwnedTensor p(DType::kF32, {6}), m(DType::kF32, {6}), grad(DType::kF32, {5}), wide(DType::kF64, {6});
  const OwnedTensor control = new_control();
  EXPECT_THROW(adamw_step(stream, p, m, m, grad, control, {}), Error);
  EXPECT_THROW(adamw_step(stream, p, wide, m, m, control, {}), Error);
  EXPECT_THROW(sgd_step(stream, p, grad, control, 1), Error);
  EXPECT_THROW(prepare_step(stream, wide, 1), Error);
}

}  // namespace
}  // namespace palimpsest
