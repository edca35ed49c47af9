// One rank fails in the middle of a run: the whole job ends, soon, with a status that is not 0 and the cause named.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "data/file_ops.h"
#include "tests/support/run_on_ranks.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run_setup.h"

namespace palimpsest {
namespace {

using support::descendants;
using support::on_ranks;
using support::pid_of_rank;
using support::ProgramResult;
using support::run_command_line;
using support::RunningProgram;
using support::wait_for_steps;

constexpr double kSecondsToEnd = 60;

class FailingRank : public support::RunOnRanks {
 protected:
  FailingRank() {
    config_.train.steps = 100000000;
    write_config();
  }

  // Waits for the end of a job that something was just done to.
  ProgramResult end_of(RunningProgram& program, const std::vector<int>& processes) {
    const auto begin = std::chrono::steady_clock::now();
    ProgramResult result = program.wait();
    const auto is_gone = [](int pid) { return ::kill(pid, 0) != 0; };
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    for (const int pid : processes)
      while (!is_gone(pid) && seconds() < kSecondsToEnd) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (const int pid : processes) EXPECT_TRUE(is_gone(pid)) << "process " << pid << " still runs";
    EXPECT_LT(seconds(), kSecondsToEnd);
    EXPECT_NE(result.exit_code, 0);
    return result;
  }
};

TEST_F(FailingRank, AKilledRankEndsTheJob) {
  RunningProgram program = RunningProgram::of_command_line(on_ranks(4, {"train", file_, "parallel.tensor=2"}));
  wait_for_steps(config_, 3);
  const std::vector<int> processes = descendants(program.pid());
  ASSERT_GE(processes.size(), 6u);  // the script, mpirun, four ranks
  ::kill(pid_of_rank(program.pid(), 2), SIGKILL);
  const ProgramResult result = end_of(program, processes);
  EXPECT_NE(result.err.find("rank 2"), std::string::npos) << result.err;
}

TEST_F(FailingRank, ARankThatHangsEndsTheJobAtTheDeadline) {
  RunningProgram program = RunningProgram::of_command_line(on_ranks(4, {"train", file_, "parallel.timeout_s=2"}));
  wait_for_steps(config_, 3);
  const std::vector<int> processes = descendants(program.pid());
  ::kill(pid_of_rank(program.pid(), 1), SIGSTOP);
  const ProgramResult result = end_of(program, processes);
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_NE(result.err.find("on axis "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(" at step "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("did not finish within parallel.timeout_s = 2 s"), std::string::npos) << result.err;
}

TEST_F(FailingRank, ARankThatThrowsEndsTheJobWithItsCause) {
  RunningProgram program = RunningProgram::of_command_line(ranks_that_open_files());
  wait_for_steps(config_, 3);
  const std::vector<int> processes = descendants(program.pid());
  remove_tree(shards_of_rank_1());
  const ProgramResult result = end_of(program, processes);
  EXPECT_EQ(result.exit_code, 2) << result.err;  // a file that cannot be read, whoever reads it
  EXPECT_NE(result.err.find("error: rank 1 on "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(".h5"), std::string::npos) << result.err;
}

TEST_F(FailingRank, RepeatedNonFiniteStepsStopAllRanksWithFour) {
  const ProgramResult result = run_command_line(
      on_ranks(2, {"train", file_, "optimizer.lr=1e30", "optimizer.grad_clip=null", "train.max_skipped_steps=2"}));
  EXPECT_EQ(result.exit_code, 4) << result.err;
  EXPECT_EQ(support::count(result.err, "error: "), 1u) << result.err;
  EXPECT_NE(result.err.find("the first tensor that went bad"), std::string::npos) << result.err;
}

TEST_F(FailingRank, AFullDiskOnOneRankEndsTheJobAndLeavesTheOlderCheckpoint) {
  const std::vector<std::string> arguments = {"train", file_, "checkpoint.every=2", "train.steps=12"};
  std::vector<std::string> words = mixed_ranks(arguments, arguments);
  const auto second = std::find(words.begin(), words.end(), ":") + 1;
  words.insert(second, {"-x", "PALIMPSEST_FAIL_AT_FILE_OPERATION=150"});
  const ProgramResult result = run_command_line(words);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("error: rank 1 on "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("No space left on device"), std::string::npos) << result.err;
  const auto left = list_checkpoints(checkpoint_path(config_));
  ASSERT_FALSE(left.empty());
  EXPECT_TRUE(left.back().has_manifest);
  EXPECT_LT(left.back().step, 12);
  const ProgramResult again = run_command_line(on_ranks(2, arguments));
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_NE(again.out.find("resumed from " + left.back().path), std::string::npos) << again.out;
}

TEST_F(FailingRank, ADiskThatFillsDuringASaveOfFourRanksEndsTheJobAndLeavesTheOlderCheckpoint) {
  const support::SmallFileSystem disk(int64_t{8} << 20);
  if (!disk.mounted()) GTEST_SKIP() << "only root may mount a file system";
  create_directories(disk / "saves");
  create_directories(config_.run.dir);
  std::filesystem::create_directory_symlink(disk / "saves", checkpoint_path(config_));
  const std::vector<std::string> arguments = {
      "train", file_, "checkpoint.every=4", "checkpoint.keep_last=1", "parallel.tensor=2", "parallel.zero=2"};
  RunningProgram program = RunningProgram::of_command_line(on_ranks(4, arguments));
  wait_for_steps(config_, 5);
  const auto newest = [&]() -> std::string {
    const auto all = list_checkpoints(checkpoint_path(config_));
    const auto complete = std::find_if(all.rbegin(), all.rend(), [](const auto& it) { return it.has_manifest; });
    return complete == all.rend() ? "" : complete->path;
  };
  for (int i = 0; i < 600 && newest().empty(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::vector<int> processes = descendants(program.pid());
  std::ofstream(disk / "filler") << std::string(8 << 20, 'x');  // as much as there is room for
  const ProgramResult result = end_of(program, processes);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("error: rank "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("No space left on device"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("checkpoints/step-"), std::string::npos) << result.err;
  const std::string left = newest();
  ASSERT_FALSE(left.empty());
  remove_file(disk / "filler");
  std::vector<std::string> again = arguments;
  again.push_back("train.max_minutes=0.001");
  const ProgramResult resumed = run_command_line(on_ranks(2, again));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_NE(resumed.out.find("resumed from " + left), std::string::npos) << resumed.out;
}

}  // namespace
}  // namespace palimpsest
