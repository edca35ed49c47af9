// The delta rule on a GPU against the CPU in f64: every kind, odd sizes, states in and out, all save levels.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cuda/lab.h"
#include "tests/support/delta_rule_case.h"

namespace palimpsest {
namespace {

using namespace support;

struct Sizes {
  int64_t H, HV, K, V;
};

// Numbers that bf16 holds exactly.
DeltaRuleCase rounded_case(const DeltaRuleOptions& options, const Sizes& sizes, const std::vector<int64_t>& offsets) {
  DeltaRuleCase c = random_delta_rule_case(options, sizes.H, sizes.HV, sizes.K, sizes.V, offsets, 3);
  for (auto& [name, values] : c.in)
    for (double& value : values) value = to_float(to_bf16(static_cast<float>(value)));
  return c;
}

void expect_same(const DeltaRuleCase& c) {
  SKIP_WITHOUT_GPU();
  const NamedArrays reference = run_delta_rule(c, DType::kF64);
  for (const RowSpacing spacing : {RowSpacing::kNone, RowSpacing::kGaps}) {
    const NamedArrays f32 = run_delta_rule(c, DType::kF32, spacing, Device::kCuda);
    EXPECT_TRUE(all_close(f32, reference, 2e-5, 1e-4)) << "f32";
    const NamedArrays bf16 = run_delta_rule(c, DType::kBF16, spacing, Device::kCuda);
    // A state of one number has nothing to average its rounding errors over.
    const double limit = c.K == 1 ? 0.2 : 3e-2;
    EXPECT_TRUE(all_close(bf16, reference, limit, std::max(limit, 5e-2))) << "bf16";
    EXPECT_TRUE(bf16 == run_delta_rule(c, DType::kBF16, spacing, Device::kCuda)) << "two runs differ";
  }
}

const std::vector<int64_t> kMixed = {0, 1, 4, 41, 41, 171, 200};

TEST(CudaDeltaRule, EveryKindMatchesTheCpu) {
  for (const Decay decay : {Decay::kNone, Decay::kScalar, Decay::kVector})
    for (const DeltaRule delta : {DeltaRule::kOff, DeltaRule::kOn})
      for (const Gate gate : {Gate::kSoftplus, Gate::kBounded, Gate::kFixed}) {
        if (gate == Gate::kFixed && decay != Decay::kScalar) continue;
        if (gate == Gate::kBounded && decay == Decay::kNone) continue;
        SCOPED_TRACE(::testing::Message() << "decay " << static_cast<int>(decay) << ", delta "
                                          << static_cast<int>(delta) << ", gate " << static_cast<int>(gate));
        expect_same(
            rounded_case({.decay = decay, .delta_rule = delta, .gate = gate, .scale = 0.125}, {2, 4, 64, 96}, kMixed));
      }
}

TEST(CudaDeltaRule, OddSizesMatchTheCpu) {
  for (const Sizes& sizes : {Sizes{1, 1, 1, 1}, Sizes{3, 3, 37, 19}, Sizes{1, 2, 128, 128}, Sizes{1, 1, 256, 70}})
    for (const std::vector<int64_t>& offsets :
         {std::vector<int64_t>{0, 1}, {0, 63}, {0, 64}, {0, 65}, {0, 200}, kMixed}) {
      SCOPED_TRACE(::testing::Message() << "K " << sizes.K << ", tokens " << offsets.back());
      // With one channel the l2 norm leaves nothing but the sign, and its gradient is rounding noise.
      expect_same(rounded_case({.l2norm_qk = sizes.K > 1, .scale = 0.3}, sizes, offsets));
    }
}

TEST(CudaDeltaRule, ChunkSizesAndSaveLevelsMatchTheCpu) {
  for (const int64_t chunk_size : {16, 32, 64})
    for (const SaveLevel level : {SaveLevel::kNothing, SaveLevel::kMatrices, SaveLevel::kAll})
      expect_same(rounded_case({.scale = 0.2, .chunk_size = chunk_size, .save_level = level}, {1, 2, 64, 64}, kMixed));
}

TEST(CudaDeltaRule, FirstTokenWithoutAStateHasNoGateGradient) {
  SKIP_WITHOUT_GPU();
  DeltaRuleCase c = rounded_case({.scale = 0.125}, {1, 1, 64, 64}, {0, 100});
  c.in.erase("initial_state");
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const NamedArrays results = run_delta_rule(c, dtype, RowSpacing::kNone, Device::kCuda);
    for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(results.at("grad.gate_logit")[static_cast<size_t>(i)], 0.0);
  }
}

}  // namespace
}  // namespace palimpsest
