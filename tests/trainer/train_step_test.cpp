#include "trainer/train_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "tests/support/program.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace palimpsest {
namespace {

using support::gradients_of;
using support::is_close;
using support::OwnedBatch;
using support::random_documents;
using support::state_of;
using support::tiny_config;
using support::TinyRun;

using Documents = std::vector<std::vector<int32_t>>;

constexpr int64_t kVocab = 37;
constexpr double kLr = 1e-3;

// Gradient and result of one step whose documents are cut into these micro-batches.
struct Outcome {
  StepResult result;
  std::vector<double> gradients;
};
Outcome step_with(const std::vector<Documents>& cut) {
  TinyRun run(tiny_config());
  std::vector<OwnedBatch> batches;
  int64_t num_targets = 0;
  for (const Documents& documents : cut) {
    batches.emplace_back(documents);
    num_targets += batches.back().num_targets();
  }
  run.step().begin(num_targets);
  for (const OwnedBatch& batch : batches) run.step().accumulate(batch.input());
  Outcome outcome;
  outcome.gradients = gradients_of(run.registry());
  outcome.result = run.step().finish(kLr);
  return outcome;
}

TEST(TrainStep, CutIntoMicroBatchesMakesNoDifference) {
  const Documents rows = random_documents({19, 19, 19, 19}, kVocab, 1);
  const Outcome whole = step_with({rows});
  const auto part = [&](size_t begin, size_t end) { return Documents(rows.begin() + begin, rows.begin() + end); };
  const std::vector<std::vector<Documents>> cuts = {
      {part(0, 1), part(1, 4)}, {part(0, 2), part(2, 4)}, {part(0, 3), part(3, 4)}};
  for (const std::vector<Documents>& cut : cuts) {
    const Outcome outcome = step_with(cut);
    EXPECT_NEAR(outcome.result.loss, whole.result.loss, 1e-12 * whole.result.loss);
    EXPECT_NEAR(outcome.result.grad_norm, whole.result.grad_norm, 1e-11 * whole.result.grad_norm);
    EXPECT_TRUE(is_close(outcome.gradients, whole.gradients, 1e-11));
  }
}

TEST(TrainStep, LossIsTheMeanOverTheTargetsOfTheWholeStep) {
  // Micro-batch A has 3 targets, B has 1: a mean of means would weigh B's loss three times too much.
  const Documents a = {{1, 2, 3, 4}}, b = {{9, 30}};
  const double loss_a = step_with({a}).result.loss, loss_b = step_with({b}).result.loss;
  const Outcome both = step_with({a, b});
  ASSERT_GT(std::abs(loss_a - loss_b), 1e-4);
  EXPECT_NEAR(both.result.loss, (3 * loss_a + loss_b) / 4, 1e-12);
  EXPECT_TRUE(is_close(both.gradients, step_with({{a[0], b[0]}}).gradients, 1e-11));
}

TEST(TrainStep, MicroBatchWithoutTargetsAddsNothing) {
  const Documents a = random_documents({23}, kVocab, 2);
  const Outcome alone = step_with({a});
  const Outcome with_empty = step_with({a, {{5}, {6}, {7}}});  // documents of one token have no target
  EXPECT_EQ(with_empty.result.loss, alone.result.loss);
  EXPECT_EQ(with_empty.gradients, alone.gradients);
}

TEST(TrainStep, StepWithoutTargetsIsFinite) {
  const Outcome outcome = step_with({{{5}, {6}}});
  EXPECT_EQ(outcome.result.loss, 0.0);
  EXPECT_EQ(outcome.result.grad_norm, 0.0);
  EXPECT_TRUE(outcome.result.applied);
}

TEST(TrainStep, EqualMicroBatchesAddUp) {
  const Documents a = random_documents({11}, kVocab, 3);
  const Outcome once = step_with({a});
  const Outcome many = step_with(std::vector<Documents>(64, a));
  EXPECT_NEAR(many.result.loss, once.result.loss, 1e-12);
  EXPECT_TRUE(is_close(many.gradients, once.gradients, 1e-12));
}

TEST(TrainStep, LossFallsOnTextItSeesAgain) {
  Config config = tiny_config(Precision::kF32);
  config.optimizer.lr = 1e-2;
  TinyRun run(config);
  const OwnedBatch batch(random_documents({40, 25}, kVocab, 4));
  double first = 0.0, last = 0.0;
  for (int i = 0; i < 60; ++i) {
    const StepResult result = run.step().run({&batch.input(), 1}, batch.num_targets(), config.optimizer.lr);
    if (i == 0) first = result.loss;
    last = result.loss;
  }
  EXPECT_NEAR(first, std::log(37.0), 0.2);
  EXPECT_LT(last, 0.5 * first);
}

// Channels that forget everything beside channels that keep everything, over many layers and steps.
TEST(TrainStep, DeepModelsWithGatesAtBothEndsStayFinite) {
  Config config = tiny_config(Precision::kF32, {"kda", "gdn"});
  config.model.num_layers = 24;
  config.optimizer.lr = 1e-2;
  for (const int64_t seed : {1, 2, 3}) {
    config.run.seed = seed;
    TinyRun run(config, 64);
    int64_t extreme = 0;
    for (const Parameter& parameter : run.registry().parameters()) {
      if (!parameter.spec.name.ends_with("dt_bias")) continue;
      float* values = parameter.value.data<float>();  // log decay of about -exp(A_log) softplus(value)
      for (int64_t i = 0; i < parameter.value.numel(); ++i) values[i] = ++extreme % 2 == 0 ? 1000.0f : -1000.0f;
    }
    ASSERT_GT(extreme, 0);
    const int64_t steps = support::kSanitized ? 5 : 300;
    double first = 0.0, last = 0.0;
    for (int64_t i = 0; i < steps; ++i) {
      const OwnedBatch batch(random_documents({25, 1, 14}, kVocab, static_cast<uint64_t>(i % 4)));
      const StepResult result = run.step().run({&batch.input(), 1}, batch.num_targets(), config.optimizer.lr);
      ASSERT_TRUE(result.applied) << "seed " << seed << ", step " << i + 1;
      (i == 0 ? first : last) = result.loss;
    }
    EXPECT_LT(last, first);
  }
}

TEST(TrainStep, NormIsConstantWithoutALearningRate) {
  // Gradients are cleared each step, so nothing piles up.
  TinyRun run(tiny_config());
  const OwnedBatch batch(random_documents({31}, kVocab, 5));
  const StepResult first = run.step().run({&batch.input(), 1}, batch.num_targets(), 0.0);
  for (int i = 0; i < 4; ++i) {
    const StepResult next = run.step().run({&batch.input(), 1}, batch.num_targets(), 0.0);
    EXPECT_EQ(next.loss, first.loss);
    EXPECT_EQ(next.grad_norm, first.grad_norm);
  }
}

TEST(TrainStep, NormIsOfAllGradientsTogether) {
  TinyRun run(tiny_config());
  const OwnedBatch batch(random_documents({31}, kVocab, 6));
  run.step().begin(batch.num_targets());
  run.step().accumulate(batch.input());
  const std::vector<double> gradients = gradients_of(run.registry());
  const double norm = std::sqrt(std::inner_product(gradients.begin(), gradients.end(), gradients.begin(), 0.0));
  EXPECT_NEAR(run.step().finish(kLr).grad_norm, norm, 1e-12 * norm);
}

TEST(TrainStep, ZLossIsReportedBesideTheLoss) {
  Config config = tiny_config();
  const OwnedBatch batch(random_documents({31}, kVocab, 7));
  TinyRun plain(config);
  const StepResult without = plain.step().run({&batch.input(), 1}, batch.num_targets(), kLr);
  config.train.z_loss = 1e-2;
  TinyRun penalised(config);
  const StepResult with = penalised.step().run({&batch.input(), 1}, batch.num_targets(), kLr);
  EXPECT_EQ(with.loss, without.loss);
  EXPECT_EQ(without.z_loss, 0.0);
  // Logits start near zero, so the log-normaliser is near log V.
  EXPECT_NEAR(with.z_loss, 1e-2 * std::pow(std::log(37.0), 2), 2e-2);
  EXPECT_NE(with.grad_norm, without.grad_norm);
}

class NonFinite : public testing::Test {
 protected:
  NonFinite() : run_(tiny_config(Precision::kF32)), batch_(random_documents({31, 9}, kVocab, 8)) {
    run_.step().run({&batch_.input(), 1}, batch_.num_targets(), kLr);  // so that moments are not zero
  }

