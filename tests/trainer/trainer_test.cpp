#include "trainer/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <csignal>

#include "data/file_ops.h"
#include "tests/support/files.h"
#include "tests/support/tensors.h"
#include "tests/support/training.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/schedule.h"

namespace palimpsest {
namespace {

using support::checkpoint_bytes;
using support::metrics_of;
using support::RecordedConsole;
using support::results_of;
using support::TempDirectory;
using support::tiny_run_config;
using support::user_error_of;

std::string train_quietly(const Config& config) {
  RecordedConsole console;
  train(config, Mesh::single(), "test", console);
  return console.text();
}

TEST(Trainer, LearnsAndWritesWhatARunConsistsOf) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.train.steps = 60;
  config.train.eval_every = 25;
  config.data.eval.push_back({"seen", root / "shards"});
  const std::string log = train_quietly(config);
  const auto metrics = metrics_of(config);
  ASSERT_EQ(metrics.size(), 60u);
  for (size_t i = 0; i < metrics.size(); ++i) {
    EXPECT_EQ(metrics[i].at("step"), i + 1);
    EXPECT_TRUE(std::isfinite(metrics[i].at("loss").get<double>()));
    EXPECT_GT(metrics[i].at("tokens_per_second").get<double>(), 0.0);
    EXPECT_GT(metrics[i].at("mfu").get<double>(), 0.0);
    EXPECT_EQ(metrics[i].contains("eval"), (i + 1) % 25 == 0 || i + 1 == 60);
  }
  EXPECT_NEAR(metrics[0].at("loss").get<double>(), std::log(37.0), 0.3);
  EXPECT_LT(metrics.back().at("loss").get<double>(), 0.7 * metrics[0].at("loss").get<double>());
  for (const char* set : {"held_out", "seen"})
    EXPECT_LT(metrics.back().at("eval").at(set).at("loss").get<double>(), std::log(37.0)) << set;
  // The stored config reads back to the same run.
  EXPECT_TRUE(differences(load_config(config_path(config)), config).empty());
  EXPECT_TRUE(is_directory(config.run.dir + "/tensorboard"));
  EXPECT_TRUE(has_manifest(checkpoint_path(config) + "/step-000060"));
  for (const char* part : {"model.layers.1.self_attn.kv_b_proj.weight", "AdamW, weight decay", "MFLOP", "activations",
                           "hidden_size: 20", "step 60/60"})
    EXPECT_NE(log.find(part), std::string::npos) << part;
}

class Resume : public testing::TestWithParam<int64_t> {};

TEST_P(Resume, EqualsTheRunWithoutAnInterruption) {
  const TempDirectory root;
  const int64_t micro_batch = GetParam();
  const auto config_of = [&](const char* name, bool background) {
    Config config = tiny_run_config(root, name);
    config.train.steps = 20;
    config.train.micro_batch = micro_batch;
    config.train.eval_every = 5;
    config.schedule = {.kind = ScheduleKind::kCosine, .warmup_steps = 4};
    config.checkpoint.every = 10;
    config.checkpoint.keep_last = 5;
    config.checkpoint.background = background;
    return config;
  };
  const Config straight = config_of("straight", false);
  train_quietly(straight);

  // Stopped after 3, 10 and 13 of 20 steps, saved in the background.
  const Config pieces = config_of("pieces", true);
  for (const int64_t until : {3, 10, 13}) {
    RecordedConsole console;
    RunSetup setup(pieces);
    Trainer trainer(setup, "test", console);
    trainer.on_step([&](const StepMetrics& metrics) {
      if (metrics.step == until) std::raise(SIGUSR1);
    });
    trainer.run();
  }
  const std::string log = train_quietly(pieces);
  EXPECT_NE(log.find("resumed from"), std::string::npos);
  EXPECT_EQ(results_of(pieces), results_of(straight));
  EXPECT_TRUE(checkpoint_bytes(pieces, 20) == checkpoint_bytes(straight, 20));
  EXPECT_TRUE(checkpoint_bytes(pieces, 10) == checkpoint_bytes(straight, 10));
  EXPECT_FALSE(checkpoint_bytes(pieces, 10) == checkpoint_bytes(pieces, 20));
}
INSTANTIATE_TEST_SUITE_P(Accumulation, Resume, testing::Values(4, 2, 3));

TEST(Trainer, AccumulationChangesNoLearningRate) {
  const TempDirectory root;
  std::vector<std::vector<double>> rates;
  for (const int64_t micro_batch : {4, 1}) {
    Config config = tiny_run_config(root, "run" + std::to_string(micro_batch));
    config.train.micro_batch = micro_batch;
    config.schedule = {.kind = ScheduleKind::kLinear, .warmup_steps = 3};
    train_quietly(config);
    std::vector<double>& lrs = rates.emplace_back();
    for (const auto& line : metrics_of(config)) lrs.push_back(line.at("lr"));
    for (size_t i = 0; i < lrs.size(); ++i)
      EXPECT_EQ(lrs[i], learning_rate(config.schedule, config.optimizer.lr, static_cast<int64_t>(i) + 1, 10));
  }
  EXPECT_EQ(rates[0], rates[1]);
}

TEST(Trainer, EvaluationRightAfterLoadingEqualsTheStoredOne) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.train.eval_every = 5;
  config.checkpoint.every = 6;
  train_quietly(config);
  // What was evaluated at step 5 is no figure of step 6.
  EXPECT_TRUE(CheckpointReader(checkpoint_path(config) + "/step-000006").manifest().header.state.eval_losses.empty());
  CheckpointReader reader(checkpoint_path(config) + "/step-000010");
  const double stored = reader.manifest().header.state.eval_losses.at("held_out");

