// Layouts of the mesh against one rank: one step of plain SGD on the same global batch; every parameter's update, the
// loss, the gradient norm.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "tests/mpi/mesh_run.h"
#include "tests/mpi/world.h"

namespace palimpsest {
namespace {

using mpi_test::MeshRun;

constexpr double kLr = 4096.0;  // so that f32 updates stand well above the rounding of the weights they are read from

std::vector<double> copy_of(const Tensor& tensor) {
  std::vector<double> values(static_cast<size_t>(tensor.numel()));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = tensor.dtype() == DType::kF64 ? tensor.data<double>()[i] : tensor.data<float>()[i];
  return values;
}

// Updates of all parameters (after - before), each of the shape of the block, by name.
using Updates = std::map<std::string, std::vector<double>>;

struct Outcome {
  StepResult result;
  Updates updates;
};

Outcome one_step(MeshRun& run, const std::vector<ModelInput>& micro_batches, int64_t num_targets) {
  Outcome outcome;
  for (const Parameter& parameter : run.registry().parameters())
    outcome.updates[parameter.spec.name] = copy_of(parameter.value);
  outcome.result = run.step().run(micro_batches, num_targets, kLr);
  for (const Parameter& parameter : run.registry().parameters()) {
    std::vector<double>& update = outcome.updates[parameter.spec.name];
    const std::vector<double> after = copy_of(parameter.value);
    for (size_t i = 0; i < update.size(); ++i) update[i] = after[i] - update[i];
  }
  return outcome;
}

struct Layout {
  MeshShape shape;
  DType dtype;
};

class Grid : public testing::TestWithParam<Layout> {};

TEST_P(Grid, EveryUpdateEqualsOneRanks) {
  const auto [shape, dtype] = GetParam();
  if (mpi_test::world().world_size() < shape.ranks()) GTEST_SKIP() << "needs " << shape.ranks() << " ranks";
  const auto mesh = mpi_test::world().make_mesh(shape, mpi_test::world_watchdog());
  if (!mesh) return;  // this rank is not in the mesh

  // Four micro-batches of unlike numbers of targets, one of them without any; data rank r takes every data-th.
  const ModelConfig config = mpi_test::grouped_hybrid();
  std::vector<support::OwnedBatch> batches;
  const std::vector<std::vector<int64_t>> lengths = {{1, 3, 37, 30}, {130}, {1, 1}, {5, 64, 2}};
  int64_t num_targets = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    batches.emplace_back(support::random_documents(lengths[i], config.vocab_size, 100 + i));
    num_targets += batches.back().num_targets();
  }
  std::vector<ModelInput> all, mine;
  for (size_t i = 0; i < batches.size(); ++i) {
    all.push_back(batches[i].input());
    if (static_cast<int64_t>(i) % shape.data == mesh->data().rank()) mine.push_back(batches[i].input());
  }
  const TrainStepOptions options = {.z_loss = 1e-3, .grad_clip = 0.05, .update = UpdateRule::kSgd};
  MeshRun one(config, Mesh::single(), dtype, options, 130);
  MeshRun split(config, *mesh, dtype, options, 130);
  const Outcome expected = one_step(one, all, num_targets);
  const Outcome got = one_step(split, mine, num_targets);

  const double limit = dtype == DType::kF64 ? 1e-10 : 1e-5;
  EXPECT_NEAR(got.result.loss, expected.result.loss, limit * expected.result.loss);
  EXPECT_NEAR(got.result.z_loss, expected.result.z_loss, limit * expected.result.z_loss);
  EXPECT_NEAR(got.result.grad_norm, expected.result.grad_norm, limit * expected.result.grad_norm);
  EXPECT_TRUE(got.result.applied);
  std::string worst_name;
  double worst = 0;
  for (const Parameter& parameter : split.registry().parameters()) {
    std::vector<double> part = got.updates.at(parameter.spec.name), whole = expected.updates.at(parameter.spec.name);
    const Tensor part_view(part.data(), DType::kF64, parameter.block.shape);
    const Tensor whole_view(whole.data(), DType::kF64, parameter.spec.shape);
    const double error = mpi_test::block_error(parameter, part_view, whole_view);
    EXPECT_LE(error, limit) << parameter.spec.name;
    EXPECT_FALSE(std::isnan(error)) << parameter.spec.name;
    if (error >= worst) {
      worst = error;
      worst_name = parameter.spec.name;
    }
  }
  if (mesh->world().rank() == 0)
    std::printf("data %ld, sequence %ld, tensor %ld, %s: worst update %s, %.1e\n", static_cast<long>(shape.data),
                static_cast<long>(shape.sequence), static_cast<long>(shape.tensor), name_of(dtype), worst_name.c_str(),
                worst);
}

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (DType dtype : {DType::kF64, DType::kF32})
    for (const MeshShape& shape : {MeshShape{1, 1, 1}, MeshShape{2, 1, 1}, MeshShape{3, 1, 1}, MeshShape{1, 1, 2},
                                   MeshShape{2, 1, 2}, MeshShape{1, 1, 4}, MeshShape{4, 1, 2}, MeshShape{8, 1, 1}})
      all.push_back({shape, dtype});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Grid, testing::ValuesIn(layouts()), [](const auto& info) {
  const MeshShape& shape = info.param.shape;
  return "data" + std::to_string(shape.data) + "_sequence" + std::to_string(shape.sequence) + "_tensor" +
         std::to_string(shape.tensor) + "_" + name_of(info.param.dtype);
});

}  // namespace
}  // namespace palimpsest
