// The program under mpirun as a user meets it: the same run in every layout, differing ranks, signals.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "data/file_ops.h"
#include "tests/support/run_on_ranks.h"
#include "tests/support/shard_files.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run_setup.h"

namespace palimpsest {
namespace {

using support::metrics_of;
using support::on_ranks;
using support::ProgramResult;
using support::read_file;
using support::run_command_line;
using support::RunningProgram;

using Ranks = support::RunOnRanks;

TEST_F(Ranks, EveryLayoutLogsTheNumbersOfOneRank) {
  config_.precision = Precision::kF64;
  config_.train.eval_every = 3;
  write_config();
  ASSERT_EQ(support::run_palimpsest({"train", file_}).exit_code, 0);
  const auto expected = metrics_of(config_);
  struct Layout {
    int data, sequence, tensor, zero;
    std::string layout;
  };
  for (const auto& [data, sequence, tensor, zero, layout] : std::vector<Layout>{{4, 1, 1, 1, "contiguous"},
                                                                                {2, 1, 2, 3, "contiguous"},
                                                                                {1, 1, 2, 2, "contiguous"},
                                                                                {1, 2, 2, 1, "zigzag"},
                                                                                {1, 3, 1, 2, "contiguous"}}) {
    Config config = config_;
    config.run.dir = root_ / ("layout-" + std::to_string(data) + std::to_string(sequence) + std::to_string(tensor));
    const ProgramResult result = run_command_line(
        on_ranks(data * sequence * tensor,
                 {"train", file_, "run.dir=" + config.run.dir, "parallel.data=" + std::to_string(data),
                  "parallel.sequence=" + std::to_string(sequence), "parallel.sequence_layout=" + layout,
                  "parallel.tensor=" + std::to_string(tensor), "parallel.zero=" + std::to_string(zero)}));
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(support::count(result.out, "step 1/"), 1u) << result.out;  // one rank alone writes
    const auto lines = metrics_of(config);
    ASSERT_EQ(lines.size(), expected.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(lines[i].at("tokens"), expected[i].at("tokens"));
      EXPECT_NEAR(lines[i].at("loss"), expected[i].at("loss").get<double>(), 1e-9);
      EXPECT_NEAR(lines[i].at("grad_norm"), expected[i].at("grad_norm").get<double>(), 1e-9);
    }
    EXPECT_NEAR(lines[5].at("eval").at("held_out").at("loss"),
                expected[5].at("eval").at("held_out").at("loss").get<double>(), 1e-9);
    // What the rehearsal counted is what was sent. Its rows hold one document each: what of shorter ones nobody sees is
    // not sent.
    for (const auto& [axis, bytes] : lines[1].at("bytes_sent").items()) {
      const int64_t counted = support::number_behind(result.out, "  " + axis + " "), sent = bytes.get<int64_t>();
      if (axis == "sequence") {
        EXPECT_LE(sent, counted) << result.out;
        EXPECT_EQ(sent > 0, sequence > 1);
      } else {
        EXPECT_EQ(sent, counted) << axis << result.out;
      }
    }
  }
}

TEST_F(Ranks, StartPrintsWhichRankIsWhere) {
  const ProgramResult result = run_command_line(
      on_ranks(4, {"train", file_, "parallel.data=2", "parallel.tensor=2", "train.steps=1", "train.eval_every=0"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("4 ranks: data 2 x sequence 1 x tensor 2"), std::string::npos) << result.out;
  // rank, host, local rank, threads, data, sequence, tensor, GPU
  std::string line = result.out.substr(result.out.find("\n      3  "));
  line = line.substr(1, line.find('\n', 1) - 1);
  EXPECT_TRUE(line.ends_with("    3        1     1         0       1  none")) << line;
}

TEST_F(Ranks, AnErrorThatAllRanksMeetIsPrintedOnce) {
  for (const auto& [override, part] : std::vector<std::pair<std::string, std::string>>{
           {"optimizer.lr=-1", "optimizer.lr is -1"},
           {"parallel.tensor=3", "data = -1, sequence = 1, tensor = 3 on 4 ranks"},
           {"train.sequences_per_step=6", "must be a multiple of the 4 ranks of parallel.data"},
           {"data.train=" + (root_ / "nowhere"), "nowhere"},
           {"model.vocab_size=36", "shards"}}) {
    const ProgramResult result = run_command_line(on_ranks(4, {"train", file_, override}));
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(support::count(result.err, "error: "), 1u) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  }
  const ProgramResult result = run_command_line(on_ranks(2, {"inspect", config_.run.dir}));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(support::count(result.err, "runs as one rank"), 1u) << result.err;
}

TEST_F(Ranks, ADifferenceBetweenRanksIsNamedWithTheRanks) {
  const ProgramResult config = run_command_line(mixed_ranks({"train", file_}, {"train", file_, "train.steps=20"}));
  EXPECT_EQ(config.exit_code, 2);
  EXPECT_NE(config.err.find("the ranks differ in train.steps: 6 on rank 0"), std::string::npos) << config.err;
  EXPECT_NE(config.err.find(", but 20 on rank 1 on "), std::string::npos) << config.err;

  std::vector<std::string> links = mixed_ranks({"train", file_}, {"train", file_});
  links.insert(std::find(links.begin(), links.end(), ":") + 1, {"-x", "PALIMPSEST_LEAST_COPIED_BYTES=7"});
  const ProgramResult environment = run_command_line(links);
  EXPECT_EQ(environment.exit_code, 2);
  EXPECT_NE(environment.err.find("the ranks differ in PALIMPSEST_LEAST_COPIED_BYTES: 524288 on rank 0"),
            std::string::npos)
      << environment.err;

  // The same path in two folders, with one other token.
  create_directories(root_ / "here");
  create_directories(root_ / "there");
  support::write_learnable_shards(root_ / "here/shards", 1500, 1);
  support::write_learnable_shards(root_ / "there/shards", 1500, 3);
  std::vector<std::string> words =
      mixed_ranks({"train", file_, "data.train=shards"}, {"train", file_, "data.train=shards"});
  support::run_in_folders(words, root_ / "here", root_ / "there");
  const ProgramResult data = run_command_line(words);
  EXPECT_EQ(data.exit_code, 2);
  EXPECT_NE(data.err.find("the ranks differ in the contents of data.train"), std::string::npos) << data.err;
}

TEST_F(Ranks, SignalsToTheLauncherOrToOneRankSaveOnAll) {
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    Config config = config_;
    config.run.dir = root_ / ("signal-" + std::to_string(signal));
    RunningProgram program = RunningProgram::of_command_line(
        on_ranks(4, {"train", file_, "run.dir=" + config.run.dir, "train.steps=100000000", "train.eval_every=0"}));
    support::wait_for_steps(config, 3);
    switch (signal) {
      case SIGTERM:
        program.signal(signal);
        break;
      case SIGINT:
        program.interrupt_from_terminal();
        break;
      default:
        ::kill(support::pid_of_rank(program.pid(), 2), signal);
    }
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const auto last = static_cast<int64_t>(metrics_of(config).size());
    EXPECT_NE(result.out.find("stopped after step " + std::to_string(last) + " of 100000000 by signal USR1"),
              std::string::npos)
        << result.out;
    EXPECT_TRUE(has_manifest(checkpoint_path(config) + "/" + checkpoint_name(last)));
  }
}

TEST_F(Ranks, ASignalReachesTheRanksThoughMpirunLosesIt) {
  support::write_script(root_ / "mpirun",
                        "#!/bin/bash\ntrap : USR1\nPATH=${PATH#*:}\n"
                        "mpirun \"$@\" &\nwait $!\nwait $!\n");
  RunningProgram program =
      RunningProgram::of_command_line(on_ranks(4, {"train", file_, "train.steps=100000000", "train.eval_every=0"}),
                                      {{"PATH", root_.path() + ":" + std::getenv("PATH")}});
  support::wait_for_steps(config_, 3);
  program.signal(SIGTERM);
  const ProgramResult result = program.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(support::count(result.err, "Forwarding signal"), 0u) << result.err;
  EXPECT_NE(result.out.find(" of 100000000 by signal USR1"), std::string::npos) << result.out;
}

TEST_F(Ranks, TheTimeLimitStopsAllRanksAtTheSameStep) {
  const ProgramResult result = run_command_line(
      on_ranks(2, {"train", file_, "train.steps=100000000", "train.eval_every=0", "train.max_minutes=0.01"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("by train.max_minutes"), std::string::npos) << result.out;
  EXPECT_TRUE(
      has_manifest(checkpoint_path(config_) + "/" + checkpoint_name(static_cast<int64_t>(metrics_of(config_).size()))));
}

}  // namespace
}  // namespace palimpsest