  TinyRun run_;
  OwnedBatch batch_;
};

TEST_F(NonFinite, GradientSkipsTheStepAndLeavesEverything) {
  const std::vector<double> before = state_of(run_);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    run_.step().begin(batch_.num_targets());
    run_.step().accumulate(batch_.input());
    run_.parameter("model.layers.1.mlp.up_proj.weight").grad.data<float>()[3] = bad;
    const StepResult result = run_.step().finish(kLr);
    EXPECT_FALSE(result.applied);
    EXPECT_FALSE(std::isfinite(result.grad_norm));
    EXPECT_EQ(first_non_finite_gradient(run_.registry()), "gradient of model.layers.1.mlp.up_proj.weight");
    EXPECT_EQ(state_of(run_), before);
  }
  EXPECT_EQ(run_.step().applied_steps(), 1);
  // The next step is as if nothing had happened.
  EXPECT_TRUE(run_.step().run({&batch_.input(), 1}, batch_.num_targets(), kLr).applied);
  EXPECT_EQ(run_.step().applied_steps(), 2);
  EXPECT_NE(state_of(run_), before);
}

TEST_F(NonFinite, LossSkipsTheStep) {
  run_.parameter("model.norm.weight").value.data<float>()[0] = std::numeric_limits<float>::infinity();
  const StepResult result = run_.step().run({&batch_.input(), 1}, batch_.num_targets(), kLr);
  EXPECT_FALSE(result.applied);
  EXPECT_FALSE(std::isfinite(result.loss));
  EXPECT_FALSE(std::signbit(result.loss));  // "nan", not "-nan"
  EXPECT_EQ(run_.step().applied_steps(), 1);
  EXPECT_EQ(first_non_finite_weight(run_.registry()), "weight model.norm.weight");
}

