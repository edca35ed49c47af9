// Four ranks, one of them killed at a file operation of a save: the next start goes on from the newest complete
// checkpoint, and everything it computes equals the run that nobody killed. tests/kill_marathon.sh does it at random.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "data/file_ops.h"
#include "tests/support/run_on_ranks.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run_setup.h"

namespace palimpsest {
namespace {

using support::on_ranks;
using support::ProgramResult;
using support::results_of;
using support::run_command_line;

constexpr int kRanks = 4;

class KilledRank : public support::RunOnRanks {
 protected:
  KilledRank() {
    config_.model.num_layers = 1;
    config_.train.steps = 3;
    config_.checkpoint.every = 1;
    config_.checkpoint.keep_last = 1;
    config_.parallel.tensor = 2;
    config_.parallel.zero = 3;
    write_config();
  }

  // A run into this folder, with an environment variable for one of the ranks alone.
  std::vector<std::string> job(const std::string& folder, int rank, const std::string& variable) const {
    std::vector<std::string> words = {on_ranks(1, {})[0], "--oversubscribe"};
    const auto add = [&](int num_ranks, const std::vector<std::string>& options) {
      if (num_ranks == 0) return;
      if (words.size() > 2) words.emplace_back(":");
      words.insert(words.end(), {"-n", std::to_string(num_ranks)});
      words.insert(words.end(), options.begin(), options.end());
      words.insert(words.end(), {PALIMPSEST_BINARY, "train", file_, "run.dir=" + folder});
    };
    add(rank, {});
    add(1, {"-x", variable});
    add(kRanks - 1 - rank, {});
    return words;
  }

  // The operations of the second save on this rank: one of each kind, by number. Writes: the one in the middle.
  std::map<int64_t, std::string> operations_of_save(int rank) {
    const ProgramResult run = run_command_line(job(root_ / "printed", rank, "PALIMPSEST_PRINT_FILE_OPERATIONS=1"));
    EXPECT_EQ(run.exit_code, 0) << run.err;
    remove_tree(root_ / "printed");
    std::map<std::string, std::vector<int64_t>> by_kind;
    std::istringstream lines(run.err);
    for (std::string line; std::getline(lines, line);) {
      constexpr std::string_view kBegin = "file operation ";
      if (!line.starts_with(kBegin)) continue;
      const size_t colon = line.find(':');
      const std::string kind = line.substr(colon + 2, line.find(" /") - colon - 2) + line.substr(line.rfind('/'));
      // The second save removes the checkpoint of the first one, beside its own records.
      const bool is_of_first = kind.starts_with("remove") && !kind.ends_with(".done");
      const char* checkpoint = is_of_first ? "step-000001" : "step-000002";
      if (line.find(checkpoint) != std::string::npos) by_kind[kind].push_back(std::stoll(line.substr(kBegin.size())));
    }
    std::map<int64_t, std::string> chosen;
    for (const auto& [kind, numbers] : by_kind) chosen[numbers[numbers.size() / 2]] = kind;
    return chosen;
  }

  // Kills the rank at each of these operations.
  void kill_at(int rank, const std::map<int64_t, std::string>& operations,
               const std::vector<nlohmann::json>& expected) {
    Config config = config_;
    config.run.dir = root_ / "killed";
    for (const auto& [number, kind] : operations) {
      SCOPED_TRACE("rank " + std::to_string(rank) + " killed at operation " + std::to_string(number) + ": " + kind);
      const ProgramResult killed =
          run_command_line(job(config.run.dir, rank, "PALIMPSEST_KILL_AT_FILE_OPERATION=" + std::to_string(number)));
      ASSERT_NE(killed.exit_code, 0);
      std::string newest;
      for (const CheckpointEntry& entry : list_checkpoints(checkpoint_path(config)))
        if (entry.has_manifest) newest = entry.path;
      ASSERT_FALSE(newest.empty());
      const ProgramResult again = run_command_line(on_ranks(kRanks, {"train", file_, "run.dir=" + config.run.dir}));
      ASSERT_EQ(again.exit_code, 0) << again.err;
      EXPECT_NE(again.out.find("resumed from " + newest), std::string::npos) << again.out;
      EXPECT_EQ(results_of(config), expected);
      remove_tree(config.run.dir);
    }
  }
};

TEST_F(KilledRank, GoesOnAsIfNothingHadHappened) {
  ASSERT_EQ(run_command_line(on_ranks(kRanks, {"train", file_})).exit_code, 0);
  const auto expected = results_of(config_);
  ASSERT_EQ(expected.size(), 3U);
  // On rank 0 a file of its own, the folder, the manifest: every fourth kind here, all of them in the marathon.
  std::map<int64_t, std::string> first = operations_of_save(0), other = operations_of_save(2);
  EXPECT_GE(first.size(), 8U);
  EXPECT_GE(other.size(), 3U);
  size_t index = 0;
  std::erase_if(first, [&](const auto&) { return index++ % 4 != 1; });
  std::erase_if(other, [](const auto& operation) { return !operation.second.starts_with("write"); });
  kill_at(0, first, expected);
  kill_at(2, other, expected);
}

}  // namespace
}  // namespace palimpsest
