// Whole runs under launch/mpirun.sh, and what tests look at in them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/files.h"
#include "tests/support/program.h"
#include "tests/support/training.h"

namespace palimpsest::support {

// A tiny config in a file, with data: 4 query heads and 2 key heads or the like in every mixer, so that two tensor
// ranks can share them; 6 steps of 8 rows.
class RunOnRanks : public testing::Test {
 protected:
  RunOnRanks();
  void write_config();
  // The words of a job of two ranks with arguments of their own.
  static std::vector<std::string> mixed_ranks(const std::vector<std::string>& first,
                                              const std::vector<std::string>& second);
  // The words of a training job of two ranks, each with its own copy of the data: more shards than stay open, so that
  // files are opened all the time.
  std::vector<std::string> ranks_that_open_files() const;
  // A model of bytes, which can write text; and the words of a job of two ranks that does so, of which the first
  // cannot.
  void write_config_of_bytes();
  std::vector<std::string> ranks_without_output() const;
  std::string shards_of_rank_1() const { return root_ / "there/shards"; }

  TempDirectory root_;
  Config config_;
  std::string file_;
};

// The number that follows the first `label` in a line of its own; -1 when there is none.
int64_t number_behind(const std::string& text, const std::string& label);
// Gives the two ranks of mixed_ranks each a folder to run in.
void run_in_folders(std::vector<std::string>& words, const std::string& first, const std::string& second);
// The process that is this rank of the world among the descendants of `launcher`.
int pid_of_rank(int launcher, int rank);
// Processes among the descendants of `launcher`, itself included, that still run.
std::vector<int> descendants(int launcher);

}  // namespace palimpsest::support
