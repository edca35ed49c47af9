// Routed experts inside a model: gradients, what the router's state does in a step, memory, FLOPs.
#include "model/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/moe_config.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace palimpsest {
namespace {

using support::is_close;
using support::OwnedBatch;
using support::OwnedTensor;
using support::random_documents;
using support::sigmoid_moe;
using support::softmax_moe;
using support::TinyRun;
using support::values_of;

constexpr int64_t kVocab = 37, kHidden = 20;

Config moe_config(const MoeConfig& moe, Precision precision = Precision::kF64) {
  Config config = support::tiny_config(precision, {"kda", "mla"});
  config.model.moe = moe;
  return config;
}

// grad_scale * (loss + balance terms).
double objective(TinyRun& run, const OwnedBatch& batch, double grad_scale) {
  OwnedTensor loss(DType::kF64, {1}), other(DType::kF64, {1});
  support::fill(loss, 0.0);
  support::fill(other, 0.0);
  Context context = run.bench().context();
  run.bench().model().forward_backward(context, batch.input(), {.grad_scale = grad_scale}, loss, other);
  return grad_scale * (values_of(loss)[0] + values_of(other)[0]);
}

void expect_gradients_match(const MoeConfig& moe) {
  TinyRun run(moe_config(moe));
  run.registry().initialize(3, 0.3);
  // Scores far apart: no choice may turn within the differences.
  for (Parameter& parameter : run.registry().parameters())
    if (parameter.spec.name.ends_with("mlp.gate.weight")) support::fill_random(parameter.value, 5, 4.0);
  const OwnedBatch batch(random_documents({9, 1, 8}, kVocab, 1));
  constexpr double kScale = 0.25;
  run.registry().zero_gradients(run.bench().stream());
  objective(run, batch, kScale);
  std::vector<OwnedTensor> gradients;
  for (const Parameter& parameter : run.registry().parameters()) {
    gradients.emplace_back(DType::kF64, parameter.grad.shape());
    support::set_values(gradients.back(), values_of(parameter.grad));
  }
  size_t i = 0;
  for (const Parameter& parameter : run.registry().parameters()) {
    const OwnedTensor& gradient = gradients[i++];
    if (parameter.spec.name.find(".mlp.") == std::string::npos) continue;
    if (parameter.spec.name.ends_with("e_score_correction_bias")) {
      for (const double value : values_of(gradient)) EXPECT_EQ(value, 0.0);
      continue;
    }
    EXPECT_TRUE(support::gradient_matches([&] { return objective(run, batch, kScale); }, parameter.value, gradient,
                                          2e-6, 4, 1e-4))
        << parameter.spec.name;
  }
}

TEST(MoeGradients, OfTheSigmoidRouterMatchCentralDifferences) {
  expect_gradients_match(sigmoid_moe());
}

TEST(MoeGradients, OfTheSoftmaxRouterWithItsBalanceTermMatchCentralDifferences) {
  expect_gradients_match(softmax_moe());
}

// y = sum_j w_j SwiGLU_e(x) + shared, token by token, from the weights themselves.
TEST(Moe, EqualsAPlainLoopOverTokens) {
  for (const bool softmax : {false, true}) {
    MoeConfig moe = softmax ? softmax_moe() : sigmoid_moe();
    moe.dense_layers.clear();
    moe.num_groups = moe.top_groups = 1;
    TinyRun run(moe_config(moe));
    run.registry().initialize(3, 0.5);
    constexpr int64_t kTokens = 13;
    const OwnedTensor x = support::random_tensor(DType::kF64, {kTokens, kHidden}, 7),
                      y(DType::kF64, x.tensor().shape());
    const std::string prefix = "model.layers.1.mlp.";
    if (Parameter* bias = run.registry().find(prefix + "gate.e_score_correction_bias"))
      support::fill_random(bias->value, 8, 0.2);
    const auto weight = [&](const std::string& name) { return values_of(run.parameter(prefix + name).value); };
    const auto times = [](const std::vector<double>& w, const std::vector<double>& v) {
      std::vector<double> out(w.size() / v.size(), 0.0);
      for (size_t o = 0; o < out.size(); ++o)
        for (size_t i = 0; i < v.size(); ++i) out[o] += w[o * v.size() + i] * v[i];
      return out;
    };
    const auto swiglu = [&](const std::string& name, const std::vector<double>& v) {
      std::vector<double> h = times(weight(name + "gate_proj.weight"), v);
      const std::vector<double> up = times(weight(name + "up_proj.weight"), v);
      for (size_t i = 0; i < h.size(); ++i) h[i] *= up[i] / (1 + std::exp(-h[i]));
      return times(weight(name + "down_proj.weight"), h);
    };
    std::vector<double> expected;
    for (int64_t n = 0; n < kTokens; ++n) {
      const std::vector<double> all = values_of(x);
      const std::vector<double> v(all.begin() + n * kHidden, all.begin() + (n + 1) * kHidden);
      std::vector<double> s = times(weight("gate.weight"), v);
      double sum = 0;
      for (double& value : s) sum += value = softmax ? std::exp(value) : 1 / (1 + std::exp(-value));
      if (softmax)
        for (double& value : s) value /= sum;
      const std::vector<double> bias =
          softmax ? std::vector<double>(s.size(), 0.0) : weight("gate.e_score_correction_bias");
      std::vector<size_t> order(s.size());
      for (size_t e = 0; e < s.size(); ++e) order[e] = e;
      std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return s[a] + bias[a] > s[b] + bias[b]; });
      double chosen = 0;
      for (int64_t j = 0; j < moe.experts_per_token; ++j) chosen += s[order[j]];
      std::vector<double> row = swiglu("shared_experts.", v);
      if (softmax) {
        const double open = 1 / (1 + std::exp(-times(weight("shared_expert_gate.weight"), v)[0]));
        for (double& value : row) value *= open;
      }
      for (int64_t j = 0; j < moe.experts_per_token; ++j) {
        const std::vector<double> part = swiglu("experts." + std::to_string(order[j]) + ".", v);
        for (size_t i = 0; i < row.size(); ++i) row[i] += moe.routed_scaling_factor * s[order[j]] / chosen * part[i];
      }
      expected.insert(expected.end(), row.begin(), row.end());
    }
    // The same weights in a layer of their own.
    ParameterRegistry registry;
    const Moe layer(run.bench().model().config(), 0, prefix, registry);
    Arena parameters("parameters", Device::kCpu, 1 << 20), none("none", Device::kCpu, 0);
    registry.bind(DType::kF64, ParameterUse::kInference, parameters, none, none);
    for (Parameter& parameter : registry.parameters())
      support::set_values(parameter.value, values_of(run.parameter(parameter.spec.name).value));
    Context context = run.bench().context();
    Arena::Scope scope(context.activations);
    layer.forward(context, {.documents = Documents::single(kTokens), .positions = {}}, x.tensor(), y.tensor(),
                  Write::kOverwrite);
    EXPECT_TRUE(is_close(y, expected, 1e-13));
  }
}

