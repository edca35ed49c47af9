#include "kernels/expert_rows.h"

#include <gtest/gtest.h>

#include "kernels/random.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t N = 23, K = 2, E = 5, R = N * K, D = 7, F = 11;

// Tokens sent to experts so that one expert gets none and one most.
struct Sorted {
  Sorted()
      : experts(DType::kI32, {N, K}),
        offsets(DType::kI32, {E + 1}),
        row_of(DType::kI32, {N, K}),
        token_of(DType::kI32, {R}) {
    int32_t* chosen = experts.tensor().data<int32_t>();
    for (int64_t n = 0; n < N; ++n) {
      chosen[n * K] = 3;
      chosen[n * K + 1] = static_cast<int32_t>(random_bits(1, 2, static_cast<uint64_t>(n)) % 2 == 0 ? 0 : 4);
    }
    chosen[K] = 2;  // of token 1; expert 1 gets none
    sort_by_expert(stream, rows(), experts);
  }
  ExpertRows rows() const { return {.offsets = offsets, .row_of = row_of, .token_of = token_of}; }
  int64_t expert_of(int64_t row) const {
    int64_t e = 0;
    while (offsets.tensor().data<int32_t>()[e + 1] <= row) ++e;
    return e;
  }
  CpuStream stream;
  OwnedTensor experts, offsets, row_of, token_of;
};

TEST(ExpertRows, AreSortedByExpertAndThenByToken) {
  const Sorted sorted;
  const int32_t* chosen = sorted.experts.tensor().data<int32_t>();
  const int32_t *offsets = sorted.offsets.tensor().data<int32_t>(), *row_of = sorted.row_of.tensor().data<int32_t>(),
                *token_of = sorted.token_of.tensor().data<int32_t>();
  EXPECT_EQ(offsets[0], 0);
  EXPECT_EQ(offsets[1], offsets[2]);
  EXPECT_EQ(offsets[E], R);
  std::vector<bool> taken(R, false);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t j = 0; j < K; ++j) {
      const int32_t row = row_of[n * K + j];
      ASSERT_GE(row, 0);
      ASSERT_LT(row, R);
      EXPECT_FALSE(taken[row]);
      taken[row] = true;
      EXPECT_EQ(token_of[row], n);
      EXPECT_EQ(sorted.expert_of(row), chosen[n * K + j]);
    }
  }
  for (int64_t r = 1; r < R; ++r) {
    if (sorted.expert_of(r) == sorted.expert_of(r - 1)) {
      EXPECT_LT(token_of[r - 1], token_of[r]);
    }
  }
}

TEST(ExpertRows, ARoutingToNoExpertIsAFault) {
  Sorted sorted;
  sorted.experts.tensor().data<int32_t>()[3] = E;
  EXPECT_THROW(sort_by_expert(sorted.stream, sorted.rows(), sorted.experts), Error);
}

TEST(ExpertRows, GatherAndSumAreAdjoint) {
  Sorted sorted;
  const OwnedTensor x = random_tensor(DType::kF64, {N, D}, 1, 1, 2),
                    d_rows = random_tensor(DType::kF64, {R, D}, 2, 1, 3);
  const OwnedTensor rows(DType::kF64, {R, D}, 1), dx(DType::kF64, {N, D}, 4);
  gather_expert_rows(sorted.stream, rows, x, sorted.token_of);
  for (int64_t r = 0; r < R; ++r)
    for (int64_t i = 0; i < D; ++i)
      EXPECT_EQ(values_of(rows)[r * D + i], values_of(x)[sorted.token_of.tensor().data<int32_t>()[r] * D + i]);
  sum_expert_rows(sorted.stream, dx, d_rows, sorted.row_of, Write::kOverwrite);
  EXPECT_NEAR(dot(rows, d_rows), dot(x, dx), 1e-12);
  const std::vector<double> once = values_of(dx);
  sum_expert_rows(sorted.stream, dx, d_rows, sorted.row_of, Write::kAccumulate);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(values_of(dx)[i], 2 * once[i], 1e-14);
  EXPECT_TRUE(rows.surroundings_untouched());
  EXPECT_TRUE(dx.surroundings_untouched());
}

