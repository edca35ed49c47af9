// The program on many GPUs of this machine, a rank each: against one GPU, against the CPU, and when a rank fails. Ranks
// share GPUs where there are too few.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "data/file_ops.h"
#include "kernels/device.h"
#include "tests/support/run_on_ranks.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_rank_file.h"
#include "trainer/run_setup.h"

namespace palimpsest {
namespace {

using support::descendants;
using support::on_ranks;
using support::ProgramResult;
using support::read_file;
using support::run_command_line;
using support::RunningProgram;

// Programs that tests start see no GPU unless they are told.
support::Environment with_gpus() {
  std::string visible;
  for (int gpu = 0; gpu < num_gpus(); ++gpu) visible.append(gpu > 0 ? "," : "").append(std::to_string(gpu));
  const char* given = std::getenv("CUDA_VISIBLE_DEVICES");
  return {{"CUDA_VISIBLE_DEVICES", given != nullptr ? given : visible}};
}

support::Environment with_gpus_for(int ranks) {
  support::Environment environment = with_gpus();
  if (ranks > num_gpus()) environment.emplace_back("PALIMPSEST_SHARE_GPUS", "1");
  return environment;
}

class ManyGpus : public support::RunOnRanks {
 protected:
  ManyGpus() {
    config_.device = DeviceChoice::kCuda;
    config_.train.steps = 20;
    config_.optimizer.lr = 1e-3;
    config_.schedule.kind = ScheduleKind::kConstant;  // the same however a run is cut into parts
    write_config();
  }
  void SetUp() override {
    if (num_gpus() == 0) GTEST_SKIP() << "there is no GPU that this build can use";
  }

  // Losses of a run in a folder of its own; `steps` of them at most.
  std::vector<double> losses_of(const std::string& name, int ranks, std::vector<std::string> words,
                                const support::Environment& more = {}) {
    Config config = config_;
    config.run.dir = root_ / name;
    words.insert(words.begin(), {"train", file_, "run.dir=" + config.run.dir});
    support::Environment environment = with_gpus_for(ranks);
    environment.insert(environment.end(), more.begin(), more.end());
    const ProgramResult result = run_command_line(on_ranks(ranks, words), environment);
    EXPECT_EQ(result.exit_code, 0) << name << ": " << result.err;
    log_ = result.out;
    std::vector<double> losses;
    for (const auto& line : support::metrics_of(config)) losses.push_back(line["loss"]);
    return losses;
  }
  static void expect_close(const std::vector<double>& got, const std::vector<double>& expected, double limit,
                           const std::string& name) {
    ASSERT_EQ(got.size(), expected.size()) << name;
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] - expected[i]) / expected[i]);
    EXPECT_LE(worst, limit) << name;
    std::printf("%s: worst %.1e\n", name.c_str(), worst);
  }

  std::string log_;  // of the last run
};

using Layouts = std::vector<std::vector<std::string>>;
const Layouts kTwoRanks = {{},
                           {"parallel.zero=2"},
                           {"parallel.zero=3"},
                           {"parallel.tensor=2"},
                           {"parallel.sequence=2"},
                           {"parallel.sequence=2", "parallel.sequence_layout=zigzag"}};
const Layouts kFourRanks = {{"parallel.tensor=2", "parallel.zero=3"},
                            {"parallel.tensor=4"},
                            {"parallel.sequence=4"},
                            {"parallel.sequence=2", "parallel.tensor=2"}};
// In models of this size nothing is large enough to go as copies by itself.
const support::Environment kNoCopies = {}, kCopies = {{"PALIMPSEST_LEAST_COPIED_BYTES", "0"}};

class GpuLayouts : public ManyGpus {
 protected:
  GpuLayouts() {
    config_.model.kda.num_value_heads = 4;  // four tensor ranks share them
    config_.model.mla.num_heads = 4;
    config_.train.steps = 10;
    write_config();
  }
  void expect_as_one(int ranks, const Layouts& layouts, const support::Environment& environment) {
    const std::vector<double> one = losses_of("one", 1, {});
    ASSERT_EQ(one.size(), 10u);
    EXPECT_LT(one.back(), one.front());
    for (const auto& words : layouts) {
      std::string name = "data";
      for (const std::string& word : words) name += "_" + word;
      expect_close(losses_of(name, ranks, words, environment), one, 1e-5, name);
      if (environment.empty() || words == Layouts::value_type{"parallel.tensor=2"}) continue;
      EXPECT_NE(log_.find("copies between GPUs"), std::string::npos) << log_;
    }
  }
};

