// eval, score and generate under mpirun: the same answer in every layout.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/h5_file.h"
#include "tests/support/run_on_ranks.h"

namespace palimpsest {
namespace {

using support::on_ranks;
using support::ProgramResult;
using support::read_file;
using support::run_command_line;
using support::run_palimpsest;

struct Layout {
  int data, sequence, tensor, zero;
  int ranks() const { return data * sequence * tensor; }
  std::vector<std::string> overrides() const {
    return {"parallel.data=" + std::to_string(data), "parallel.sequence=" + std::to_string(sequence),
            "parallel.sequence_layout=zigzag", "parallel.tensor=" + std::to_string(tensor),
            "parallel.zero=" + std::to_string(zero)};
  }
};
// With 11 windows in rounds of up to 3 ranks x 2 rows, a rank has nothing to do in the last round.
const std::vector<Layout> kLayouts = {{3, 1, 1, 1}, {1, 1, 2, 1}, {2, 1, 2, 3}, {2, 2, 1, 1}};

class TrainedModel : public support::RunOnRanks {
 protected:
  void SetUp() override { ASSERT_EQ(run_palimpsest({"train", file_}).exit_code, 0); }

  static ProgramResult run_in(const Layout& layout, std::vector<std::string> arguments) {
    const std::vector<std::string> overrides = layout.overrides();
    arguments.insert(arguments.end(), overrides.begin(), overrides.end());
    return run_command_line(on_ranks(layout.ranks(), arguments));
  }
};

TEST_F(TrainedModel, IsEvaluatedAlikeInEveryLayout) {
  ASSERT_EQ(run_palimpsest({"eval", file_, "--json", root_ / "one.json"}).exit_code, 0);
  const auto one = nlohmann::json::parse(read_file(root_ / "one.json"));
  for (const Layout& layout : kLayouts) {
    const ProgramResult result = run_in(layout, {"eval", file_, "--json", root_ / "ranks.json"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(support::count(result.out, "perplexity"), 1u) << result.out;
    const auto ranks = nlohmann::json::parse(read_file(root_ / "ranks.json"));
    EXPECT_EQ(ranks.at("tokens"), one.at("tokens"));
    const double sum = one.at("loss_sum");
    EXPECT_NEAR(ranks.at("loss_sum"), sum, 1e-6 * sum);
  }
}

TEST_F(TrainedModel, ScoresEveryTokenAlikeInEveryLayout) {
  const auto score = [&](const std::string& out) {
    return std::vector<std::string>{"score", file_, "--tokens", root_ / "held_out", "--out", root_ / out};
  };
  ASSERT_EQ(run_palimpsest(score("one.h5")).exit_code, 0);
  const std::vector<double> expected = support::H5File(root_ / "one.h5").dataset("logprob").values;
  for (const Layout& layout : kLayouts) {
    const ProgramResult result = run_in(layout, score("ranks.h5"));
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const std::vector<double> got = support::H5File(root_ / "ranks.h5").dataset("logprob").values;
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(std::isnan(got[i]), std::isnan(expected[i])) << "token " << i;
      if (std::isnan(expected[i])) continue;
      EXPECT_NEAR(got[i], expected[i], 1e-5) << "token " << i;
    }
  }
}

// Of fewer tokens than the ranks of a row have ranges.
// One rank alone writes the text, and cannot, while the other waits for it in the next layer.
TEST_F(TrainedModel, ARankThatCannotWriteItsTextEndsTheJobWithTheCause) {
  write_config_of_bytes();
  ASSERT_EQ(run_palimpsest({"train", file_, "train.steps=1"}).exit_code, 0);
  const ProgramResult result = run_command_line(ranks_without_output());
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("error: rank 0 on "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("standard output cannot be written"), std::string::npos) << result.err;
}

TEST_F(TrainedModel, IsEvaluatedOnASetOfFewTokens) {
  support::write_learnable_shards(root_ / "few", 5, 1);
  const auto loss_of = [&](const ProgramResult& result) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(read_file(root_ / "few.json")).at("loss_sum").get<double>();
  };
  const std::vector<std::string> eval = {"eval", file_, "data.eval=" + (root_ / "few"), "--json", root_ / "few.json"};
  const double sum = loss_of(run_palimpsest(eval));
  EXPECT_NEAR(loss_of(run_in({1, 4, 1, 1}, eval)), sum, 1e-6 * sum);
}

TEST_F(TrainedModel, WritesTheSameTextInEveryLayout) {
  write_config_of_bytes();
  ASSERT_EQ(run_palimpsest({"train", file_, "train.steps=1"}).exit_code, 0);
  const std::vector<std::string> arguments = {"generate", file_, "--prompt", "abc", "--max-tokens", "12"};
  const ProgramResult one = run_palimpsest(arguments);
  ASSERT_EQ(one.exit_code, 0) << one.err;
  for (const Layout& layout : kLayouts) {
    const ProgramResult result = run_in(layout, arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, one.out);
  }
  support::write_file(root_ / "prompt", "abc");
  EXPECT_EQ(run_in(kLayouts[0], {"generate", file_, "--prompt-file", root_ / "prompt", "--max-tokens", "12"}).out,
            one.out);
  const ProgramResult input = run_in(kLayouts[0], {"generate", file_, "--prompt-file", "-"});
  EXPECT_EQ(input.exit_code, 2);
  EXPECT_NE(input.err.find("several ranks have no standard input"), std::string::npos) << input.err;
}

}  // namespace
}  // namespace palimpsest
