// Cases as small as reach every path of the kernels whose threads exchange most through shared memory: the plain delta
// rule, attention, earlier keys, grouped products. racecheck follows each of those accesses, which takes minutes for
// the sizes of the other tests (sanitize.sh); here a case is a test of its own and runs each kernel once a dtype.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/attention.h"
#include "kernels/expert_rows.h"
#include "tests/cuda/lab.h"
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
  int64_t H, HKV, K, V;
  int64_t gap;
};
void PrintTo(const SmallAttention& c, std::ostream* out) {
  *out << c.name;
}

class CudaSmallAttention : public ::testing::TestWithParam<SmallAttention> {};

TEST_P(CudaSmallAttention, MatchesTheCpu) {
  const SmallAttention& c = GetParam();
  expect_same_on_gpu([&](Lab& lab) {
    const Documents documents(kDocuments);
    const int64_t N = documents.num_tokens();
    const Tensor q = lab.input("q", {N, c.H, c.K}, 1, c.gap), k = lab.input("k", {N, c.HKV, c.K}, 1, c.gap);
    const Tensor v = lab.input("v", {N, c.HKV, c.V}, 1, c.gap), d_o = lab.input("d_o", {N, c.H, c.V});
    const Tensor o = lab.output("o", {N, c.H, c.V}, c.gap), lse = lab.statistics("lse", {N, c.H});
    attention_forward(lab.stream(), o, lse, q, k, v, 0.1, documents, documents);
    attention_backward(lab.stream(),
                       {.dq = lab.output("dq", {N, c.H, c.K}),
                        .dk = lab.output("dk", {N, c.HKV, c.K}, c.gap),
                        .dv = lab.output("dv", {N, c.HKV, c.V}),
                        .d_o = d_o,
                        .q = q,
                        .k = k,
                        .v = v,
                        .o = o,
                        .lse = lse,
                        .scale = 0.1},
                       documents);
  });
}

TEST_P(CudaSmallAttention, ToEarlierKeysMatchesTheCpu) {
  const SmallAttention& c = GetParam();
  expect_same_on_gpu([&](Lab& lab) {
    constexpr int64_t N = 66, kKeys = 67;
    const Tensor q = lab.input("q", {N, c.H, c.K}, 1, c.gap), d_o = lab.input("d_o", {N, c.H, c.V});
    const Tensor o = lab.in_place("o", {N, c.H, c.V}, 1, c.gap), lse = lab.accumulated("lse", {N, c.H});
    const Tensor k = lab.input("k", {kKeys, c.HKV, c.K}, 1, c.gap), v = lab.input("v", {kKeys, c.HKV, c.V}, 1, c.gap);
    attention_prefix_forward(lab.stream(), o, lse, q, k, v, 0.1);
    attention_prefix_backward(lab.stream(), {.dq = lab.in_place("dq", {N, c.H, c.K}),
                                             .dk = lab.in_place("dk", {kKeys, c.HKV, c.K}, 1, c.gap),
                                             .dv = lab.in_place("dv", {kKeys, c.HKV, c.V}),
                                             .d_o = d_o,
                                             .q = q,
                                             .k = k,
                                             .v = v,
                                             .o = o,
                                             .lse = lse,
                                             .scale = 0.1});
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaSmallAttention,
                         ::testing::Values(SmallAttention{"Packed", 2, 1, 40, 24, 8},
                                           SmallAttention{"Unpacked", 1, 1, 37, 19, 3},
                                           SmallAttention{"KeysBeyond128", 1, 1, 136, 40, 0},
                                           SmallAttention{"KeysBeyond192", 1, 1, 200, 24, 0}),
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
      [&, O = O, I = I, gap = gap](Lab& lab) {
        const std::vector<int64_t> offsets = {0, 0, 3, 130};
        const int64_t R = offsets.back(), E = static_cast<int64_t>(offsets.size()) - 1;
        const Tensor at = lab.integers("offsets", offsets);
        const Tensor x = lab.input("x", {R, I}, 1, gap), dy = lab.input("dy", {R, O}, 1, gap);
        const auto with_weight = [&](const std::string& kind, const Tensor& w) {
          grouped_linear_forward(lab.stream(), lab.output("y" + kind, {R, O}, gap), x, w, at);
          grouped_linear_backward_input(lab.stream(), lab.output("dx" + kind, {R, I}), dy, w, at);
        };
        with_weight(" own", lab.input("w", {E * O, I}, 0.2, gap));
        with_weight(" wide", lab.weight("wide w", {E * O, I}, 0.2));
        grouped_linear_backward_weight(lab.stream(), lab.accumulated("dw", {E * O, I}), dy, x, at);
      },
      {.f32 = 2e-6, .bf16 = 6e-3});
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaSmallGroupedLinear,
                         ::testing::Values(SmallGroupedLinear{"Packed", 104, 136, 8},
                                           SmallGroupedLinear{"Unpacked", 101, 133, 3}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace palimpsest