  Workbench bench(config);
  bench.allocate(ParameterUse::kInference,
                 bench.rehearse_evaluation({.eval_rows = 4, .row_length = config.data.sequence_length}));
  reader.load(bench.registry(), CheckpointContent::kWeights);
  RecordedConsole console;
  const Evaluation again = evaluate(bench.model(), bench.context(), *open_eval_sets(config)[0].dataset,
                                    {.row_length = 24, .stride = 24, .batch_rows = 4}, console, "held_out");
  EXPECT_EQ(again.mean_loss(), stored);
}

TEST(Trainer, StopsAndSavesOnASignal) {
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    const TempDirectory root;
    Config config = tiny_run_config(root, "run");
    config.train.steps = 1000000;
    RecordedConsole console;
    RunSetup setup(config);
    Trainer trainer(setup, "test", console);
    trainer.on_step([&](const StepMetrics& metrics) {
      if (metrics.step == 7) std::raise(signal);
    });
    trainer.run();
    EXPECT_EQ(trainer.state().step, 7);
    EXPECT_TRUE(has_manifest(checkpoint_path(config) + "/step-000007"));
    EXPECT_NE(console.text().find("the same command continues"), std::string::npos);
  }
}

TEST(Trainer, ASignalBeforeTheFirstStepStopsWithoutOne) {
  const TempDirectory root;
  const Config config = tiny_run_config(root, "run");
  RecordedConsole console;
  RunSetup setup(config);
  Trainer trainer(setup, "test", console);
  std::raise(SIGTERM);
  trainer.run();
  EXPECT_EQ(trainer.state().step, 0);
  EXPECT_TRUE(metrics_of(config).empty());
  EXPECT_TRUE(list_checkpoints(checkpoint_path(config)).empty());
  EXPECT_NE(console.text().find("stopped before step 1 of 10 by signal TERM"), std::string::npos) << console.text();
}

TEST(Trainer, StopsAndSavesWhenItsTimeIsUp) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.train.steps = 1000000;
  config.train.max_minutes = 0.005;
  train_quietly(config);
  const auto metrics = metrics_of(config);
  EXPECT_TRUE(has_manifest(checkpoint_path(config) + "/" + checkpoint_name(static_cast<int64_t>(metrics.size()))));
}

TEST(Trainer, MoreThanThePeakIsAWarningOnce) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.hardware.peak_tflops = 1e-12;
  const std::string log = train_quietly(config), warning = "set hardware.peak_tflops";
  const size_t at = log.find(warning);
  EXPECT_NE(at, std::string::npos) << log;
  EXPECT_EQ(log.find(warning, at + 1), std::string::npos);
}

TEST(Trainer, SkipsNonFiniteStepsAndStopsAfterTooMany) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.train.steps = 50;
  config.train.max_skipped_steps = 3;
  config.checkpoint.every = 1;
  // The first step is applied and throws the weights so far out that nothing is finite any more.
  config.optimizer.lr = 1e30;
  config.optimizer.grad_clip.reset();
  RecordedConsole console;
  RunSetup setup(config);
  Trainer trainer(setup, "test", console);
  std::string message;
  try {
    trainer.run();
  } catch (const NonFiniteStop& stop) {
    message = stop.what();
  }
  EXPECT_NE(message.find("step 5: 4 steps in a row were not finite"), std::string::npos) << message;
  EXPECT_NE(message.find("the first tensor that went bad: gradient of model."), std::string::npos) << message;
  EXPECT_EQ(trainer.state().skipped_steps, 4);
  EXPECT_EQ(trainer.state().applied_steps, 1);
  const auto metrics = metrics_of(config);
  ASSERT_EQ(metrics.size(), 5u);
  EXPECT_EQ(metrics[0].at("skipped_steps"), 0);
  EXPECT_EQ(metrics[4].at("skipped_steps"), 4);
  // Nothing but the counters changed between these two checkpoints.
  EXPECT_TRUE(checkpoint_bytes(config, 3) == checkpoint_bytes(config, 4));
  CheckpointReader reader(checkpoint_path(config) + "/step-000004");
  EXPECT_EQ(reader.manifest().header.state.skipped_in_a_row, 3);
}