TEST_F(GpuLayouts, OfTwoRanksTrainAsOneGpuDoes) {
  expect_as_one(2, kTwoRanks, kNoCopies);
}
TEST_F(GpuLayouts, OfTwoRanksTrainAsOneGpuDoesOverCopies) {
  expect_as_one(2, kTwoRanks, kCopies);
}
TEST_F(GpuLayouts, OfFourRanksTrainAsOneGpuDoes) {
  expect_as_one(4, kFourRanks, kNoCopies);
}
TEST_F(GpuLayouts, OfFourRanksTrainAsOneGpuDoesOverCopies) {
  expect_as_one(4, kFourRanks, kCopies);
}

// One rank's word counts for all: another would wait for it.
TEST_F(GpuLayouts, GoWithoutCopiesWhereARankMustNotMapMemory) {
  std::vector<std::string> words = mixed_ranks({"train", file_, "train.steps=2"}, {"train", file_, "train.steps=2"});
  const auto second = std::find(words.begin(), words.end(), ":");
  ASSERT_NE(second, words.end());
  words.insert(second + 1, {"-x", "NCCL_P2P_DISABLE=1"});
  support::Environment environment = with_gpus_for(2);
  environment.insert(environment.end(), kCopies.begin(), kCopies.end());
  const ProgramResult result = run_command_line(words, environment);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("axis replica sends all by NCCL, nothing as copies: NCCL_P2P_DISABLE is set"),
            std::string::npos)
      << result.out;
  EXPECT_EQ(result.out.find("copies between GPUs"), std::string::npos) << result.out;
}

// Rows of one document, of which every rank has parts that are long enough for cuDNN's attention. Weights are large,
// so that what is seen far away counts.
TEST_F(ManyGpus, SequenceRanksInBf16FollowOneGpu) {
  support::write_learnable_shards(root_ / "long", 50000, 1, 100000);
  config_.data.train = {{.path = root_ / "long"}};
  config_.data.sequence_length = 2048;
  config_.precision = Precision::kBF16;
  config_.model.hidden_size = 64;
  config_.model.num_layers = 3;
  config_.model.layers = {"kda", "mla", "attention"};
  config_.model.mla = {.num_heads = 2, .kv_lora_rank = 32};
  config_.model.attention = {.num_heads = 4, .num_kv_heads = 2, .head_dim = 64};
  config_.model.initializer_range = 0.15;
  config_.train.steps = 4;
  config_.train.sequences_per_step = 4;
  write_config();
  const auto norms_of = [&](const std::string& name) {
    Config config = config_;
    config.run.dir = root_ / name;
    std::vector<double> norms;
    for (const auto& line : support::metrics_of(config)) norms.push_back(line["grad_norm"]);
    return norms;
  };
  const std::vector<double> one = losses_of("one", 1, {});
  ASSERT_EQ(one.size(), 4u);
  for (const std::string layout : {"contiguous", "zigzag"}) {
    expect_close(losses_of(layout, 2, {"parallel.sequence=2", "parallel.sequence_layout=" + layout}), one, 3e-3,
                 layout);
    expect_close(norms_of(layout), norms_of("one"), 3e-2, layout + ", gradient norms");
  }
}

TEST_F(ManyGpus, TheSameSeedTwiceIsBitIdentical) {
  Config first = config_, second = config_;
  first.run.dir = root_ / "first";
  second.run.dir = root_ / "second";
  for (const std::string& words : {std::string("parallel.zero=1"), std::string("parallel.tensor=2")}) {
    for (const Config& config : {first, second}) {
      if (path_exists(config.run.dir)) remove_tree(config.run.dir);
      ASSERT_EQ(losses_of(std::filesystem::path(config.run.dir).filename(), 2, {words}).size(), 20u);
    }
    EXPECT_EQ(support::results_of(first), support::results_of(second)) << words;
    for (const int64_t rank : {0, 1}) {
      const auto file_of = [&](const Config& config) {
        return read_file(checkpoint_path(config) + "/" + checkpoint_name(20) + "/" + rank_file_name(rank, 2));
      };
      EXPECT_EQ(file_of(first), file_of(second)) << words;
    }
  }
}

// A CPU's checkpoint goes on on two GPUs, in another layout there, on one, and on the CPU again. Saves in the
// background.
TEST_F(ManyGpus, CheckpointsGoFromCpuToGpusAndBack) {
  const std::vector<double> straight = losses_of("straight", 1, {"device=cpu"});
  ASSERT_EQ(straight.size(), 20u);
  std::vector<double> changing;
  const std::string background = "checkpoint.background=true";
  losses_of("changing", 1, {background, "train.steps=4", "device=cpu"});
  losses_of("changing", 2, {background, "train.steps=8", "parallel.zero=3"});
  losses_of("changing", 2, {background, "train.steps=12", "parallel.tensor=2"});
  losses_of("changing", 1, {background, "train.steps=16"});
  expect_close(losses_of("changing", 2, {background, "device=cpu"}), straight, 1e-4, "changing");
}

