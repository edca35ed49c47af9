// What a rehearsal on a mesh that does not exist says, against a step on one that does.
#include <gtest/gtest.h>

#include <vector>

#include "model/local_input.h"
#include "parallel/planned_mesh.h"
#include "tests/mpi/mesh_run.h"
#include "tests/mpi/world.h"
#include "trainer/workbench.h"

namespace palimpsest {
namespace {

struct Case {
  MeshShape shape;
  int64_t zero;
};

class Rehearsal : public testing::TestWithParam<Case> {};

TEST_P(Rehearsal, OfAPlannedRankHoldsToTheByte) {
  const auto [shape, zero] = GetParam();
  if (mpi_test::world().world_size() < shape.ranks()) GTEST_SKIP() << "needs " << shape.ranks() << " ranks";
  const auto mesh = mpi_test::world().make_mesh(shape, mpi_test::world_watchdog());
  if (!mesh) return;
  Config config = support::tiny_config(Precision::kF32);
  config.model = mpi_test::grouped_hybrid();
  config.parallel.zero = zero;
  const TrainStepOptions options = train_step_options(config);
  const BatchLimits limits = {.train_rows = 2, .row_length = 31};
  const auto planned = planned_mesh(shape, mesh->world().rank());
  Workbench rehearsal(config, *planned);
  const SentBytes sent = rehearsal.rehearse_step_bytes({.rows = 7, .micro_batch = 2, .row_length = 31}, options);
  const RegionBytes plan = rehearsal.rehearse_training(limits, options);

  Workbench bench(config, *mesh);
  bench.allocate(ParameterUse::kTraining, plan);
  bench.registry().initialize(1, 0.02);
  bench.registry().zero_optimizer(bench.stream());
  TrainStep step(bench.model(), bench.registry(), bench.context(), bench.regions().optimizer, options);
  std::vector<support::OwnedBatch> batches;
  std::vector<LocalInput> parts;
  std::vector<ModelInput> inputs;
  for (const int64_t rows : {2, 2, 2, 1})
    batches.emplace_back(support::random_documents(std::vector<int64_t>(static_cast<size_t>(rows), 31), 53, 1));
  for (const support::OwnedBatch& batch : batches) {
    const int64_t rows = batch.input().sequence.documents.count();
    inputs.push_back(parts.emplace_back(batch.input(), cut_rows(*mesh, rows, 31), mesh->sequence().rank()).input());
  }
  for (int i = 0; i < 2; ++i) {
    const SentBytes before = mesh->bytes_sent();
    EXPECT_TRUE(step.run(inputs, 210 * shape.data, 1e-3).applied);
    const SentBytes got = mesh->bytes_sent() - before;
    EXPECT_EQ(got.replica, sent.replica);
    EXPECT_EQ(got.data, sent.data);
    EXPECT_EQ(got.sequence, sent.sequence);
    EXPECT_EQ(got.tensor, sent.tensor);
    EXPECT_EQ(got.world, sent.world);
  }
  const RegionBytes used = bench.regions().peaks();
  EXPECT_EQ(used.parameters, plan.parameters);
  EXPECT_EQ(used.gradients, plan.gradients);
  EXPECT_EQ(used.optimizer, plan.optimizer);
  EXPECT_LE(used.activations, plan.activations);
  EXPECT_LE(used.scratch, plan.scratch);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const MeshShape& shape : {MeshShape{2, 1, 1}, MeshShape{3, 1, 1}, MeshShape{2, 1, 2}})
    for (const int64_t zero : {1, 2, 3}) all.push_back({shape, zero});
  all.push_back({{1, 4, 1}, 1});
  all.push_back({{1, 2, 2, SequenceLayout::kZigzag}, 3});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Rehearsal, testing::ValuesIn(cases()));

}  // namespace
}  // namespace palimpsest
