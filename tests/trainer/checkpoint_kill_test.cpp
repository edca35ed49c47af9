// A save that is killed, or fails, at any of its file operations: the newest complete checkpoint loads and is exact,
// and the next run cleans up and saves again.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/files.h"
#include "tests/trainer/checkpoint_fixture.h"

namespace palimpsest {
namespace {

using support::run_in_child;
using support::SmallFileSystem;
using support::TempDirectory;
using support::user_error_of;

// The save under test: step 20, one checkpoint kept, so that the one of step 10 is removed afterwards.
void save_20(const std::string& directory, bool background) {
  SmallModel model;
  model.fill(20);
  if (background) {
    BackgroundSetup setup(model, {directory, 1});
    setup.writer.save(header_of(20));
    setup.writer.finish();
  } else {
    CheckpointWriter writer({directory, 1}, model.blocks(), std::nullopt);
    writer.save(header_of(20));
    writer.finish();
  }
}

// Where a killed save leaves the folder, a new run must find a checkpoint, clean up, and save.
void expect_recovery(const std::string& directory, int64_t least_step) {
  const int64_t step = load_newest_exactly(directory);
  EXPECT_TRUE(step == least_step || step == 20) << step;
  save_20(directory, /*background=*/false);
  EXPECT_EQ(load_newest_exactly(directory), 20);
  EXPECT_EQ(names_in(directory), (std::vector<std::string>{"step-000020"}));
}

struct Scenario {
  const char* name;
  std::function<void(const std::string& directory)> prepare;
  int64_t least_step;  // what must be loadable at every moment
  bool background;
};

std::vector<Scenario> scenarios() {
  const auto save_10 = [](const std::string& directory) { save_step(directory, 10); };
  const auto with_old_20 = [](const std::string& directory) {
    save_step(directory, 10);
    save_step(directory, 20);
  };
  const auto with_leftovers = [](const std::string& directory) {
    save_step(directory, 10);
    save_step(directory, 20);
    rename_path(directory + "/step-000020", directory + "/step-000020.replaced");
    create_directories(directory + "/step-000020");
    create_directories(directory + "/step-000020.partial/x");
  };
  return {{"blocking", save_10, 10, false},
          {"background", save_10, 10, true},
          {"the first ever", [](const std::string&) {}, -1, false},
          {"over a checkpoint of the same step", with_old_20, 20, false},
          {"over leftovers of another kill", with_leftovers, 20, false}};
}

// A fresh folder in memory where mounting is allowed, since these tests flush some thousand times; else on the disk.
class FastDirectory {
 public:
  FastDirectory() : disk_(int64_t{16} << 20), path_(disk_ / "checkpoints") { create_directories(path_); }
  const std::string& path() const { return path_; }