TEST(DecayGroups, ZeroGradientsShrinkMatricesAndNothingElse) {
  Config config = tiny_config(Precision::kF32);
  config.optimizer.weight_decay = 0.1;
  TinyRun run(config);
  std::vector<std::vector<double>> before;
  for (const Parameter& parameter : run.registry().parameters()) before.push_back(support::values_of(parameter.value));
  constexpr double kBigLr = 0.1;
  for (int i = 0; i < 10; ++i) run.step().run({}, 1, kBigLr);
  size_t i = 0;
  for (const Parameter& parameter : run.registry().parameters()) {
    std::vector<double> expected = before[i++];
    const std::string& name = parameter.spec.name;
    const bool exempt =
        name.ends_with("norm.weight") || name.ends_with("A_log") || name.ends_with("dt_bias") || name.ends_with("bias");
    if (exempt) {
      EXPECT_EQ(support::values_of(parameter.value), expected) << name;
    } else {
      for (double& value : expected) value *= std::pow(1 - kBigLr * 0.1, 10);
      EXPECT_TRUE(is_close(parameter.value, expected, 1e-6)) << name;
    }
  }
}

TEST(DecayGroups, TableNamesEveryKindOfParameterOnce) {
  TinyRun run(tiny_config());
  const std::string table = decay_group_table(run.registry(), 0.1);
  const size_t exempt = table.find("weight decay 0:");
  ASSERT_NE(exempt, std::string::npos) << table;
  EXPECT_LT(table.find("weight decay 0.1:"), exempt);
  EXPECT_LT(table.find("model.layers.*.mlp.down_proj.weight"), exempt);
  EXPECT_LT(table.find("model.layers.*.self_attn.q_conv1d.weight"), exempt);
  for (const char* name : {"model.layers.*.input_layernorm.weight", "model.layers.*.self_attn.A_log",
                           "model.layers.*.linear_attn.dt_bias", "model.norm.weight"}) {
    ASSERT_NE(table.find(name), std::string::npos) << name;
    EXPECT_GT(table.find(name), exempt) << name;
    EXPECT_EQ(table.find(std::string(name) + "\n"), table.rfind(std::string(name) + "\n")) << name;
  }
}

}  // namespace
}  // namespace palimpsest
