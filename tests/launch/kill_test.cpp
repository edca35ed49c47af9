// Whole runs killed at file operations of a save: the next start goes on, and everything it computes equals the run
// that nobody killed.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>

#include "data/file_ops.h"
#include "tests/support/files.h"
#include "tests/support/program.h"
#include "tests/support/training.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run_setup.h"
#include "trainer/trainer.h"

namespace palimpsest {
namespace {

using support::checkpoint_bytes;
using support::ProgramResult;
using support::results_of;
using support::run_palimpsest;
using support::TempDirectory;

constexpr int64_t kSteps = 3;

Config config_of(const TempDirectory& root, const std::string& name) {
  Config config = support::tiny_run_config(root, name);
  config.model.num_layers = 1;
  config.hardware.threads = 1;
  config.train.steps = kSteps;
  config.train.eval_every = 2;
  config.checkpoint.every = 1;
  config.checkpoint.keep_last = 1;
  return config;
}

// File operations of a run of this many steps.
int64_t operations_of_run(const TempDirectory& root, int64_t steps) {
  Config config = config_of(root, "counted-" + std::to_string(steps));
  config.train.steps = steps;
  support::RecordedConsole console;
  const int64_t before = num_file_operations();
  train(config, Mesh::single(), "counted", console);
  return num_file_operations() - before;
}

TEST(KilledRun, GoesOnAsIfNothingHadHappened) {
  const TempDirectory root;
  // The save after step 2 of 3, which also removes the checkpoint of step 1.
  const int64_t begin = operations_of_run(root, 1) + 1, end = operations_of_run(root, 2);
  ASSERT_GT(end - begin, 40);
  const Config straight = config_of(root, "straight");
  support::write_file(root / "straight.yaml", to_yaml(straight));
  ASSERT_EQ(run_palimpsest({"train", root / "straight.yaml"}).exit_code, 0);
  const auto expected = results_of(straight);
  ASSERT_EQ(expected.size(), static_cast<size_t>(kSteps));

  // Most operations are writes within the rank's file: of those in the middle, a part.
  const bool reduced = std::getenv("PALIMPSEST_REDUCED") != nullptr;
  const int64_t border = reduced ? 5 : 15, stride = reduced ? 12 : 4;
  int num_kills = 0;
  for (int64_t operation = begin; operation <= end; ++operation) {
    if (operation >= begin + border && operation <= end - border && operation % stride != 0) continue;
    SCOPED_TRACE(operation);
    Config config = config_of(root, "killed-" + std::to_string(operation));
    config.checkpoint.background = operation % 2 == 0;
    const std::string file = root / "killed.yaml";
    support::write_file(file, to_yaml(config));
    const ProgramResult killed =
        run_palimpsest({"train", file}, {{"PALIMPSEST_KILL_AT_FILE_OPERATION", std::to_string(operation)}});
    ASSERT_EQ(killed.exit_code, -SIGKILL) << killed.err;
    ++num_kills;
    const ProgramResult again = run_palimpsest({"train", file});
    ASSERT_EQ(again.exit_code, 0) << again.err;
    EXPECT_NE(again.out.find("resumed from"), std::string::npos);
    ASSERT_EQ(results_of(config), expected);
    ASSERT_EQ(list_checkpoints(checkpoint_path(config)).size(), 1u);
    ASSERT_TRUE(checkpoint_bytes(config, kSteps) == checkpoint_bytes(straight, kSteps));
    remove_tree(config.run.dir);
  }
  EXPECT_GE(num_kills, reduced ? 10 : 20);
}

TEST(KilledRun, BeforeItsFirstCheckpointStartsAnew) {
  const TempDirectory root;
  const Config straight = config_of(root, "straight"), config = config_of(root, "killed");
  support::write_file(root / "straight.yaml", to_yaml(straight));
  support::write_file(root / "killed.yaml", to_yaml(config));
  ASSERT_EQ(run_palimpsest({"train", root / "straight.yaml"}).exit_code, 0);
  const int64_t in_first_save = operations_of_run(root, 1) - 20;
  for (const int64_t operation : {int64_t{1}, int64_t{4}, in_first_save}) {
    SCOPED_TRACE(operation);
    const ProgramResult killed = run_palimpsest({"train", root / "killed.yaml"},
                                                {{"PALIMPSEST_KILL_AT_FILE_OPERATION", std::to_string(operation)}});
    ASSERT_EQ(killed.exit_code, -SIGKILL) << killed.err;
    const ProgramResult again = run_palimpsest({"train", root / "killed.yaml"});
    ASSERT_EQ(again.exit_code, 0) << again.err;
    ASSERT_EQ(results_of(config), results_of(straight));
    remove_tree(config.run.dir);
  }
}

}  // namespace
}  // namespace palimpsest