TEST(MoeStep, MovesTheSelectionBiasBySignAlone) {
  Config config = moe_config(sigmoid_moe(), Precision::kF32);
  TinyRun run(config);
  const OwnedBatch batch(random_documents({40, 23}, kVocab, 1));
  const std::string name = "model.layers.1.mlp.gate.e_score_correction_bias";
  const StepResult result = run.step().run({&batch.input(), 1}, batch.num_targets(), 1e-3);
  ASSERT_EQ(result.experts.size(), 1u);
  EXPECT_EQ(result.experts[0].layer, 1);
  EXPECT_EQ(result.experts[0].mean, 63.0 * 2 / 6);
  EXPECT_LE(result.experts[0].fewest, 21.0);
  EXPECT_GT(result.experts[0].most, 21.0);
  int64_t up = 0, down = 0;
  for (const double value : values_of(run.parameter(name).value)) {
    EXPECT_TRUE(value == 0.0 || std::abs(std::abs(value) - 0.01) < 1e-9) << value;
    up += value > 0;
    down += value < 0;
  }
  EXPECT_GT(up, 0);
  EXPECT_GT(down, 0);

  config.model.moe.router_bias_update_speed.reset();
  TinyRun still(config);
  still.step().run({&batch.input(), 1}, batch.num_targets(), 1e-3);
  for (const double value : values_of(still.parameter(name).value)) EXPECT_EQ(value, 0.0);
}

TEST(MoeStep, BalancesTheLoadOverManySteps) {
  Config config = moe_config(sigmoid_moe(), Precision::kF32);
  config.model.moe.num_groups = config.model.moe.top_groups = 1;
  TinyRun run(config);
  run.registry().initialize(3, 0.3);
  const OwnedBatch batch(random_documents({120, 80}, kVocab, 1));
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    const StepResult result = run.step().run({&batch.input(), 1}, batch.num_targets(), 0.0);
    last = result.experts[0].most / result.experts[0].mean;
    if (step == 0) first = last;
  }
  EXPECT_GT(first, 1.4);
  EXPECT_LT(last, 1.2);
}

TEST(MoeStep, ASkippedStepLeavesTheSelectionBias) {
  TinyRun run(moe_config(sigmoid_moe(), Precision::kF32));
  const OwnedBatch batch(random_documents({20}, kVocab, 1));
  run.step().begin(batch.num_targets());
  run.step().accumulate(batch.input());
  support::set_value(run.parameter("lm_head.weight").grad, 0, NAN);
  EXPECT_FALSE(run.step().finish(1e-3).applied);
  for (const double value : values_of(run.parameter("model.layers.1.mlp.gate.e_score_correction_bias").value))
    EXPECT_EQ(value, 0.0);
}

