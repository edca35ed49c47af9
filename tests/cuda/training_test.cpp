// Training on a GPU: repeatable to the bit, within the memory that was planned, and none taken during a step.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "tests/cuda/lab.h"
#include "tests/support/files.h"
#include "tests/support/shard_files.h"
#include "tests/support/tiny_run.h"
#include "tests/support/training.h"
#include "trainer/run_setup.h"
#include "trainer/trainer.h"

namespace palimpsest {
namespace {

using namespace support;

// Heads of the sizes that Hopper's kernels serve, one layer of each of the three kinds.
Config gpu_config(Precision precision, Precision residual) {
  Config config = tiny_config(precision, {"kda", "gdn", "mla"});
  config.device = DeviceChoice::kCuda;
  config.residual = residual;
  config.model.vocab_size = 263;
  config.model.hidden_size = 192;
  config.model.kda = {.num_heads = 3, .head_dim = 64, .conv_size = 4, .gate_lower_bound = -5.0};
  config.model.gdn = {.num_heads = 2, .num_value_heads = 4, .head_dim = 64, .value_head_dim = 128, .conv_size = 3};
  config.model.mla = {.num_heads = 2,
                      .kv_lora_rank = 64,
                      .qk_nope_head_dim = 128,
                      .qk_rope_head_dim = 64,
                      .v_head_dim = 128,
                      .rope = RopeKind::kInterleaved};
  config.model.mlp.intermediate_size = 512;
  return config;
}

// Losses of 50 steps, and the bytes of every weight and moment at their end.
struct Outcome {
  std::vector<double> losses;
  std::vector<double> state;
};

Outcome train(const Config& config) {
  TinyRun run(config, 1024);
  Outcome outcome;
  for (int64_t step = 0; step < 50; ++step) {
    const std::vector<int64_t> lengths = {1 + step, 3, 37, 130, 200, 64, 589 - step};  // 1024 tokens
    const OwnedBatch batch(random_documents(lengths, config.model.vocab_size, static_cast<uint64_t>(step % 7)));
    const StepResult result = run.step().run({&batch.input(), 1}, batch.num_targets(), 2e-3);
    EXPECT_TRUE(result.applied);
    outcome.losses.push_back(result.loss);
  }
  outcome.state = state_of(run);
  return outcome;
}

// Bits, so that equal NaNs are equal and zeros of two signs are not.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

TEST(CudaTraining, SameSeedGivesTheSameBits) {
  SKIP_WITHOUT_GPU();
  for (const auto& [precision, residual] :
       {std::pair{Precision::kBF16, Precision::kBF16}, std::pair{Precision::kBF16, Precision::kF32},
        std::pair{Precision::kF32, Precision::kAuto}}) {
    const Config config = gpu_config(precision, residual);
    const Outcome first = train(config), second = train(config);
    EXPECT_TRUE(same_bits(first.losses, second.losses));
    EXPECT_TRUE(same_bits(first.state, second.state));
    EXPECT_LT(first.losses.back(), first.losses.front());  // it learns
    Config other = config;
    other.run.seed = 2;
    EXPECT_FALSE(same_bits(train(other).losses, first.losses));
  }
}

TEST(CudaTraining, WideStreamFollowsF32MoreClosely) {
  SKIP_WITHOUT_GPU();
  // Losses of the first steps, while the three runs are still the same run to rounding.
  const auto first_losses = [](Precision precision, Precision residual) {
    std::vector<double> losses = train(gpu_config(precision, residual)).losses;
    losses.resize(10);
    return losses;
  };
  const std::vector<double> exact = first_losses(Precision::kF32, Precision::kAuto),
                            narrow = first_losses(Precision::kBF16, Precision::kBF16),
                            wide = first_losses(Precision::kBF16, Precision::kF32);
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_NEAR(narrow[i], exact[i], 1e-2 * exact[i]);
    EXPECT_NEAR(wide[i], exact[i], 1e-2 * exact[i]);
    EXPECT_NE(wide[i], narrow[i]);
  }
}

// Nothing is read that was not written before.
TEST(CudaTraining, MemoryAsItCameMakesNoDifference) {
  SKIP_WITHOUT_GPU();
  for (const auto checkpointing : {ActivationCheckpointing::kNone, ActivationCheckpointing::kFull})
    for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
      Config config = gpu_config(precision, Precision::kAuto);
      config.residual = Precision::kF32;
      config.train.activation_checkpointing = checkpointing;
      const auto losses_in = [&](bool of_nans) {
        TinyRun run(config, 1024);
        std::vector<double> losses;
        for (int64_t step = 0; step < 4; ++step) {
          for (Arena* region : {&run.bench().regions().activations, &run.bench().regions().scratch})
            if (of_nans) fill_with_nan(run.bench().stream(), *region);
          const OwnedBatch batch(random_documents({1 + step, 700, 37, 200}, config.model.vocab_size, 3));
          losses.push_back(run.step().run({&batch.input(), 1}, batch.num_targets(), 2e-3).loss);
        }
        return losses;
      };
      EXPECT_TRUE(same_bits(losses_in(true), losses_in(false)));
    }
}