// ---- where a run starts ---------------------------------------------------------------------------------------------

TEST(RunStart, AnotherModelIsRefusedWithEveryDifferingKey) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  train_quietly(config);
  config.model.hidden_size = 40;
  config.model.mlp.intermediate_size = 99;
  const std::string before = support::read_file(config_path(config));
  const std::string error = user_error_of([&] { train_quietly(config); });
  EXPECT_NE(error.find("model.hidden_size (20 there, 40 here)"), std::string::npos) << error;
  EXPECT_NE(error.find("model.mlp.intermediate_size (28 there, 99 here)"), std::string::npos) << error;
  EXPECT_EQ(support::read_file(config_path(config)), before);
}

TEST(RunStart, ANewRunDoesNotMixWithAnOldOne) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  train_quietly(config);
  config.resume = "none";
  const std::string error = user_error_of([&] { train_quietly(config); });
  EXPECT_NE(error.find("holds a run at step 10"), std::string::npos) << error;
}

TEST(RunStart, ResumesFromAPathWhereTheFolderHasNothingNewer) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.checkpoint.every = 5;
  train_quietly(config);
  Config branch = tiny_run_config(root, "branch");
  branch.resume = checkpoint_path(config) + "/step-000005";
  train_quietly(branch);
  EXPECT_TRUE(checkpoint_bytes(branch, 10) == checkpoint_bytes(config, 10));
  config.resume = branch.resume;
  const std::string error = user_error_of([&] { train_quietly(config); });
  EXPECT_NE(error.find("holds step 10 already"), std::string::npos) << error;
}

TEST(RunStart, TakesTheWeightsAloneFromAnotherRun) {
  const TempDirectory root;
  Config first = tiny_run_config(root, "first");
  train_quietly(first);
  Config second = tiny_run_config(root, "second");
  second.from = first.run.dir;
  second.train.steps = 1;
  second.optimizer.lr = 0;
  second.optimizer.weight_decay = 0;
  train_quietly(second);
  EXPECT_EQ(metrics_of(second).size(), 1u);
  CheckpointReader a(checkpoint_path(first) + "/step-000010"), b(checkpoint_path(second) + "/step-000001");
  EXPECT_EQ(b.manifest().header.state.applied_steps, 1);
  std::map<std::string, uint32_t> sums;
  for (const DatasetRecord& record : a.manifest().datasets) sums[record.name] = record.crc32;
  for (const DatasetRecord& record : b.manifest().datasets)
    EXPECT_EQ(record.crc32 == sums.at(record.name), record.name.starts_with("model/")) << record.name;
}

TEST(RunStart, FallsBackToTheCheckpointBeforeADamagedOne) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.train.steps = 20;
  config.checkpoint.every = 5;
  config.checkpoint.keep_last = 3;
  train_quietly(config);
  const auto expected = results_of(config);
  const std::string path = checkpoint_path(config) + "/step-000020/rank-00000-of-00001.h5";
  std::string bytes = support::read_file(path);
  bytes[bytes.size() / 2] ^= 1;
  support::write_file(path, bytes);
  const std::string log = train_quietly(config);
  EXPECT_NE(log.find("skipped checkpoint"), std::string::npos) << log;
  EXPECT_NE(log.find("step-000015 at step 15"), std::string::npos) << log;
  EXPECT_EQ(results_of(config), expected);
}

TEST(RunStart, GoesOnInTheDataWhereItWasWithAnotherNumberOfRows) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  train_quietly(config);  // 10 steps of 4 rows
  config.train.steps = 12;
  config.train.sequences_per_step = 3;
  const std::string log = train_quietly(config);
  EXPECT_NE(log.find("train.sequences_per_step was 4 and is now 3"), std::string::npos) << log;
  CheckpointReader reader(checkpoint_path(config) + "/step-000012");
  EXPECT_EQ(reader.manifest().header.state.sampler_position, 10 * 4 + 2 * 3);
  // Targets of exactly the rows 0 to 45.
  const RunSetup setup(config);
  EXPECT_EQ(reader.manifest().header.state.tokens, setup.data().count_targets({0, 46}));
}