TEST(Moe, ActivationCheckpointingChangesNoBitAndCountsTokensOnce) {
  const OwnedBatch batch(random_documents({45, 22}, kVocab, 1));
  for (const MoeConfig& moe : {sigmoid_moe(), softmax_moe()}) {
    std::vector<std::vector<double>> gradients;
    for (const auto checkpointing : {ActivationCheckpointing::kNone, ActivationCheckpointing::kSelective}) {
      Config config = moe_config(moe, Precision::kF32);
      config.train.activation_checkpointing = checkpointing;
      TinyRun run(config);
      run.step().begin(batch.num_targets());
      run.step().accumulate(batch.input());
      gradients.push_back(support::gradients_of(run.registry()));
      EXPECT_EQ(run.step().finish(0.0).experts[0].mean,
                67.0 * static_cast<double>(moe.experts_per_token) / static_cast<double>(moe.num_experts));
    }
    EXPECT_EQ(gradients[0], gradients[1]);
  }
}

TEST(Moe, MemoryHoldsWhenEveryTokenGoesToTheSameExperts) {
  Config config = moe_config(sigmoid_moe(), Precision::kF32);
  TinyRun run(config, 64);  // arenas as large as the rehearsal says, to the byte
  Parameter& bias = run.parameter("model.layers.1.mlp.gate.e_score_correction_bias");
  support::set_values(bias.value, {9, 9, 0, 0, 0, 0});
  const OwnedBatch batch(random_documents({64}, kVocab, 1));
  const StepResult result = run.step().run({&batch.input(), 1}, batch.num_targets(), 1e-3);
  EXPECT_EQ(result.experts[0].most, 64.0);
  EXPECT_EQ(result.experts[0].fewest, 0.0);
  EXPECT_TRUE(result.applied);
}

TEST(Moe, DecodingGivesTheLogitsOfTheParallelForm) {
  TinyRun run(moe_config(softmax_moe()));
  run.registry().initialize(3, 0.3);
  constexpr int64_t kTokens = 20;
  const OwnedBatch batch(random_documents({kTokens}, kVocab, 1));
  OwnedTensor expected(DType::kF64, {kTokens, kVocab}), got(DType::kF64, {kTokens, kVocab});
  Context context = run.bench().context();
  const LanguageModel& model = run.bench().model();
  model.forward_logits(context, batch.input(), expected);
  Arena::Scope scope(context.activations);
  auto states = model.make_decode_states(context, kTokens);
  for (int64_t t = 0; t < kTokens; ++t)
    model.extend(context, states, batch.input().tokens.rows(t, 1), got.tensor().rows(t, 1));
  EXPECT_TRUE(is_close(got, expected, 1e-11));
}

TEST(MoeFlops, CountTheExpertsThatATokenIsSentTo) {
  const auto moe_flops = [](const MoeConfig& moe) {
    ParameterRegistry registry;
    const LanguageModel model(moe_config(moe).model, registry);
    for (const auto& kind : model.flops_by_kind(512))
      if (kind.kind == "moe") return kind;
    return LanguageModel::FlopsOfKind{};
  };
  const double D = kHidden;
  // Layer 1: router, 2 experts of 12, a shared one of 8.
  EXPECT_EQ(moe_flops(sigmoid_moe()).count, 1);
  EXPECT_DOUBLE_EQ(moe_flops(sigmoid_moe()).per_token, 6 * (6 * D + 2 * 3 * D * 12 + 3 * D * 8));
  // Both layers: router, 3 experts of 8, a shared one of 12 and its gate.
  EXPECT_EQ(moe_flops(softmax_moe()).count, 2);
  EXPECT_DOUBLE_EQ(moe_flops(softmax_moe()).per_token, 2 * 6 * (5 * D + 3 * 3 * D * 8 + 3 * D * 12 + D));
}

TEST(MoeConfigs, ThatMakeNoSenseAreNamed) {
  const auto error_of = [](const std::function<void(MoeConfig&)>& change, MoeConfig moe = sigmoid_moe()) {
    change(moe);
    try {
      validate(moe_config(moe).model);
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect_names = [&](const std::string& text, const std::string& field) {
    EXPECT_NE(text.find("model.moe." + field + " is"), std::string::npos) << text;
  };
  expect_names(error_of([](MoeConfig& moe) { moe.num_experts = 7; }), "num_experts");
  expect_names(error_of([](MoeConfig& moe) { moe.experts_per_token = 5; }), "experts_per_token");
  expect_names(error_of([](MoeConfig& moe) { moe.top_groups = 4; }), "top_groups");
  expect_names(error_of([](MoeConfig& moe) { moe.num_groups = 6; }), "num_groups");
  expect_names(error_of([](MoeConfig& moe) { moe.router_aux_loss_coef = 0.1; }), "router_aux_loss_coef");
  expect_names(error_of([](MoeConfig& moe) { moe.router_bias_update_speed = 0.1; }, softmax_moe()),
               "router_bias_update_speed");
  expect_names(error_of([](MoeConfig& moe) { moe.shared_intermediate_size = 0; }, softmax_moe()), "shared_gate");
  EXPECT_NE(error_of([](MoeConfig& moe) { moe.dense_layers = {2}; }).find("model.moe.dense_layers has 2"),
            std::string::npos);
}

}  // namespace
}  // namespace palimpsest
