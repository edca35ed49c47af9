// A bad number on one rank of a run: all ranks skip the step and know where it arose.
#include "trainer/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "parallel/agreement.h"
#include "tests/mpi/world.h"
#include "tests/support/training.h"

namespace palimpsest {
namespace {

constexpr const char* kWeight = "model.layers.1.mlp.up_proj.weight";

std::vector<float> values_of(const Tensor& tensor) {
  return {tensor.data<float>(), tensor.data<float>() + tensor.numel()};
}

// Whether the ranks of the group hold the same bits.
bool are_equal(Communicator& group, const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return max_over(group, bytes == broadcast_text(group, bytes) ? 0 : 1) == 0;
}

// A tiny run in rank 0's folder, the same on all ranks.
template <class Change>
Config config_of_rank_0(Communicator& world, const support::TempDirectory& root, Change&& change) {
  std::string text;
  if (world.rank() == 0) {
    Config config = support::tiny_run_config(root, "run");
    change(config);
    text = to_yaml(config);
  }
  return parse_config(broadcast_text(world, text), "config");
}

TEST(TrainerOnRanks, ABadNumberOnOneRankSkipsTheStepOnAllAndIsNamed) {
  if (mpi_test::world().world_size() < 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = mpi_test::world().make_mesh({.data = 4}, mpi_test::world_watchdog());
  if (!mesh) return;  // this rank is not in the mesh
  Communicator& world = mesh->world();
  const bool is_bad_rank = world.rank() == 3;

  const support::TempDirectory root;  // rank 0's is used
  const Config config = config_of_rank_0(world, root, [](Config& on_rank_0) {
    on_rank_0.train.steps = 8;
    on_rank_0.train.eval_every = 0;
  });
  RunSetup setup(config, *mesh);
  support::RecordedConsole console;
  Trainer trainer(setup, "test", console);
  const Parameter& parameter = *setup.bench().registry().find(kWeight);
  std::vector<float> before;
  std::vector<int64_t> skipped;
  trainer.on_step([&](const StepMetrics& metrics) {
    skipped.push_back(metrics.skipped_steps);
    const Tensor& weight = parameter.value;
    // Before steps 3 and 6; put back after them.
    if (metrics.step == 2 || metrics.step == 5) {
      before = values_of(weight);
      const float bad = metrics.step == 2 ? std::numeric_limits<float>::quiet_NaN() : 3e38f;
      if (is_bad_rank) std::fill_n(weight.data<float>(), weight.dim(1), bad);
    }
    if (metrics.step == 3 || metrics.step == 6) {
      const int64_t first = is_bad_rank ? weight.dim(1) : 0;
      for (int64_t i = first; i < weight.numel(); ++i)
        ASSERT_EQ(weight.data<float>()[i], before[static_cast<size_t>(i)]) << "a skipped step changed weight " << i;
      std::copy(before.begin(), before.end(), weight.data<float>());
    }
  });
  trainer.run();
  EXPECT_EQ(skipped, (std::vector<int64_t>{0, 0, 1, 1, 1, 2, 2, 2}));
  EXPECT_EQ(trainer.state().applied_steps, 6);
  EXPECT_TRUE(are_equal(world, values_of(parameter.value)));
  const std::string log = console.text();
  EXPECT_NE(log.find("step 3 skipped"), std::string::npos) << log;
  EXPECT_NE(log.find(std::string("went bad: weight ") + kWeight + " on rank 3"), std::string::npos) << log;
  EXPECT_NE(log.find("step 6 skipped"), std::string::npos) << log;
  max_over(world, 0);  // the folder stays until all have ended
  EXPECT_NE(log.find("went bad: output of the feed-forward of model.layers.1 on rank 3"), std::string::npos) << log;
}

TEST(TrainerOnRanks, TooManyBadStepsStopAllRanks) {
  if (mpi_test::world().world_size() < 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = mpi_test::world().make_mesh({.data = 2, .tensor = 2}, mpi_test::world_watchdog());
  if (!mesh) return;
  Communicator& world = mesh->world();
  const support::TempDirectory root;
  const Config config = config_of_rank_0(world, root, [](Config& on_rank_0) {
    on_rank_0.model.mla.num_heads = 2;
    on_rank_0.train.max_skipped_steps = 2;
  });
  RunSetup setup(config, *mesh);
  support::RecordedConsole console;
  Trainer trainer(setup, "test", console);
  trainer.on_step([&](const StepMetrics& metrics) {
    if (metrics.step == 2 && world.rank() == 1)
      setup.bench().registry().find(kWeight)->value.data<float>()[0] = std::numeric_limits<float>::infinity();
  });
  std::string stop;
  try {
    trainer.run();
  } catch (const NonFiniteStop& error) {
    stop = error.what();
  }
  EXPECT_EQ(stop, std::string("step 5: 3 steps in a row were not finite; the first tensor that went bad: weight ") +
                      kWeight + " on rank 1");
  max_over(world, 0);  // the folder stays until all have ended
}

}  // namespace
}  // namespace palimpsest
