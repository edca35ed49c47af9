// Routed experts on tensor and data ranks against one rank: every gradient of a step, the steps of the selection bias,
// the balance term over the loads of all ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/mpi/mesh_run.h"
#include "tests/mpi/world.h"
#include "tests/support/moe_config.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using mpi_test::MeshRun;

struct MoeLayout {
  MeshShape shape;
  bool softmax;
};

class MoeOnMesh : public testing::TestWithParam<MoeLayout> {};

TEST_P(MoeOnMesh, EveryUpdateEqualsOneRanks) {
  const auto [shape, softmax] = GetParam();
  if (mpi_test::world().world_size() < shape.ranks()) GTEST_SKIP() << "needs " << shape.ranks() << " ranks";
  const auto mesh = mpi_test::world().make_mesh(shape, mpi_test::world_watchdog());
  if (!mesh) return;  // this rank is not in the mesh
  ModelConfig config = mpi_test::grouped_hybrid();
  config.layers = {"kda", "mla"};
  config.num_layers = 3;
  config.moe = softmax ? support::softmax_moe() : support::sigmoid_moe();

  // Two documents: one micro-batch of both on one rank, of one each on two data ranks, since the balance term is that
  // of all that a micro-batch holds.
  const auto documents = support::random_documents({37, 37}, config.vocab_size, 5);
  const support::OwnedBatch whole(documents);
  std::vector<std::vector<int32_t>> own = documents;
  if (shape.data == 2) own = {documents[static_cast<size_t>(mesh->data().rank())]};
  const support::OwnedBatch part(own);
  const TrainStepOptions options = {.update = UpdateRule::kSgd};
  MeshRun one(config, Mesh::single(), DType::kF64, options, 74), split(config, *mesh, DType::kF64, options, 74);
  const StepResult expected = one.step().run({&whole.input(), 1}, whole.num_targets(), 1.0);
  const StepResult got = split.step().run({&part.input(), 1}, whole.num_targets(), 1.0);

  EXPECT_NEAR(got.loss, expected.loss, 1e-12);
  EXPECT_NEAR(got.z_loss, expected.z_loss, 1e-12);
  EXPECT_NEAR(got.grad_norm, expected.grad_norm, 1e-11 * expected.grad_norm);
  if (softmax) {
    EXPECT_GT(got.z_loss, 0.1);  // the balance term is at least its coefficient times k, 0.9
  }
  ASSERT_EQ(got.experts.size(), expected.experts.size());
  for (size_t i = 0; i < got.experts.size(); ++i) {
    EXPECT_EQ(got.experts[i].most, expected.experts[i].most);
    EXPECT_EQ(got.experts[i].fewest, expected.experts[i].fewest);
  }
  for (const Parameter& parameter : split.registry().parameters()) {
    const double error =
        mpi_test::block_error(parameter, parameter.value, one.registry().find(parameter.spec.name)->value);
    EXPECT_LE(error, 1e-12) << parameter.spec.name;
    EXPECT_FALSE(std::isnan(error)) << parameter.spec.name;
  }
  if (!softmax) {
    double moved = 0;
    const Tensor bias = split.registry().find("model.layers.1.mlp.gate.e_score_correction_bias")->value;
    for (const double value : support::values_of(bias)) moved += std::abs(value);
    EXPECT_GT(moved, 0.0);
  }
}

std::vector<MoeLayout> moe_layouts() {
  std::vector<MoeLayout> all;
  for (const bool softmax : {false, true})
    for (const MeshShape& shape :
         {MeshShape{1, 1, 2}, MeshShape{2, 1, 1}, MeshShape{2, 1, 2}, MeshShape{1, 1, 4}, MeshShape{2, 1, 4}})
      all.push_back({shape, softmax});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Layouts, MoeOnMesh, testing::ValuesIn(moe_layouts()), [](const auto& info) {
  return std::string(info.param.softmax ? "softmax" : "sigmoid") + "_data" + std::to_string(info.param.shape.data) +
         "_tensor" + std::to_string(info.param.shape.tensor);
});

}  // namespace
}  // namespace palimpsest
