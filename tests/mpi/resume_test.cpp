// A run that goes on in another layout after every step: AdamW in f64, through checkpoints, against one rank that runs
// straight on. CTest takes a way that enters and leaves each layout once; PALIMPSEST_ALL_PAIRS=1 (all_pairs.sh) one
// that goes from every layout to every other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tests/mpi/mesh_run.h"
#include "tests/mpi/shared_directory.h"
#include "tests/mpi/world.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/checkpoint_writer.h"

namespace palimpsest {
namespace {

using mpi_test::MeshRun;
using mpi_test::SharedBatch;
using mpi_test::SharedDirectory;

constexpr auto kAll = CheckpointContent::kWeightsAndOptimizer;
constexpr int64_t kMaxTokens = SharedBatch::kMaxTokens;

struct Layout {
  MeshShape shape;
  int64_t zero = 1;
};

std::vector<Layout> layouts() {
  constexpr auto kZigzag = SequenceLayout::kZigzag;
  return {{{1, 1, 1}, 1},          {{2, 1, 1}, 2}, {{1, 2, 1}, 1}, {{1, 3, 1, kZigzag}, 3},
          {{4, 1, 1}, 1},          {{2, 2, 1}, 3}, {{1, 1, 4}, 1}, {{3, 1, 2}, 2},
          {{1, 2, 2, kZigzag}, 2}, {{8, 1, 1}, 3}, {{2, 2, 2}, 2}, {{2, 1, 4}, 1}};
}

// Indices of layouts such that each follows each other one exactly once: the edges of a complete graph in one round.
std::vector<size_t> every_pair(size_t count) {
  std::vector<std::vector<size_t>> next(count);  // where to go from each, not yet taken
  for (size_t from = 0; from < count; ++from)
    for (size_t to = 0; to < count; ++to)
      if (to != from) next[from].push_back(to);
  std::vector<size_t> stack = {0}, round;
  while (!stack.empty()) {
    std::vector<size_t>& open = next[stack.back()];
    if (open.empty()) {
      round.push_back(stack.back());
      stack.pop_back();
    } else {
      stack.push_back(open.back());
      open.pop_back();
    }
  }
  std::reverse(round.begin(), round.end());
  return round;
}

TEST(Resume, RoundOfAllPairsTakesEachOnce) {
  const std::vector<size_t> round = every_pair(12);
  ASSERT_EQ(round.size(), 133U);
  std::vector<int> taken(144);
  for (size_t i = 1; i < round.size(); ++i) ++taken[round[i - 1] * 12 + round[i]];
  for (size_t i = 0; i < 144; ++i) EXPECT_EQ(taken[i], i / 12 == i % 12 ? 0 : 1);
}

// A small learning rate: AdamW's first steps are close to signs, which make much of the rounding of small gradients.
StepResult train_step(MeshRun& run, const Mesh& mesh, int64_t step, int64_t vocab_size) {
  const SharedBatch batch(vocab_size, static_cast<uint64_t>(step), mesh, 2);
  return run.step().run(batch.micro_batches(), batch.num_targets(), 1e-4);
}

TrainStepOptions adamw_options() {
  return {.grad_clip = 0.5, .adamw = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}};
}

void load_newest(const std::string& directory, MeshRun& run, const Mesh& mesh) {
  int64_t applied_steps = 0;
  const NewestCheckpoint newest = use_newest_checkpoint(
      directory,
      [&](CheckpointReader& reader) {
        reader.load(run.registry(), kAll);
        applied_steps = reader.manifest().header.state.applied_steps;
      },
      mesh.world());
  EXPECT_TRUE(newest.path.has_value() && newest.skipped.empty());
  Context context = run.context();
  context.hooks->values_changed(context);
  run.step().set_applied_steps(applied_steps);
}

// Saves `step`, by turns in the background and not.
void save(const std::string& directory, int64_t step, MeshRun& run, const Mesh& mesh) {
  const std::vector<CheckpointBlock> blocks = owned_blocks(run.registry(), kAll);
  Arena planning = Arena::planning("snapshot", Device::kCpu);
  allocate_snapshot(blocks, planning);
  Arena arena("snapshot", Device::kCpu, planning.peak());
  CheckpointWriter writer({directory, 1}, blocks,
                          step % 2 == 0 ? std::optional(allocate_snapshot(blocks, arena)) : std::nullopt, mesh.world());
  CheckpointHeader header;
  header.state.step = step;
  header.state.applied_steps = run.step().applied_steps();
  writer.save(header);
  EXPECT_EQ(writer.finish().size(), 1U);
}

// Values and moments of this rank against those of one rank; the worst name and its error.
struct Worst {
  std::string name;
  double error = 0;
};
Worst compare(MeshRun& run, MeshRun& one) {
  Worst worst;
  for (const CheckpointBlock& block : wanted_blocks(run.registry(), kAll)) {
    const std::string part = block.name.substr(0, block.name.find('/'));
    const Parameter& whole = *one.registry().find(block.name.substr(part.size() + 1));
    Parameter place;
    place.spec.shape = block.global_shape;
    place.block = {block.start, block.tensor.shape()};
    const Tensor& expected = part == "model" ? whole.value : part == "adam_m" ? whole.adam_m : whole.adam_v;
    const double error = mpi_test::block_error(place, block.tensor, expected);
    if (!(error <= worst.error)) worst = {block.name, error};
  }
  if (run.registry().replica_share().zero < 3) {  // whole values are there
    for (const Parameter& parameter : run.registry().parameters()) {
      const Tensor& expected = one.registry().find(parameter.spec.name)->value;
      const double error = mpi_test::block_error(parameter, parameter.value, expected);
      if (!(error <= worst.error)) worst = {parameter.spec.name, error};
    }
  }
  return worst;
}

TEST(Resume, InAnyLayoutEqualsOneRankThatRunsStraightOn) {
  const auto everyone =
      mpi_test::world().make_mesh({.data = mpi_test::world().world_size()}, mpi_test::world_watchdog());
  const bool all_pairs = std::getenv("PALIMPSEST_ALL_PAIRS") != nullptr;
  std::vector<Layout> all = layouts();
  std::erase_if(all, [&](const Layout& layout) { return layout.shape.ranks() > mpi_test::world().world_size(); });
  std::vector<size_t> way = every_pair(all.size());
  if (!all_pairs) {
    way.resize(all.size() + 1);
    for (size_t i = 0; i < way.size(); ++i) way[i] = i % all.size();
  }
  const SharedDirectory root(everyone->world());
  const ModelConfig config = mpi_test::grouped_hybrid();
  MeshRun one(config, Mesh::single(), DType::kF64, adamw_options(), kMaxTokens);
  Worst worst;
  for (size_t i = 0; i < way.size(); ++i) {
    const auto& [shape, zero] = all[way[i]];
    SCOPED_TRACE("step " + std::to_string(i + 1) + ", data " + std::to_string(shape.data) + ", sequence " +
                 std::to_string(shape.sequence) + ", tensor " + std::to_string(shape.tensor) + ", zero " +
                 std::to_string(zero));
    const auto step = static_cast<int64_t>(i) + 1;
    const StepResult expected = train_step(one, Mesh::single(), step, config.vocab_size);
    if (const auto mesh = mpi_test::world().make_mesh(shape, mpi_test::world_watchdog())) {
      MeshRun run(config, *mesh, DType::kF64, adamw_options(), kMaxTokens, zero);
      if (step > 1) load_newest(root.path(), run, *mesh);
      const StepResult got = train_step(run, *mesh, step, config.vocab_size);
      EXPECT_NEAR(got.loss, expected.loss, 1e-9 * expected.loss);
      EXPECT_NEAR(got.grad_norm, expected.grad_norm, 1e-9 * expected.grad_norm);
      const Worst here = compare(run, one);
      EXPECT_LE(here.error, 1e-9) << here.name;
      if (here.error > worst.error) worst = here;
      save(root.path(), step, run, *mesh);
    }
    if (max_over(everyone->world(), testing::Test::HasFailure()) != 0) return;
  }
  if (everyone->world().rank() == 0)
    std::printf("%zu layouts, %zu changes of layout: worst %s, %.1e\n", all.size(), way.size() - 1, worst.name.c_str(),
                worst.error);
}

// A vocabulary of 50257 rows over 4 ranks, 12565 each but for the last; the same layout goes on bit for bit.
class ResumeOfUnevenShards : public testing::TestWithParam<int64_t> {};

TEST_P(ResumeOfUnevenShards, GoesOnBitForBit) {
  if (mpi_test::world().world_size() < 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = mpi_test::world().make_mesh({.data = 4}, mpi_test::world_watchdog());
  if (!mesh) return;
  ModelConfig config = mpi_test::grouped_hybrid();
  config.vocab_size = 50257;
  config.num_layers = 1;
  config.layers = {"kda"};
  const SharedDirectory root(mesh->world());
  MeshRun straight(config, *mesh, DType::kF32, adamw_options(), kMaxTokens, GetParam());
  MeshRun resumed(config, *mesh, DType::kF32, adamw_options(), kMaxTokens, GetParam());
  train_step(straight, *mesh, 1, config.vocab_size);
  save(root.path(), 1, straight, *mesh);
  load_newest(root.path(), resumed, *mesh);
  EXPECT_EQ(train_step(resumed, *mesh, 2, config.vocab_size).loss,
            train_step(straight, *mesh, 2, config.vocab_size).loss);
  const auto expected = wanted_blocks(straight.registry(), kAll), got = wanted_blocks(resumed.registry(), kAll);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_EQ(std::memcmp(got[i].tensor.raw(), expected[i].tensor.raw(), got[i].tensor.bytes()), 0) << got[i].name;
}

INSTANTIATE_TEST_SUITE_P(Zero, ResumeOfUnevenShards, testing::Values(1, 3));

}  // namespace
}  // namespace palimpsest
