// What tests of the program share: the check of a user error, and a folder with shards and the config of a short run.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "data/file_ops.h"
#include "tests/support/files.h"
#include "tests/support/program.h"
#include "tests/support/training.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run_setup.h"

namespace palimpsest::support {

// Exit code 2 and one line on standard error that holds every part.
inline void expect_user_error(const std::vector<std::string>& arguments, const std::vector<std::string>& parts,
                              const Environment& environment = {}) {
  const ProgramResult result = run_palimpsest(arguments, environment);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_TRUE(is_one_line(result.err)) << result.err;
  EXPECT_TRUE(result.err.starts_with("error: ")) << result.err;
  for (const std::string& part : parts)
    EXPECT_NE(result.err.find(part), std::string::npos) << part << "\n" << result.err;
}

// A folder with shards and the config of a short run.
class RunFolder : public testing::Test {
 protected:
  RunFolder() : config_(tiny_run_config(root_, "run")), file_(root_ / "config.yaml") {
    write_file(file_, to_yaml(config_));
  }

  // Training ends with a user error, and nothing was written.
  void expect_no_run(const std::vector<std::string>& parts, std::vector<std::string> overrides = {}) {
    std::vector<std::string> arguments = {"train", file_};
    arguments.insert(arguments.end(), overrides.begin(), overrides.end());
    expect_user_error(arguments, parts);
    EXPECT_FALSE(path_exists(config_.run.dir));
  }
  void train() { ASSERT_EQ(run_palimpsest({"train", file_}).exit_code, 0); }
  std::string shard() const { return root_ / "shards/tokens-00000.h5"; }
  std::string newest_rank_file() const {
    return list_checkpoints(checkpoint_path(config_)).back().path + "/rank-00000-of-00001.h5";
  }

  TempDirectory root_;
  Config config_;
  std::string file_;
};

}  // namespace palimpsest::support
