// Gradients of the delta rule with respect to every raw input, by central differences in f64.
#include <gtest/gtest.h>

#include "tests/support/delta_rule_case.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using support::DeltaRuleCase;
using support::NamedArrays;

class DeltaRuleGradient : public ::testing::TestWithParam<std::tuple<Decay, DeltaRule, Gate>> {};

void expect_gradients_match(DeltaRuleCase c) {
  const NamedArrays results = support::run_delta_rule(c, DType::kF64);
  const NamedArrays inputs = c.in;
  for (const auto& input : inputs) {
    const std::string& name = input.first;
    if (name.rfind("grad_", 0) == 0) continue;
    const support::OwnedTensor x(DType::kF64, c.shape_of(name)), dx(DType::kF64, c.shape_of(name));
    support::set_values(x, input.second);
    support::set_values(dx, results.at("grad." + name));
    const auto loss = [&] {
      c.in[name] = support::values_of(x);
      return support::delta_rule_loss(c);
    };
    EXPECT_TRUE(support::gradient_matches(loss, x, dx, 1e-8, 40)) << name;
    c.in[name] = input.second;
  }
}

TEST_P(DeltaRuleGradient, BackwardMatchesFiniteDifferences) {
  const auto [decay, delta, gate] = GetParam();
  for (const DeltaForm form : {DeltaForm::kRecurrence, DeltaForm::kChunkwise}) {
    for (const bool l2norm : {true, false}) {
      SCOPED_TRACE(std::string(form == DeltaForm::kRecurrence ? "recurrence" : "chunkwise") +
                   (l2norm ? ", l2 norm" : ""));
      const DeltaRuleOptions options = {.decay = decay,
                                        .delta_rule = delta,
                                        .gate = gate,
                                        .gate_lower_bound = -3.0,
                                        .beta_scale = l2norm ? 2.0 : 1.0,
                                        .l2norm_qk = l2norm,
                                        .scale = 0.7,
                                        .form = form,
                                        .chunk_size = 16,
                                        .save_level = l2norm ? SaveLevel::kAll : SaveLevel::kNothing};
      // Three documents, one of a single token; the last spans two whole chunks and a partial one.
      DeltaRuleCase c = support::random_delta_rule_case(options, 1, 2, 3, 4, {0, 5, 6, 41}, 23);
      if (!l2norm)
        for (double& value : c.in["k"]) value *= 0.4;  // keys of size 1 or so keep the recurrence stable
      expect_gradients_match(c);
    }
  }
}

// The gate's gradient where its activation is saturated: at the bound, at 0, and in both at once.
TEST(DeltaRuleGradientAtTheBound, BackwardMatchesFiniteDifferences) {
  for (const DeltaForm form : {DeltaForm::kRecurrence, DeltaForm::kChunkwise}) {
    DeltaRuleCase c = support::random_delta_rule_case(
        {.gate = Gate::kBounded, .scale = 0.7, .form = form, .chunk_size = 16}, 1, 1, 4, 3, {0, 35}, 29);
    for (size_t i = 0; i < c.in["gate_logit"].size(); ++i) c.in["gate_logit"][i] += i % 2 == 0 ? 6.0 : -6.0;
    expect_gradients_match(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeltaRuleGradient,
                         ::testing::Combine(::testing::Values(Decay::kScalar, Decay::kVector),
                                            ::testing::Values(DeltaRule::kOff, DeltaRule::kOn),
                                            ::testing::Values(Gate::kSoftplus, Gate::kBounded)));
INSTANTIATE_TEST_SUITE_P(Fixed, DeltaRuleGradient,
                         ::testing::Values(std::tuple(Decay::kScalar, DeltaRule::kOff, Gate::kFixed)));
INSTANTIATE_TEST_SUITE_P(Ungated, DeltaRuleGradient,
                         ::testing::Combine(::testing::Values(Decay::kNone),
                                            ::testing::Values(DeltaRule::kOff, DeltaRule::kOn),
                                            ::testing::Values(Gate::kSoftplus)));

}  // namespace
}  // namespace palimpsest