TEST_F(ManyGpus, EvaluateAlikeInEveryLayout) {
  losses_of("run", 1, {});
  const auto summary_of = [&](int ranks, const std::string& word) {
    const std::string json = root_ / "eval.json";
    const ProgramResult result = run_command_line(
        on_ranks(ranks, {"eval", file_, "run.dir=" + (root_ / "run"), "--json", json, word}), with_gpus_for(ranks));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(read_file(json));
  };
  const auto one = summary_of(1, "parallel.data=1");
  for (const char* word : {"parallel.data=2", "parallel.tensor=2", "parallel.sequence=2", "parallel.zero=3"}) {
    const auto got = summary_of(2, word);
    EXPECT_EQ(got["tokens"], one["tokens"]) << word;
    EXPECT_NEAR(got["loss"].get<double>(), one["loss"].get<double>(), 1e-5) << word;
  }
}

class FailingGpuRank : public ManyGpus {
 protected:
  static constexpr double kSecondsToEnd = 60;

  FailingGpuRank() {
    config_.train.steps = 100000000;
    write_config();
  }

  // What the job says when `harm` is done to it while it trains.
  template <class Harm>
  ProgramResult after(std::vector<std::string> command_line, Harm&& harm) {
    RunningProgram program = RunningProgram::of_command_line(std::move(command_line), with_gpus_for(2));
    support::wait_for_steps(config_, 3);
    const std::vector<int> processes = descendants(program.pid());
    harm(program.pid());
    const auto begin = std::chrono::steady_clock::now();
    ProgramResult result = program.wait();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    EXPECT_LT(seconds, kSecondsToEnd);
    EXPECT_NE(result.exit_code, 0);
    std::printf("ended after %.1f s: %s\n", seconds, result.err.c_str());
    return result;
  }
};

TEST_F(FailingGpuRank, AKilledRankEndsTheJob) {
  const ProgramResult result =
      after(on_ranks(2, {"train", file_}), [](int launcher) { ::kill(support::pid_of_rank(launcher, 1), SIGKILL); });
  EXPECT_NE(result.err.find("rank 1"), std::string::npos) << result.err;
}

TEST_F(FailingGpuRank, ARankThatHangsEndsTheJobAtTheDeadline) {
  const ProgramResult result = after(on_ranks(2, {"train", file_, "parallel.timeout_s=15"}),
                                     [](int launcher) { ::kill(support::pid_of_rank(launcher, 1), SIGSTOP); });
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_NE(result.err.find("rank 0: "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("did not finish within parallel.timeout_s = 15 s"), std::string::npos) << result.err;
}

TEST_F(FailingGpuRank, ARankThatThrowsEndsTheJobWithItsCause) {
  const ProgramResult result = after(ranks_that_open_files(), [&](int) { remove_tree(shards_of_rank_1()); });
  EXPECT_EQ(result.exit_code, 2) << result.err;  // as without GPUs: a file that cannot be read
  EXPECT_NE(result.err.find("error: rank 1 on "), std::string::npos) << result.err;
}

// Nothing is put away first: the memory that is freed would be waited for by a collective that never ends.
TEST_F(FailingGpuRank, ARankThatCannotWriteItsTextEndsTheJobWithTheCause) {
  config_.train.steps = 1;
  write_config_of_bytes();
  ASSERT_EQ(losses_of("bytes", 1, {}).size(), 1u);
  const auto begin = std::chrono::steady_clock::now();
  const ProgramResult result = run_command_line(ranks_without_output(), with_gpus_for(2));
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), kSecondsToEnd);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("error: rank 0 on "), std::string::npos) << result.err;
}

class CrowdedGpus : public support::RunOnRanks {};

TEST_F(CrowdedGpus, MoreRanksThanGpusAreAnErrorOfOneLine) {
  if (num_gpus() == 0) GTEST_SKIP() << "there is no GPU that this build can use";
  const ProgramResult result = run_command_line(on_ranks(num_gpus() + 1, {"train", file_, "device=cuda"}), with_gpus());
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(support::count(result.err, "error: "), 1u) << result.err;
  EXPECT_NE(result.err.find(std::to_string(num_gpus() + 1) + " ranks on "), std::string::npos) << result.err;
}

}  // namespace
}  // namespace palimpsest
