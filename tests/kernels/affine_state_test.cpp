#include "kernels/affine_state.h"

#include <gtest/gtest.h>

#include "kernels/delta_rule.h"
#include "tests/support/delta_rule_case.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t HV = 3, K = 5, V = 7;

TEST(AffineState, AppliesTheMapOfEachHeadAndItsAdjoint) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const OwnedTensor map = random_tensor(dtype, {1, HV, K, V + K}, 1);
    const std::vector<double> m = values_of(map);
    for (const AffineDirection direction : {AffineDirection::kForward, AffineDirection::kAdjoint}) {
      const OwnedTensor state = random_tensor(dtype, {1, HV, K, V}, 2);
      const std::vector<double> s = values_of(state);
      std::vector<double> expected;
      for (int64_t h = 0; h < HV; ++h)
        for (int64_t i = 0; i < K; ++i)
          for (int64_t j = 0; j < V; ++j) {
            double sum = m[(h * K + i) * (V + K) + j];
            for (int64_t c = 0; c < K; ++c) {
              const int64_t row = direction == AffineDirection::kForward ? i : c;
              const int64_t column = direction == AffineDirection::kForward ? c : i;
              sum += m[(h * K + row) * (V + K) + V + column] * s[(h * K + c) * V + j];
            }
            expected.push_back(sum);
          }
      CpuStream stream;
      affine_apply(stream, state, map, direction);
      EXPECT_TRUE(is_close(state, expected, dtype == DType::kF32 ? 1e-6 : 1e-14));
      EXPECT_TRUE(state.surroundings_untouched());
    }
  }
}

TEST(AffineState, TheIdentityChangesNothing) {
  const OwnedTensor maps(DType::kF64, {2, HV, K, V + K}), state = random_tensor(DType::kF64, {1, HV, K, V}, 3);
  const OwnedTensor before = converted(state, DType::kF64);
  CpuStream stream;
  affine_identity(stream, maps);
  for (int64_t row : {0, 1})
    for (const AffineDirection direction : {AffineDirection::kForward, AffineDirection::kAdjoint})
      affine_apply(stream, state, maps.tensor().rows(row, 1), direction);
  EXPECT_TRUE(is_bit_identical(state, before));
  EXPECT_TRUE(maps.surroundings_untouched());
}

TEST(AffineState, RefusesMapsThatDoNotFitTheState) {
  CpuStream stream;
  const OwnedTensor state(DType::kF64, {1, HV, K, V}), map(DType::kF64, {1, HV, K, V}), flat(DType::kF64, {1, 2, 5, 4});
  EXPECT_THROW(affine_apply(stream, state, map, AffineDirection::kForward), Error);
  EXPECT_THROW(affine_identity(stream, flat), Error);
}

// A range of tokens is the map whose columns are the final states from zero and from the identity.
TEST(AffineState, TheMapOfARangeIsTheDeltaRulesFinalState) {
  for (const DeltaRule delta : {DeltaRule::kOff, DeltaRule::kOn}) {
    DeltaRuleCase c = random_delta_rule_case({.decay = Decay::kVector, .delta_rule = delta}, 1, HV, K, V, {0, 70}, 4);
    const NamedArrays expected = run_delta_rule(c, DType::kF64);
    const OwnedTensor state(DType::kF64, {1, HV, K, V}), map(DType::kF64, {1, HV, K, V + K});
    set_values(state, c.in["initial_state"]);
    c.in.erase("grad_final_state");
    DeltaRuleCase wide = c;
    wide.V = V + K;
    wide.in["v"].clear();
    wide.in["grad_output"].assign(static_cast<size_t>(70 * HV * (V + K)), 0.0);
    for (int64_t i = 0; i < 70 * HV; ++i) {
      wide.in["v"].insert(wide.in["v"].end(), c.in["v"].begin() + i * V, c.in["v"].begin() + (i + 1) * V);
      wide.in["v"].insert(wide.in["v"].end(), K, 0.0);
    }
    CpuStream stream;
    affine_identity(stream, map);
    wide.in["initial_state"] = values_of(map);
    set_values(map, run_delta_rule(wide, DType::kF64).at("final_state"));
    affine_apply(stream, state, map, AffineDirection::kForward);
    EXPECT_TRUE(is_close(state, expected.at("final_state"), 1e-12));
  }
}

}  // namespace
}  // namespace palimpsest
