// Whole runs killed at file operations of a save: the next start goes on, and everything it computes equals the run
// that nobody killed.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

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

// A machine that stops keeps what was flushed alone: of a file its bytes, of a folder the names in it.
TEST(Save, IsOnTheDiskBeforeItCounts) {
  const TempDirectory root;
  const Config config = config_of(root, "run");
  support::write_file(root / "run.yaml", to_yaml(config));
  const ProgramResult run = run_palimpsest({"train", root / "run.yaml"}, {{"PALIMPSEST_PRINT_FILE_OPERATIONS", "1"}});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::set<std::string> unflushed;
  const auto expect_flushed = [&](const std::string& path, const std::string& before) {
    for (const std::string& other : unflushed)
      EXPECT_FALSE(other == path || other.starts_with(path + "/")) << other << " is not flushed before " << before;
  };
  int num_manifests = 0;
  std::istringstream lines(run.err);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("file operation ")) continue;
    const size_t begin = line.find(": ") + 2, path_begin = line.find(" /", begin);
    ASSERT_NE(path_begin, std::string::npos) << line;
    const std::string action = line.substr(begin, path_begin - begin), path = line.substr(path_begin + 1);
    const std::string folder = std::filesystem::path(path).parent_path();
    if (action == "flush") unflushed.erase(path);
    if (action == "create" || action == "write") unflushed.insert(path);
    if (action == "create" || action == "create the folder") unflushed.insert(folder);
    if (action != "rename") continue;
    expect_flushed(path, line);
    unflushed.insert(folder);
    if (!path.ends_with("manifest.json.tmp")) continue;
    ++num_manifests;
    EXPECT_EQ(unflushed.count(checkpoint_path(config)), 0) << line;  // it holds the folder's name
  }
  EXPECT_EQ(num_manifests, kSteps);
  expect_flushed(checkpoint_path(config) + "/" + checkpoint_name(kSteps), "the end");
}

}  // namespace
}  // namespace palimpsest
