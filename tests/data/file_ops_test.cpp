#include "data/file_ops.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstring>

#include "tests/support/files.h"

namespace palimpsest {
namespace {

using support::read_file;
using support::run_in_child;
using support::SmallFileSystem;
using support::TempDirectory;
using support::user_error_of;
using support::write_file;

bool was_killed(int status) {
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

TEST(FileOps, MakesListsRenamesAndRemoves) {
  const TempDirectory folder;
  create_directories(folder / "a/b/c");
  create_directories(folder / "a/b/c");
  EXPECT_TRUE(is_directory(folder / "a/b/c"));
  write_file_atomically(folder / "a/two", "22");
  write_file_atomically(folder / "a/one", "1");
  EXPECT_EQ(list_directory(folder / "a"), (std::vector<std::string>{"b", "one", "two"}));
  rename_path(folder / "a/two", folder / "a/three");
  EXPECT_EQ(read_whole_file(folder / "a/three"), "22");
  EXPECT_EQ(file_size(folder / "a/three"), 2);
  remove_tree(folder / "a");
  EXPECT_FALSE(path_exists(folder / "a"));
  EXPECT_TRUE(try_remove(folder / "a"));
}

TEST(FileOps, RemovingATreeKeepsWhatALinkPointsAt) {
  const TempDirectory folder;
  create_directories(folder / "kept");
  create_directories(folder / "gone");
  write_file(folder / "kept/file", "x");
  ASSERT_EQ(::symlink((folder / "kept").c_str(), (folder / "gone/link").c_str()), 0);
  remove_tree(folder / "gone");
  EXPECT_TRUE(path_exists(folder / "kept/file"));
}

TEST(FileOps, ADelaySlowsEveryOperation) {
  const TempDirectory folder;
  const auto start = std::chrono::steady_clock::now();
  inject_file_delay(20);
  write_file_atomically(folder / "file", "x");  // create, write, flush, rename, flush the folder
  inject_file_delay(0);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(5 * 20));
}

TEST(FileOps, ErrorsNamePathAndCause) {
  const TempDirectory folder;
  EXPECT_EQ(user_error_of([&] { read_whole_file(folder / "none"); }),
            "cannot open " + (folder / "none") + ": No such file or directory");
  EXPECT_EQ(user_error_of([&] { read_whole_file(folder.path()); }),
            "cannot read " + folder.path() + ": Is a directory");
  write_file(folder / "file", "12345");
  EXPECT_NE(user_error_of([&] { read_whole_file(folder / "file", 4); }).find("larger than the 4 bytes"),
            std::string::npos);
  EXPECT_NE(user_error_of([&] { create_directories(folder / "file/below"); }).find("Not a directory"),
            std::string::npos);
  EXPECT_NE(user_error_of([&] { MappedFile mapped(folder / "none"); }).find("No such file"), std::string::npos);
}

TEST(FileOps, MapsAFileAndAnEmptyFile) {
  const TempDirectory folder;
  write_file(folder / "file", "palimpsest");
  write_file(folder / "empty", "");
  MappedFile mapped(folder / "file");
  const MappedFile moved = std::move(mapped);
  ASSERT_EQ(moved.bytes().size(), 10u);
  EXPECT_EQ(std::memcmp(moved.bytes().data(), "palimpsest", 10), 0);
  EXPECT_TRUE(MappedFile(folder / "empty").bytes().empty());
}

TEST(FileOps, AppendsAndReplaces) {
  const TempDirectory folder;
  for (const char* text : {"a", "bc"}) {
    OutputFile file(folder / "log", OutputFile::Mode::kAppend);
    file.write(std::string_view(text));
    file.close();
  }
  EXPECT_EQ(read_file(folder / "log"), "abc");
  OutputFile file(folder / "log", OutputFile::Mode::kReplace);
  file.close();
  EXPECT_EQ(read_file(folder / "log"), "");
}

TEST(FileOps, AtomicWriteSurvivesAKillAtEveryOperation) {
  const TempDirectory folder;
  const std::string path = folder / "state";
  int kills = 0;
  for (int operation = 1;; ++operation) {
    write_file(path, "old");
    const int status = run_in_child([&] {
      inject_file_fault(FileFault::kKill, operation);
      write_file_atomically(path, "new");
    });
    const std::string content = read_file(path);
    if (!was_killed(status)) {
      EXPECT_EQ(content, "new");
      break;
    }
    ++kills;
    EXPECT_TRUE(content == "old" || content == "new") << content;
  }
  EXPECT_EQ(kills, 5);  // create, write, flush, rename, flush the folder
}

TEST(FileOps, AtomicWriteThatFailsLeavesTheOldContentAlone) {
  const TempDirectory folder;
  write_file(folder / "state", "old");
  for (int operation = 1; operation <= 4; ++operation) {
    inject_file_fault(FileFault::kFail, operation);
    EXPECT_NE(user_error_of([&] { write_file_atomically(folder / "state", "new"); }).find("No space left on device"),
              std::string::npos);
    EXPECT_EQ(read_file(folder / "state"), "old");
    EXPECT_EQ(list_directory(folder.path()), std::vector<std::string>{"state"});
  }
  inject_file_fault(FileFault::kNone);
}

TEST(FileOps, EnvironmentVariablesStrikeTheNamedOperation) {
  const TempDirectory folder;
  // A program of its own, since the variables are read once in a process.
  const auto run = [&](const char* variable, const char* value) {
    return run_in_child([&] {
      ::setenv(variable, value, 1);
      const std::string filter = "--gtest_filter=FileOpsChild.DISABLED_WritesThreeFiles";
      ::setenv("PALIMPSEST_TEST_FOLDER", folder.path().c_str(), 1);
      ::execl("/proc/self/exe", "data_test", filter.c_str(), "--gtest_also_run_disabled_tests", "--gtest_brief=1",
              nullptr);
    });
  };
  EXPECT_EQ(run("PALIMPSEST_TEST_UNUSED", "1"), 0);
  EXPECT_EQ(list_directory(folder.path()).size(), 3u);
  remove_tree(folder.path());
  create_directories(folder.path());
  EXPECT_TRUE(was_killed(run("PALIMPSEST_KILL_AT_FILE_OPERATION", "4")));  // create, write, create, write
  EXPECT_EQ(read_file(folder / "0"), "x");
  EXPECT_EQ(read_file(folder / "1"), "");
  EXPECT_FALSE(path_exists(folder / "2"));
  EXPECT_NE(run("PALIMPSEST_FAIL_AT_FILE_OPERATION", "2"), 0);
  EXPECT_EQ(read_file(folder / "0"), "");
}

// What the case above runs, in a process of its own.
TEST(FileOpsChild, DISABLED_WritesThreeFiles) {
  const char* folder = std::getenv("PALIMPSEST_TEST_FOLDER");
  ASSERT_NE(folder, nullptr);
  for (const char* name : {"0", "1", "2"}) {
    OutputFile file(std::string(folder) + "/" + name, OutputFile::Mode::kReplace);
    file.write(std::string_view("x"));
  }
}

TEST(FileOps, FullDiskIsReportedWithItsCause) {
  const SmallFileSystem disk(64 << 10);
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
  const std::string content(128 << 10, 'x');
  EXPECT_EQ(user_error_of([&] { write_file_atomically(disk / "big", content); }),
            "cannot write " + (disk / "big.tmp") + ": No space left on device");
  EXPECT_TRUE(list_directory(disk.path()).empty());
  EXPECT_LE(free_bytes(disk / "not/there/yet"), 64 << 10);
  const std::string message = user_error_of([&] { check_writable(disk / "run", 1 << 20); });
  EXPECT_NE(message.find("1048576 bytes are needed but"), std::string::npos) << message;
  check_writable(disk / "run", 1 << 10);
  EXPECT_TRUE(list_directory(disk / "run").empty());
}

TEST(FileOps, ReadOnlyFileSystemIsReported) {
  const SmallFileSystem disk(64 << 10, true);
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
  EXPECT_NE(user_error_of([&] { check_writable(disk.path(), 1); }).find("Read-only file system"), std::string::npos);
  EXPECT_NE(user_error_of([&] { create_directories(disk / "run"); }).find("Read-only file system"), std::string::npos);
}

}  // namespace
}  // namespace palimpsest