TEST(ExpertRows, ScalingMatchesFiniteDifference) {
  Sorted sorted;
  const OwnedTensor x = random_tensor(DType::kF64, {R, F}, 1), weights = random_tensor(DType::kF64, {N, K}, 2),
                    dy = random_tensor(DType::kF64, {R, F}, 3);
  const auto loss = [&] {
    const OwnedTensor y(DType::kF64, {R, F}, 1);
    scale_expert_rows_forward(sorted.stream, y, x, weights, sorted.row_of);
    return dot(y, dy);
  };
  const OwnedTensor dx(DType::kF64, {R, F}, 2), d_weights(DType::kF64, {N, K});
  scale_expert_rows_backward(sorted.stream, dx, d_weights, dy, x, weights, sorted.row_of);
  EXPECT_TRUE(gradient_matches(loss, x, dx, 1e-8, 30));
  EXPECT_TRUE(gradient_matches(loss, weights, d_weights, 1e-8, 30));
  EXPECT_TRUE(dx.surroundings_untouched());
}

TEST(GroupedLinear, MatchesPlainLoops) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const double tolerance = dtype == DType::kF64 ? 1e-14 : 1e-6;
    Sorted sorted;
    const OwnedTensor x = random_tensor(dtype, {R, D}, 1, 1, 3), w = random_tensor(dtype, {E * F, D}, 2, 1, 1),
                      dy = random_tensor(dtype, {R, F}, 3, 1, 2);
    const OwnedTensor y(dtype, {R, F}, 2), dx(dtype, {R, D}, 1), dw = random_tensor(dtype, {E * F, D}, 4, 1, 5);
    const std::vector<double> xs = values_of(x), ws = values_of(w), gradients = values_of(dy);
    std::vector<double> y_expected(R * F, 0.0), dx_expected(R * D, 0.0), dw_expected = values_of(dw);
    for (int64_t r = 0; r < R; ++r) {
      const int64_t first = sorted.expert_of(r) * F;
      for (int64_t o = 0; o < F; ++o) {
        for (int64_t i = 0; i < D; ++i) {
          y_expected[r * F + o] += xs[r * D + i] * ws[(first + o) * D + i];
          dx_expected[r * D + i] += gradients[r * F + o] * ws[(first + o) * D + i];
          dw_expected[(first + o) * D + i] += gradients[r * F + o] * xs[r * D + i];
        }
      }
    }
    grouped_linear_forward(sorted.stream, y, x, w, sorted.offsets);
    grouped_linear_backward_input(sorted.stream, dx, dy, w, sorted.offsets);
    grouped_linear_backward_weight(sorted.stream, dw, dy, x, sorted.offsets);
    EXPECT_TRUE(is_close(y, y_expected, tolerance));
    EXPECT_TRUE(is_close(dx, dx_expected, tolerance));
    EXPECT_TRUE(is_close(dw, dw_expected, tolerance));
    for (const OwnedTensor* output : {&y, &dx, &dw}) EXPECT_TRUE(output->surroundings_untouched());
  }
}

TEST(TokenGate, MatchesFiniteDifference) {
  CpuStream stream;
  const OwnedTensor x = random_tensor(DType::kF64, {N, D}, 1, 1, 2), z = random_tensor(DType::kF64, {N, 1}, 2),
                    dy = random_tensor(DType::kF64, {N, D}, 3);
  const auto loss = [&] {
    const OwnedTensor y(DType::kF64, {N, D}, 1);
    token_gate_forward(stream, y, x, z);
    return dot(y, dy);
  };
  const OwnedTensor dx(DType::kF64, {N, D}, 2), dz(DType::kF64, {N, 1}, 3);
  token_gate_backward(stream, dx, dz, dy, x, z);
  EXPECT_TRUE(gradient_matches(loss, x, dx, 1e-8, 30));
  EXPECT_TRUE(gradient_matches(loss, z, dz, 1e-8, 30));
  EXPECT_TRUE(dz.surroundings_untouched());
}

}  // namespace
}  // namespace palimpsest
