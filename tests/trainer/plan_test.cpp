#include "trainer/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parallel/planned_mesh.h"
#include "tests/support/files.h"
#include "tests/support/tiny_run.h"

namespace palimpsest {
namespace {

// Two heads, so that tensor may be 1 or 2.
Config two_heads() {
  Config config = support::tiny_config(Precision::kF32, {"kda", "kda", "kda"});
  config.model.vocab_size = 300;
  config.data.sequence_length = 32;
  config.train.sequences_per_step = 24;
  config.train.micro_batch = 2;
  return config;
}

Plan plan_of(const Config& config, const PlanRequest& request) {
  Console silent(stderr, {.style = ConsoleOptions::Style::kSilent});
  return plan_layouts(config, request, silent);
}

const PlannedLayout* find(const Plan& plan, int64_t data, int64_t sequence, int64_t tensor, int64_t zero) {
  for (const PlannedLayout& layout : plan.layouts)
    if (layout.mesh.data == data && layout.mesh.sequence == sequence && layout.mesh.tensor == tensor &&
        layout.zero == zero)
      return &layout;
  return nullptr;
}

TEST(Plan, ListsWhatCanRunBestFirstAndSaysWhyOthersCannot) {
  const Plan plan = plan_of(two_heads(), {.ranks = 8});
  for (const int64_t zero : {1, 2, 3}) {
    EXPECT_NE(find(plan, 8, 1, 1, zero), nullptr);
    EXPECT_NE(find(plan, 4, 1, 2, zero), nullptr);
    EXPECT_NE(find(plan, 2, 2, 2, zero), nullptr);
  }
  EXPECT_EQ(find(plan, 2, 1, 4, 1), nullptr);
  EXPECT_TRUE(std::is_sorted(plan.layouts.begin(), plan.layouts.end(),
                             [](const auto& a, const auto& b) { return a.cost < b.cost; }));
  const auto why = std::find_if(plan.refused.begin(), plan.refused.end(),
                                [](const std::string& line) { return line.starts_with("2 x 1 x 4, "); });
  ASSERT_NE(why, plan.refused.end());
  EXPECT_NE(why->find("parallel.tensor is 4, must divide model.kda.num"), std::string::npos) << *why;
  EXPECT_NE(to_text(plan, 3).find("sends in a step, in MiB;"), std::string::npos);  // a small model
  EXPECT_NE(to_text(plan, 3).find("and " + std::to_string(plan.layouts.size() - 3) + " more"), std::string::npos);
}

TEST(Plan, RowsMustDivideAmongDataRanks) {
  const Plan plan = plan_of(two_heads(), {.ranks = 16});
  EXPECT_EQ(find(plan, 16, 1, 1, 1), nullptr);  // 24 rows
  EXPECT_NE(find(plan, 8, 1, 2, 1), nullptr);
  Config config = two_heads();
  EXPECT_THROW(plan_of(config, {.ranks = 16, .layout = MeshShape{.data = 16}}), UserError);
  EXPECT_THROW(plan_of(config, {.ranks = 8, .layout = MeshShape{.data = 3, .tensor = 2}}), UserError);
}

TEST(Plan, NamesTheFirstOfManyLayoutsThatCannotRun) {
  const std::string message = support::user_error_of([] { plan_of(two_heads(), {.ranks = 1 << 18}); });
  EXPECT_NE(message.find(" more: "), std::string::npos) << message;
  EXPECT_LT(message.size(), 300U) << message;
}

TEST(Plan, LeavesOutWhatNeedsTooMuchMemory) {
  const Plan all = plan_of(two_heads(), {.ranks = 8});
  const int64_t limit = all.layouts[0].regions.total() - 1;
  const Plan some = plan_of(two_heads(), {.ranks = 8, .max_bytes = limit});
  EXPECT_GT(some.too_large, 0);
  EXPECT_EQ(static_cast<int64_t>(some.layouts.size()) + some.too_large, static_cast<int64_t>(all.layouts.size()));
  for (const PlannedLayout& layout : some.layouts) EXPECT_LE(layout.regions.total(), limit);
  const Plan none = plan_of(two_heads(), {.ranks = 8, .max_bytes = 1});
  EXPECT_TRUE(none.layouts.empty());
  EXPECT_EQ(none.least_bytes,
            std::min_element(all.layouts.begin(), all.layouts.end(), [](const auto& a, const auto& b) {
              return a.regions.total() < b.regions.total();
            })->regions.total());
}

// What the levels of zero send over 8 data ranks, from the sizes of the shards alone.
TEST(Plan, BytesOverDataRanksAreThoseOfARing) {
  const Config config = two_heads();
  const Plan plan = plan_of(config, {.ranks = 8, .layout = MeshShape{.data = 8}});
  ParameterRegistry registry({}, {.rank = 0, .size = 8});
  const LanguageModel model(config.model, registry);
  const auto bytes_of = [](const ParameterGroup& group) {
    int64_t bytes = 0;
    for (const ParameterStack* stack : group.stacks) {
      int64_t row = 1;
      const Shape& shape = stack->parameters[0]->block.shape;
      for (int i = 1; i < shape.num_dims(); ++i) row *= shape[i];
      bytes += 4 * row * stack->each;
    }
    return bytes;
  };
  int64_t shard = 0;
  for (const ParameterGroup& group : registry.groups()) shard += bytes_of(group);
  constexpr int64_t kMicroBatches = 2;  // 24 rows / 8 ranks, at most 2 at once
  EXPECT_EQ(find(plan, 8, 1, 1, 1)->sent.replica, 7 * shard + 7 * shard);
  EXPECT_EQ(find(plan, 8, 1, 1, 2)->sent.replica, 7 * kMicroBatches * shard + 7 * shard);
  // Two of the three blocks are whole at a time. The first micro-batch gathers everything forward and the first block
  // again backward; the second finds the first two blocks and gathers the rest, then the first block again.
  const int64_t first_block = bytes_of(registry.groups()[1]), second_block = bytes_of(registry.groups()[2]);
  const int64_t gathered = (shard + first_block) + (shard - first_block - second_block + first_block);
  EXPECT_EQ(find(plan, 8, 1, 1, 3)->sent.replica, 7 * kMicroBatches * shard + 7 * gathered);
  EXPECT_EQ(find(plan, 8, 1, 1, 1)->sent.tensor, 0);
  // Two losses and the norm.
  EXPECT_EQ(find(plan, 8, 1, 1, 1)->sent.world, 3 * (2 * 8 * 7 / 8));
}

TEST(Plan, ReportsAsJson) {
  const Plan plan = plan_of(two_heads(), {.ranks = 4, .ranks_per_host = 2});
  const nlohmann::json json = nlohmann::json::parse(to_json(plan));
  EXPECT_EQ(json["ranks"], 4);
  EXPECT_EQ(json["ranks_per_host"], 2);
  ASSERT_EQ(json["layouts"].size(), plan.layouts.size());
  for (size_t i = 0; i < plan.layouts.size(); ++i) {
    EXPECT_EQ(json["layouts"][i]["data"], plan.layouts[i].mesh.data);
    EXPECT_EQ(json["layouts"][i]["memory_bytes"]["total"], plan.layouts[i].regions.total());
    EXPECT_EQ(json["layouts"][i]["sent_bytes"]["replica"], plan.layouts[i].sent.replica);
  }
}

TEST(PlannedMesh, CannotSend) {
  const auto mesh = planned_mesh({.data = 3, .tensor = 2}, 3);
  EXPECT_EQ(mesh->data().rank(), 1);
  EXPECT_EQ(mesh->tensor().rank(), 1);
  EXPECT_EQ(mesh->replica().rank(), 1);
  Arena scratch("scratch", Device::kCpu, 1024);
  Stream stream(Device::kCpu, scratch);
  EXPECT_THROW(mesh->data().all_reduce(stream, scratch.allocate(DType::kF32, {3}), ReduceOp::kSum), Error);
}

}  // namespace
}  // namespace palimpsest