TEST(RunStart, AFinishedRunHasNothingToDo) {
  const TempDirectory root;
  const Config config = tiny_run_config(root, "run");
  train_quietly(config);
  EXPECT_NE(train_quietly(config).find("nothing to do"), std::string::npos);
  EXPECT_EQ(metrics_of(config).size(), 10u);
}

std::string dry_run_text(Config config) {
  config.data.tokenizer = "bytes";
  RecordedConsole console;
  dry_run(config, Mesh::single(), console);
  return console.text();
}

TEST(DryRun, PrintsEverythingAndWritesNothing) {
  const TempDirectory root;
  const Config config = tiny_run_config(root, "run");
  const std::string text = dry_run_text(config);
  for (const char* part : {"hidden_size: 20", "model.embed_tokens.weight", "activations",
                           "the run starts from initial weights", "row 0, 24 tokens"})
    EXPECT_NE(text.find(part), std::string::npos) << part;
  EXPECT_FALSE(path_exists(config.run.dir));
}

TEST(DryRun, FollowsWhereTheRunWouldStart) {
  const TempDirectory root;
  const Config trained = tiny_run_config(root, "run");
  train_quietly(trained);
  const std::string newest = checkpoint_path(trained) + "/" + checkpoint_name(10);
  const std::string finished = dry_run_text(trained);
  EXPECT_NE(finished.find("the run continues from " + newest), std::string::npos);
  EXPECT_NE(finished.find("nothing to do: the run is at step 10 of 10"), std::string::npos);
  EXPECT_EQ(finished.find("first batch"), std::string::npos);
  Config other = tiny_run_config(root, "other");
  other.from = trained.run.dir;
  EXPECT_NE(dry_run_text(other).find("the run starts with the weights of " + newest), std::string::npos);
  other.model.hidden_size = 28;
  EXPECT_NE(user_error_of([&] { dry_run_text(other); }).find("does not fit the model"), std::string::npos);
  other.from = root / "nowhere";
  EXPECT_NE(user_error_of([&] { dry_run_text(other); }).find("nowhere"), std::string::npos);
  other = trained;
  other.model.hidden_size = 28;
  EXPECT_NE(user_error_of([&] { dry_run_text(other); }).find("model.hidden_size"), std::string::npos);
  EXPECT_FALSE(path_exists(root / "other"));
  other = trained;
  other.resume = "none";
  EXPECT_NE(user_error_of([&] { dry_run_text(other); }).find("resume is none, but "), std::string::npos);
  Config shorter = tiny_run_config(root, "shorter");
  shorter.train.steps = 5;
  train_quietly(shorter);
  other.resume = checkpoint_path(shorter) + "/" + checkpoint_name(5);
  EXPECT_NE(user_error_of([&] { dry_run_text(other); }).find("holds step 10 already"), std::string::npos);
}

TEST(DryRun, WarnsOfWhatTheRunWouldWarnOf) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.checkpoint.every = 5;
  train_quietly(config);
  const std::string newest = checkpoint_path(config) + "/" + checkpoint_name(10);
  config.train.steps = 12;
  config.optimizer.lr *= 2;
  support::write_file(newest + "/manifest.json", "{");
  const std::string planned = dry_run_text(config);
  const std::string started = train_quietly(config);
  for (const std::string& text : {planned, started}) {
    EXPECT_NE(text.find("skipped checkpoint " + newest), std::string::npos) << text;
    EXPECT_NE(text.find("resume: train.steps was 10 and is now 12"), std::string::npos) << text;
    EXPECT_NE(text.find("resume: optimizer.lr was"), std::string::npos) << text;
  }
}

TEST(DryRun, PrintsTheBatchThatTheRunWouldGoOnWith) {
  const TempDirectory root;
  Config config = tiny_run_config(root, "run");
  config.model.vocab_size = 258;
  config.data.tokenizer = "bytes";  // the run's checkpoint must fit it too
  const auto batch_of = [](const Config& of) {
    const std::string text = dry_run_text(of);
    return text.substr(text.find("the first batch"));
  };
  const std::string first = batch_of(config);
  config.train.steps = 5;
  train_quietly(config);
  config.train.steps = 10;
  EXPECT_NE(batch_of(config), first);
}

}  // namespace
}  // namespace palimpsest
