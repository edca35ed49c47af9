#include "kernels/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace palimpsest {
namespace {

std::vector<float> counting(size_t size) {
  std::vector<float> values(size);
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

TEST(Tensor, KnowsItsExtents) {
  auto values = counting(24);
  const Tensor x(values.data(), DType::kF32, {2, 3, 4});
  EXPECT_EQ(x.numel(), 24);
  EXPECT_EQ(x.bytes(), 96);
  EXPECT_EQ(x.row_size(), 12);
  EXPECT_EQ(x.dim(1), 3);
  EXPECT_EQ(x.dim(-1), 4);
  EXPECT_TRUE(x.contiguous());
  EXPECT_EQ(x.str(), "f32[2, 3, 4] on cpu");
  EXPECT_THROW(x.dim(3), Error);
  EXPECT_FALSE(Tensor().defined());
}

TEST(Tensor, TypedAccessThrowsOnAnotherDtype) {
  auto values = counting(6);
  const Tensor x(values.data(), DType::kF32, {6});
  EXPECT_EQ(x.data<float>()[5], 5.0f);
  EXPECT_THROW(x.data<double>(), Error);
  EXPECT_THROW(x.data<int32_t>(), Error);
  EXPECT_THROW(Tensor().data<float>(), Error);
}

TEST(Tensor, ColumnsAndRowsShareMemory) {
  auto values = counting(30);
  const Tensor x(values.data(), DType::kF32, {5, 6});
  const Tensor part = x.rows(1, 3).columns(2, 3);
  EXPECT_EQ(part.shape(), (Shape{3, 3}));
  EXPECT_EQ(part.row_stride(), 6);
  EXPECT_FALSE(part.contiguous());
  EXPECT_EQ(part.data<float>()[0], 8.0f);
  EXPECT_EQ(part.rows(2, 1).data<float>()[0], 20.0f);
  EXPECT_THROW(x.rows(3, 3), Error);
  EXPECT_THROW(x.columns(4, 3), Error);
  EXPECT_EQ(x.rows(5, 0).numel(), 0);
}

TEST(Tensor, ViewsKeepTheirElements) {
  auto values = counting(24);
  const Tensor x(values.data(), DType::kF32, {4, 6});
  EXPECT_EQ(x.view({2, 12}).row_stride(), 12);
  EXPECT_EQ(x.view({24}).numel(), 24);
  EXPECT_THROW(x.view({5, 5}), Error);

  const Tensor heads = x.columns(0, 4).split_columns(2, 2);
  EXPECT_EQ(heads.shape(), (Shape{4, 2, 2}));
  EXPECT_EQ(heads.row_stride(), 6);
  EXPECT_EQ(heads.merge_columns().shape(), (Shape{4, 4}));
  EXPECT_EQ(heads.merge_columns().row_stride(), 6);
  EXPECT_THROW(heads.view({8, 2}), Error);  // would have to walk over the gaps
  EXPECT_THROW(x.split_columns(4, 2), Error);
}

TEST(Tensor, ChecksNameTheTensorAndBothShapes) {
  auto values = counting(12);
  const Tensor x(values.data(), DType::kF32, {3, 4});
  EXPECT_NO_THROW(check_tensor("x", x, DType::kF32, {kAnyDim, 4}));
  EXPECT_NO_THROW(check_contiguous("x", x));
  try {
    check_tensor("x", x, DType::kF32, {3, 5});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("x is f32[3, 4] on cpu, expected f32[3, 5]"), std::string::npos)
        << error.what();
  }
  EXPECT_THROW(check_tensor("x", x, DType::kF64, {3, 4}), Error);
  EXPECT_THROW(check_tensor("x", x, DType::kF32, {12}), Error);
  EXPECT_THROW(check_tensor("x", Tensor(), DType::kF32, {3, 4}), Error);
  EXPECT_THROW(check_contiguous("x", x.columns(0, 2)), Error);
}

TEST(Shape, RefusesNegativeExtentsAndTooManyDimensions) {
  EXPECT_THROW((Shape{2, -3}), Error);
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1}), Error);
  EXPECT_EQ((Shape{}).numel(), 1);
  EXPECT_EQ((Shape{3, 0}).numel(), 0);
  EXPECT_EQ((Shape{2, 3}).str(), "[2, 3]");
}

TEST(Bfloat16, RoundsToNearestEven) {
  EXPECT_EQ(to_float(to_bf16(1.0f)), 1.0f);
  EXPECT_EQ(to_float(to_bf16(257.0f)), 256.0f);     // half-way, to the even neighbour below
  EXPECT_EQ(to_float(to_bf16(259.0f)), 260.0f);     // half-way, to the even neighbour above
  EXPECT_EQ(to_float(to_bf16(257.0001f)), 258.0f);  // past half-way
  EXPECT_EQ(to_float(to_bf16(-257.0f)), -256.0f);
  EXPECT_TRUE(std::isinf(to_float(to_bf16(3.4e38f))));  // beyond the largest bf16
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_EQ(to_float(to_bf16(-std::numeric_limits<float>::infinity())), -std::numeric_limits<float>::infinity());
}

TEST(Check, FailureTellsWhereAndWhat) {
  const int x = 3;
  try {
    CHECK(x == 4, "x is ", x, " of ", 2.5);
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("kernels/tensor_test.cpp:"), std::string::npos) << message;
    EXPECT_NE(message.find("x == 4: x is 3 of 2.5"), std::string::npos) << message;
  }
  EXPECT_NO_THROW(CHECK(x == 3));
  try {
    throw_user_error("line ", 7, ": bad");
    FAIL();
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(), "line 7: bad");
  }
}

}  // namespace
}  // namespace palimpsest
