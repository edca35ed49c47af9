#include "trainer/memory_plan.h"

#include <gtest/gtest.h>

#include "tests/support/files.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"
#include "tests/support/training.h"
#include "trainer/evaluation.h"

namespace palimpsest {
namespace {

using support::OwnedBatch;
using support::random_documents;
using support::tiny_config;
using support::TinyRun;

TEST(MemoryPlan, RehearsalIsExactToTheByte) {
  for (const auto& [checkpointing, residual] : {std::pair{ActivationCheckpointing::kNone, Precision::kAuto},
                                                std::pair{ActivationCheckpointing::kSelective, Precision::kAuto},
                                                std::pair{ActivationCheckpointing::kFull, Precision::kAuto},
                                                std::pair{ActivationCheckpointing::kNone, Precision::kF64},
                                                std::pair{ActivationCheckpointing::kFull, Precision::kF64}}) {
    Config config = tiny_config(Precision::kF32);
    config.residual = residual;
    config.train.activation_checkpointing = checkpointing;
    Workbench bench(config);
    const TrainStepOptions options = train_step_options(config);
    const RegionBytes plan = bench.rehearse_training({.train_rows = 2, .row_length = 67}, options);
    bench.allocate(ParameterUse::kTraining, plan);
    bench.registry().initialize(1, 0.02);
    bench.registry().zero_optimizer(bench.stream());
    TrainStep step(bench.model(), bench.registry(), bench.context(), bench.regions().optimizer, options);
    const OwnedBatch batch(random_documents({67, 67}, 37, 1));
    step.run({&batch.input(), 1}, batch.num_targets(), 1e-3);
    const RegionBytes used = bench.regions().peaks();
    EXPECT_EQ(used.parameters, plan.parameters);
    EXPECT_EQ(used.gradients, plan.gradients);
    EXPECT_EQ(used.optimizer, plan.optimizer);
    EXPECT_EQ(used.activations, plan.activations);
    EXPECT_EQ(used.scratch, plan.scratch);
  }
}

TEST(MemoryPlan, HoldsForAnyDocuments) {
  // However a micro-batch splits into documents, and with fewer rows, it fits.
  TinyRun run(tiny_config(Precision::kF32), 134);
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{134},
                                              std::vector<int64_t>(134, 1),
                                              {1, 132, 1},
                                              {64, 70},
                                              {65, 69},
                                              {63, 64, 7},
                                              std::vector<int64_t>(67, 2),
                                              {1}}) {
    const OwnedBatch batch(random_documents(lengths, 37, 2));
    EXPECT_TRUE(run.step().run({&batch.input(), 1}, std::max<int64_t>(batch.num_targets(), 1), 1e-3).applied);
  }
}

TEST(MemoryPlan, CheckpointingActivationsTakesLessOfThem) {
  const auto activations_with = [](ActivationCheckpointing checkpointing) {
    Config config = tiny_config(Precision::kF32);
    config.train.activation_checkpointing = checkpointing;
    return Workbench(config)
        .rehearse_training({.train_rows = 2, .row_length = 67}, train_step_options(config))
        .activations;
  };
  EXPECT_LT(activations_with(ActivationCheckpointing::kSelective), activations_with(ActivationCheckpointing::kNone));
  EXPECT_LT(activations_with(ActivationCheckpointing::kFull), activations_with(ActivationCheckpointing::kSelective));
}

// Runs whose memory is large beside the program itself: the prediction holds within 10%.
class PeakOfTheProcess : public testing::Test {
 protected:
  // Some 150 MiB: half of it weights, gradients, moments and their snapshot, half activations.
  static std::vector<std::string> larger_model() {
    return {"model.vocab_size=3000",
            "model.hidden_size=256",
            "model.num_layers=2",
            "model.layers=[kda, mla]",
            "model.mlp.intermediate_size=700",
            "model.kda={num_heads: 4, head_dim: 64}",
            "model.mla={num_heads: 4, kv_lora_rank: 64, qk_nope_head_dim: 64, qk_rope_head_dim: 32, v_head_dim: 64}",
            "data.sequence_length=256",
            "train.sequences_per_step=8",
            "train.micro_batch=8"};
  }
  static void expect_within_a_tenth(double measured, double predicted) {
    EXPECT_GT(predicted, 100.0);
    EXPECT_GT(measured, 0.9 * predicted);
    EXPECT_LT(measured, 1.1 * predicted);
  }
};

TEST_F(PeakOfTheProcess, OfATrainingRunIsAsPredicted) {
  if (support::kSanitized) GTEST_SKIP() << "a sanitizer has memory of its own";
  const support::TempDirectory root;
  Config config = support::tiny_run_config(root, "run");
  config.checkpoint.background = true;
  config.train.steps = 2;
  config.train.eval_every = 1;
  support::write_learnable_shards(root / "more", 20000);
  support::write_file(root / "config.yaml", to_yaml(config));
  std::vector<std::string> arguments = {"train", root / "config.yaml", "data.train=" + (root / "more")};
  for (const std::string& field : larger_model()) arguments.push_back(field);
  const support::ProgramResult result = support::run_palimpsest(arguments);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  double predicted = 0.0, measured = 0.0;
  const size_t line = result.out.find("memory: ");
  ASSERT_NE(line, std::string::npos) << result.out;
  ASSERT_EQ(std::sscanf(result.out.c_str() + line, "memory: %lf MiB predicted, the process's peak grew by %lf MiB",
                        &predicted, &measured),
            2);
  expect_within_a_tenth(measured, predicted);
}

TEST_F(PeakOfTheProcess, OfATrainingBenchIsAsPredicted) {
  if (support::kSanitized) GTEST_SKIP() << "a sanitizer has memory of its own";
  const support::TempDirectory root;
  std::vector<std::string> arguments = {"bench",
                                        "train",
                                        std::string(PALIMPSEST_SOURCE_DIR) + "/configs/kda.yaml",
                                        "--steps",
                                        "1",
                                        "--json",
                                        root / "bench.json"};
  for (const std::string& field : larger_model()) arguments.push_back(field);
  const support::ProgramResult result = support::run_palimpsest(arguments);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto report = nlohmann::json::parse(support::read_file(root / "bench.json"));
  constexpr double kMiB = 1 << 20;
  expect_within_a_tenth(report.at("measured_bytes").get<double>() / kMiB,
                        report.at("predicted_bytes").get<double>() / kMiB);
  EXPECT_GT(report.at("mfu").get<double>(), 0.0);
  EXPECT_NEAR(report.at("mfu").get<double>(),
              report.at("flops_per_second").get<double>() / report.at("reference_flops_per_second").get<double>(),
              1e-12);
}

}  // namespace
}  // namespace palimpsest
