// Cases as small as reach every path of the kernels whose threads exchange most through shared memory: the plain delta
// rule, attention, earlier keys, grouped products. racecheck follows each of those accesses, which takes minutes for
// the sizes of the other tests (sanitize.sh); here a case is a test of its own and runs each kernel once a dtype.
#include <gtest/gtest.h>

#include "tests/cuda/lab.h"
#include "tests/cuda/op_cases.h"
#include "tests/support/delta_rule_case.h"

namespace palimpsest {
namespace {

using namespace support;

// An empty document, and one of two tiles of tokens.
const std::vector<int64_t> kDocuments = {0, 3, 3, 69};

// ---- the plain delta rule: sizes that Hopper's kernels leave alone ----

struct SmallDeltaRule {
  const char* name;
  DeltaRuleOptions options;
  int64_t K, V;
};
void PrintTo(const SmallDeltaRule& c, std::ostream* out) {
  *out << c.name;
}

class CudaSmallDeltaRule : public ::testing::TestWithParam<SmallDeltaRule> {};

TEST_P(CudaSmallDeltaRule, MatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  const auto& [name, options, K, V] = GetParam();
  DeltaRuleCase c = random_delta_rule_case(options, 1, 2, K, V, kDocuments, 5);
  for (auto& [tensor, values] : c.in)
    for (double& value : values) value = to_float(to_bf16(static_cast<float>(value)));
  const NamedArrays reference = run_delta_rule(c, DType::kF64);
  EXPECT_TRUE(all_close(run_delta_rule(c, DType::kF32, RowSpacing::kGaps, Device::kCuda), reference, 2e-5, 1e-4));
  EXPECT_TRUE(all_close(run_delta_rule(c, DType::kBF16, RowSpacing::kNone, Device::kCuda), reference, 3e-2, 5e-2));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CudaSmallDeltaRule,
    ::testing::Values(
        // two slices of keys and two tiles of values, operands in two stages
        SmallDeltaRule{"VectorDecay", {.scale = 0.2, .save_level = SaveLevel::kAll}, 72, 72},
        // in bf16 keys too long for two stages
        SmallDeltaRule{"LongKeys", {.scale = 0.1}, 136, 8},
        SmallDeltaRule{
            "ScalarDecay", {.decay = Decay::kScalar, .scale = 0.2, .save_level = SaveLevel::kMatrices}, 72, 8},
        // rows that move element by element
        SmallDeltaRule{"NoDeltaRule", {.delta_rule = DeltaRule::kOff, .gate = Gate::kBounded, .scale = 0.2}, 37, 19},
        // in bf16 computed in f32
        SmallDeltaRule{"FewKeys", {.decay = Decay::kNone, .scale = 0.3, .chunk_size = 16}, 20, 8},
        SmallDeltaRule{
            "FixedDecay", {.decay = Decay::kScalar, .gate = Gate::kFixed, .scale = 0.2, .chunk_size = 32}, 40, 8}),
    [](const auto& info) { return info.param.name; });

// ---- attention: every size that kernels are compiled for; blocks that walk more than two steps ----

struct SmallAttention {
  const char* name;
  AttentionSizes sizes;
};
void PrintTo(const SmallAttention& c, std::ostream* out) {
  *out << c.name;
}

class CudaSmallAttention : public ::testing::TestWithParam<SmallAttention> {};

TEST_P(CudaSmallAttention, MatchesTheCpu) {
  expect_same_on_gpu([&](Lab& lab) { run_attention(lab, GetParam().sizes, Documents(kDocuments)); });
}

TEST_P(CudaSmallAttention, ToEarlierKeysMatchesTheCpu) {
  expect_same_on_gpu([&](Lab& lab) { run_attention_prefix(lab, GetParam().sizes, 66, 67); });
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaSmallAttention,
                         ::testing::Values(SmallAttention{"Packed", {2, 1, 40, 24, 8, 0.1}},
                                           SmallAttention{"Unpacked", {1, 1, 37, 19, 3, 0.1}},
                                           SmallAttention{"KeysBeyond128", {1, 1, 136, 40, 0, 0.1}},
                                           SmallAttention{"KeysBeyond192", {1, 1, 200, 24, 0, 0.1}}),
                         [](const auto& info) { return info.param.name; });

// ---- products of experts' rows: more steps than stages ----

struct SmallGroupedLinear {
  const char* name;
  int64_t O, I, gap;
};
void PrintTo(const SmallGroupedLinear& c, std::ostream* out) {
  *out << c.name;
}

class CudaSmallGroupedLinear : public ::testing::TestWithParam<SmallGroupedLinear> {};

TEST_P(CudaSmallGroupedLinear, MatchesTheCpu) {
  const auto& [name, O, I, gap] = GetParam();
  expect_same_on_gpu(
      [O = O, I = I, gap = gap](Lab& lab) {
        run_grouped_linear(lab, {0, 0, 3, 130}, O, I, gap);
      },
      {.f32 = 2e-6, .bf16 = 6e-3});
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaSmallGroupedLinear,
                         ::testing::Values(SmallGroupedLinear{"Packed", 104, 136, 8},
                                           SmallGroupedLinear{"Unpacked", 101, 133, 3}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace palimpsest
