// Routed experts on data, sequence and tensor ranks with every level of zero, against one rank: every update of a step,
// the steps of the selection bias, the balance term over the loads of all ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/local_input.h"
#include "tests/mpi/mesh_run.h"
#include "tests/mpi/world.h"
#include "tests/support/moe_config.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using mpi_test::MeshRun;

constexpr auto kZigzag = SequenceLayout::kZigzag;

struct MoeLayout {
  MeshShape shape;
  int64_t zero;
  bool softmax;
};

class MoeOnMesh : public testing::TestWithParam<MoeLayout> {};

std::map<std::string, std::vector<double>> values_of_shards(MeshRun& run) {
  std::map<std::string, std::vector<double>> values;
  for (const Parameter& parameter : run.registry().parameters())
    values[parameter.spec.name] = support::values_of(parameter.value_shard);
  return values;
}

TEST_P(MoeOnMesh, EveryUpdateEqualsOneRanks) {
  const auto [shape, zero, softmax] = GetParam();
  if (mpi_test::world().world_size() < shape.ranks()) GTEST_SKIP() << "needs " << shape.ranks() << " ranks";
  const auto mesh = mpi_test::world().make_mesh(shape, mpi_test::world_watchdog());
  if (!mesh) return;  // this rank is not in the mesh
  ModelConfig config = mpi_test::grouped_hybrid();
  config.layers = {"kda", "mla"};
  config.num_layers = 3;
  config.moe = softmax ? support::softmax_moe() : support::sigmoid_moe();

  // Two documents: one micro-batch of both on one rank, of one each on two data ranks, since the balance term is that
  // of all that a micro-batch holds. Sequence ranks cut both.
  const auto documents = support::random_documents({37, 37}, config.vocab_size, 5);
  const support::OwnedBatch whole(documents);
  std::vector<std::vector<int32_t>> own = documents;
  if (shape.data == 2) own = {documents[static_cast<size_t>(mesh->data().rank())]};
  const support::OwnedBatch rows(own);
  const LocalInput part(rows.input(), cut_rows(*mesh, 1, rows.input().tokens.dim(0)), mesh->sequence().rank());
  const TrainStepOptions options = {.update = UpdateRule::kSgd};
  MeshRun one(config, Mesh::single(), DType::kF64, options, 74), split(config, *mesh, DType::kF64, options, 74, zero);
  auto wanted = values_of_shards(one), updates = values_of_shards(split);
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
    EXPECT_EQ(got.experts[i].mean, expected.experts[i].mean);
  }
  const auto make_updates = [](MeshRun& run, auto& values) {
    const auto after = values_of_shards(run);
    for (auto& [name, value] : values)
      for (size_t i = 0; i < value.size(); ++i) value[i] = after.at(name)[i] - value[i];
  };
  make_updates(one, wanted);
  make_updates(split, updates);
  for (const Parameter& parameter : split.registry().parameters()) {
    std::vector<double>&mine = updates.at(parameter.spec.name), &all = wanted.at(parameter.spec.name);
    const Tensor mine_view(mine.data(), DType::kF64, parameter.value_shard.shape());
    const Tensor all_view(all.data(), DType::kF64, parameter.spec.shape);
    const double error = mpi_test::block_error(parameter, mine_view, all_view, parameter.shard.begin);
    EXPECT_LE(error, 1e-10) << parameter.spec.name;
    EXPECT_FALSE(std::isnan(error)) << parameter.spec.name;
  }
  if (!softmax) {
    double moved = 0;
    for (const double update : wanted.at("model.layers.1.mlp.gate.e_score_correction_bias")) moved += std::abs(update);
    EXPECT_GT(moved, 0.0);
  }
}

std::vector<MoeLayout> moe_layouts() {
  const std::pair<MeshShape, int64_t> all[] = {{{1, 1, 2}, 1},          {{2, 1, 1}, 1},          {{2, 1, 2}, 1},
                                               {{1, 1, 4}, 1},          {{2, 1, 4}, 1},          {{1, 2, 1}, 1},
                                               {{1, 2, 1}, 3},          {{2, 1, 1}, 2},          {{2, 1, 2}, 3},
                                               {{1, 2, 2, kZigzag}, 2}, {{2, 2, 1, kZigzag}, 3}, {{2, 2, 2}, 1},
                                               {{2, 2, 2, kZigzag}, 2}, {{2, 2, 2}, 3},          {{1, 4, 1}, 2},
                                               {{1, 4, 1, kZigzag}, 3}, {{1, 4, 2, kZigzag}, 1}, {{1, 8, 1}, 2}};
  std::vector<MoeLayout> layouts;
  for (const bool softmax : {false, true})
    for (const auto& [shape, zero] : all) layouts.push_back({shape, zero, softmax});
  return layouts;
}

std::string name_of_case(const testing::TestParamInfo<MoeLayout>& info) {
  const auto& [shape, zero, softmax] = info.param;
  return std::string(softmax ? "softmax" : "sigmoid") + "_data" + std::to_string(shape.data) + "_sequence" +
         std::to_string(shape.sequence) + (shape.layout == kZigzag ? "zigzag" : "") + "_tensor" +
         std::to_string(shape.tensor) + "_zero" + std::to_string(zero);
}

INSTANTIATE_TEST_SUITE_P(Layouts, MoeOnMesh, testing::ValuesIn(moe_layouts()), name_of_case);

}  // namespace
}  // namespace palimpsest