 private:
  SmallFileSystem disk_;
  std::string path_;
};

int64_t num_operations_of(const Scenario& scenario) {
  const FastDirectory folder;
  scenario.prepare(folder.path());
  const int64_t before = num_file_operations();
  save_20(folder.path(), scenario.background);
  return num_file_operations() - before;
}

TEST(CheckpointKill, AnyFileOperationOfASave) {
  int64_t num_kills = 0;
  for (const Scenario& scenario : scenarios()) {
    const int64_t num_operations = num_operations_of(scenario);
    EXPECT_GE(num_operations, 20);
    for (int64_t operation = 1; operation <= num_operations; ++operation) {
      SCOPED_TRACE(std::string(scenario.name) + ", killed at operation " + std::to_string(operation) + " of " +
                   std::to_string(num_operations));
      const FastDirectory folder;
      scenario.prepare(folder.path());
      const int status = run_in_child([&] {
        inject_file_fault(FileFault::kKill, operation);
        save_20(folder.path(), scenario.background);
      });
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
      ++num_kills;
      expect_recovery(folder.path(), scenario.least_step);
      if (HasFailure()) return;
    }
  }
  std::printf("killed %lld saves\n", static_cast<long long>(num_kills));
}

// The environment variable reaches a program that is started afresh, library and all.
TEST(CheckpointKill, HookWorksThroughTheEnvironment) {
  if (const char* directory = std::getenv("PALIMPSEST_TEST_SAVE_INTO")) {
    save_20(directory, /*background=*/true);
    return;
  }
  for (const char* operation : {"3", "17", "1000000"}) {
    const TempDirectory folder;
    save_step(folder.path(), 10);
    const int status = run_in_child([&] {
      ::setenv("PALIMPSEST_TEST_SAVE_INTO", folder.path().c_str(), 1);
      ::setenv("PALIMPSEST_KILL_AT_FILE_OPERATION", operation, 1);
      ::execl("/proc/self/exe", "trainer_test", "--gtest_filter=CheckpointKill.HookWorksThroughTheEnvironment",
              "--gtest_brief=1", static_cast<char*>(nullptr));
    });
    if (std::string(operation) == "1000000")
      EXPECT_EQ(status, 0);
    else
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    expect_recovery(folder.path(), 10);
  }
}

// A failure is an error until the new checkpoint is complete, and a warning after that.
TEST(CheckpointFailure, AnyFileOperationOfASave) {
  int64_t num_errors = 0, num_warnings = 0;
  for (const Scenario& scenario : scenarios()) {
    const int64_t num_operations = num_operations_of(scenario);
    for (int64_t operation = 1; operation <= num_operations; ++operation) {
      SCOPED_TRACE(std::string(scenario.name) + ", failed at operation " + std::to_string(operation) + " of " +
                   std::to_string(num_operations));
      const FastDirectory folder;
      scenario.prepare(folder.path());
      SmallModel model;
      model.fill(20);
      Arena planning = Arena::planning("checkpoint", Device::kCpu);
      allocate_snapshot(model.blocks(), planning);
      Arena arena("checkpoint", Device::kCpu, planning.peak());
      bool started = false;
      std::string error;
      std::vector<std::string> warnings;
      inject_file_fault(FileFault::kFail, operation);
      try {
        auto snapshot = scenario.background ? std::optional(allocate_snapshot(model.blocks(), arena)) : std::nullopt;
        CheckpointWriter writer({folder.path(), 1}, model.blocks(), std::move(snapshot));
        started = true;
        warnings = writer.leftovers();
        writer.save(header_of(20));
        for (const FinishedSave& save : writer.finish())
          warnings.insert(warnings.end(), save.warnings.begin(), save.warnings.end());
      } catch (const UserError& failure) {
        error = failure.what();
      }
      inject_file_fault(FileFault::kNone);
      const auto is_about_the_fault = [](const std::string& line) {
        return line.find("No space left on device") != std::string::npos && line.find('\n') == std::string::npos;
      };
      if (error.empty()) {
        EXPECT_EQ(load_newest_exactly(folder.path()), 20);
        EXPECT_EQ(std::count_if(warnings.begin(), warnings.end(), is_about_the_fault), 1);
        ++num_warnings;
      } else {
        EXPECT_TRUE(is_about_the_fault(error)) << error;
        for (const std::string& name : names_in(folder.path()))
          EXPECT_FALSE(started && name.ends_with(".partial")) << name << " is left after: " << error;
        ++num_errors;
      }
      expect_recovery(folder.path(), scenario.least_step);
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(num_warnings, 0);
  std::printf("%lld failures were errors, %lld warnings\n", static_cast<long long>(num_errors),
              static_cast<long long>(num_warnings));
}

// ---- a disk that is really full, or read-only -----------------------------------------------------------------------

// Saves step 20 beside step 10 as a program would, to its normal exit; the status is what a shell would see.
int exit_code_of_save(const std::string& directory, bool background) {
  const int status = run_in_child([&] {
    int code = 0;
    try {
      save_20(directory, background);
    } catch (const UserError&) {
      code = 2;
    }
    std::exit(code);  // with the library's own clean-up at exit
  });
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class CheckpointDisk : public ::testing::TestWithParam<bool> {};

TEST_P(CheckpointDisk, FullIsReportedAndThePreviousCheckpointStays) {
  const SmallFileSystem disk(int64_t{1} << 20);
  if (!disk.mounted()) GTEST_SKIP() << "only root may mount a file system";
  const std::string folder = disk / "checkpoints";
  save_step(folder, 10);
  // Leaves less and less room: the disk is full while the tensors, the metadata or the manifest are written.
  const int64_t needed = (int64_t{1} << 20) - free_bytes(disk.path());
  int64_t num_full = 0;
  for (int64_t room = needed + 8192; room >= 0; room -= 4096) {
    const int64_t filler = free_bytes(disk.path()) - room;
    if (filler < 0) continue;
    support::write_file(disk / "filler", std::string(static_cast<size_t>(filler), 'x'));
    const int code = exit_code_of_save(folder, GetParam());
    if (code == 0) {
      remove_file(disk / "filler");
      remove_tree(folder);
      save_step(folder, 10);
      continue;
    }
    ++num_full;
    EXPECT_EQ(code, 2);
    EXPECT_EQ(names_in(folder), (std::vector<std::string>{"step-000010"})) << room;
    EXPECT_EQ(load_newest_exactly(folder), 10);
    const std::string message = user_error_of([&] { save_20(folder, GetParam()); });
    EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
    EXPECT_NE(message.find(folder), std::string::npos) << message;
    remove_file(disk / "filler");
  }
  EXPECT_GE(num_full, 5);
  EXPECT_EQ(exit_code_of_save(folder, GetParam()), 0);  // with room again, saving goes on
  EXPECT_EQ(load_newest_exactly(folder), 20);
}

TEST_P(CheckpointDisk, ReadOnlyIsReportedAndCheckpointsStillLoad) {
  const SmallFileSystem disk(int64_t{1} << 20);
  if (!disk.mounted()) GTEST_SKIP() << "only root may mount a file system";
  const std::string folder = disk / "checkpoints";
  save_step(folder, 10);
  { const FileDescriptor lock = lock_checkpoints(folder); }
  ASSERT_EQ(::mount("tmpfs", disk.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr), 0);
  const std::string message = user_error_of([&] { save_20(folder, GetParam()); });
  EXPECT_NE(message.find("Read-only file system"), std::string::npos) << message;
  EXPECT_NE(user_error_of([&] { check_room_for_checkpoints(folder, 1000, 1); }).find("Read-only file system"),
            std::string::npos);
  EXPECT_EQ(exit_code_of_save(folder, GetParam()), 2);
  EXPECT_EQ(load_newest_exactly(folder), 10);
}

INSTANTIATE_TEST_SUITE_P(Save, CheckpointDisk, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Background" : "Blocking"; });

}  // namespace
}  // namespace palimpsest