// What is computed again is what was computed before, to the bit; only that a wide stream is read as it was, where
// without checkpointing backward has a copy of it that is rounded to bf16.
TEST(CudaTraining, CheckpointingChangesRoundingAtMost) {
  SKIP_WITHOUT_GPU();
  struct Gradients {
    double loss;
    std::vector<double> values;
  };
  const auto gradients_with = [](Precision precision, Precision residual, ActivationCheckpointing checkpointing) {
    Config config = gpu_config(precision, residual);
    config.train.activation_checkpointing = checkpointing;
    TinyRun run(config, 512);
    const OwnedBatch first(random_documents({300, 3, 209}, config.model.vocab_size, 1)),
        second(random_documents({1, 130}, config.model.vocab_size, 2));
    run.step().begin(first.num_targets() + second.num_targets());
    run.step().accumulate(first.input());
    run.step().accumulate(second.input(), MicroBatch::kLast);
    std::vector<double> values = gradients_of(run.registry());
    return Gradients{.loss = run.step().finish(0.0).loss, .values = std::move(values)};
  };
  const Gradients exact = gradients_with(Precision::kF32, Precision::kAuto, ActivationCheckpointing::kNone);
  for (const auto& [precision, residual] :
       {std::pair{Precision::kF32, Precision::kAuto}, std::pair{Precision::kBF16, Precision::kBF16},
        std::pair{Precision::kBF16, Precision::kF32}}) {
    const Gradients all = gradients_with(precision, residual, ActivationCheckpointing::kNone);
    for (const auto checkpointing : {ActivationCheckpointing::kSelective, ActivationCheckpointing::kFull}) {
      const Gradients some = gradients_with(precision, residual, checkpointing);
      EXPECT_EQ(some.loss, all.loss);
      if (residual == Precision::kF32) {
        EXPECT_LE(relative_error(some.values, all.values), 1e-2);
        EXPECT_LE(relative_error(some.values, exact.values), 1.05 * relative_error(all.values, exact.values));
        EXPECT_NE(some.values, all.values);
      } else {
        EXPECT_TRUE(same_bits(some.values, all.values));
      }
    }
  }
}

TEST(CudaMemory, StaysWithinThePlanAndStillDuringSteps) {
  SKIP_WITHOUT_GPU();
  use_gpu(0);
  Config config = gpu_config(Precision::kBF16, Precision::kF32);
  config.model.vocab_size = 8192;
  config.model.hidden_size = 1024;
  config.model.mlp.intermediate_size = 2816;
  constexpr int64_t kTokens = 8192;
  const int64_t before = memory_in_use(Device::kCuda);  // with the driver's own for this process
  TinyRun run(config, kTokens);
  const OwnedBatch batch(random_documents({2048, 2048, 2048, 700, 1348}, config.model.vocab_size, 1));
  const auto step = [&] { EXPECT_TRUE(run.step().run({&batch.input(), 1}, batch.num_targets(), 1e-3).applied); };
  step();
  const int64_t taken = memory_in_use(Device::kCuda) - before;
  Workbench rehearsal(config);
  const int64_t planned =
      rehearsal.rehearse_training({.train_rows = 1, .eval_rows = 1, .row_length = kTokens}, train_step_options(config))
          .total();
  EXPECT_GE(taken, planned);
  EXPECT_LE(static_cast<double>(taken), 1.1 * static_cast<double>(planned));
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(memory_in_use(Device::kCuda) - before, taken);
}

TEST(CudaMemory, MoreThanThereIsIsAnErrorWithSizes) {
  SKIP_WITHOUT_GPU();
  use_gpu(0);
  try {
    const Arena arena("activations", Device::kCuda, int64_t{1} << 50);
    FAIL();
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'activations' needs 1073741824 MiB on the GPU, which has "), std::string::npos) << text;
    EXPECT_NE(text.find(" MiB free; a smaller micro_batch"), std::string::npos) << text;
  }
  const Arena small("activations", Device::kCuda, 1 << 20);  // goes on
}

// Plans for the documents to come are made before the first step.
TEST(CudaMemory, StepsOfPackedDocumentsTakeNone) {
  SKIP_WITHOUT_GPU();
  const TempDirectory root;
  Config config = gpu_config(Precision::kBF16, Precision::kF32);
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 200; ++i) lengths.push_back(2 + 97 * i % 1500);
  write_documents(root / "shards", small_vocabulary(config.model.vocab_size), lengths);
  config.run.dir = root / "run";
  config.data = {.train = {{.path = root / "shards"}}, .tokenizer = "none.model", .sequence_length = 1024};
  config.train.steps = 12;
  config.train.sequences_per_step = 6;
  config.train.micro_batch = 4;  // and 2
  config.checkpoint.every = 0;
  config.checkpoint.background = false;
  RecordedConsole console;
  RunSetup setup(config);
  Trainer trainer(setup, "test", console);
  std::vector<int64_t> in_use;
  trainer.on_step([&](const StepMetrics&) { in_use.push_back(memory_in_use(Device::kCuda)); });
  trainer.run();
  ASSERT_EQ(in_use.size(), 12U);
  for (const int64_t bytes : in_use) EXPECT_EQ(bytes, in_use.front());
  EXPECT_NE(console.text().find("kernels and plans are ready"), std::string::npos);
}

}  // namespace
}  // namespace palimpsest
