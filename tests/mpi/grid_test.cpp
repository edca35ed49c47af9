// Layouts of the mesh against one rank: one step of plain SGD on the same global batch; every parameter's update, the
// loss, the gradient norm.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "tests/mpi/mesh_run.h"
#include "tests/mpi/world.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using mpi_test::MeshRun;
using mpi_test::SharedBatch;

std::vector<double> values_here(const Tensor& tensor) {
  return support::values_of(HostCopy(tensor).fetch().tensor());
}

constexpr auto kZigzag = SequenceLayout::kZigzag;
constexpr double kLr = 4096.0;  // so that f32 updates stand well above the rounding of the weights they are read from

// Updates of all parameters (after - before), each of the rank's rows, by name.
using Updates = std::map<std::string, std::vector<double>>;

struct Outcome {
  StepResult result;
  Updates updates;
};

Outcome one_step(MeshRun& run, const SharedBatch& batch) {
  Outcome outcome;
  for (const Parameter& parameter : run.registry().parameters())
    outcome.updates[parameter.spec.name] = values_here(parameter.value_shard);
  outcome.result = run.step().run(batch.micro_batches(), batch.num_targets(), kLr);
  for (const Parameter& parameter : run.registry().parameters()) {
    std::vector<double>& update = outcome.updates[parameter.spec.name];
    const std::vector<double> after = values_here(parameter.value_shard);
    for (size_t i = 0; i < update.size(); ++i) update[i] = after[i] - update[i];
  }
  return outcome;
}

struct Layout {
  MeshShape shape;
  int64_t zero;
  DType dtype;
  int64_t micro_batches = 2;  // on each data rank
  Device device = Device::kCpu;
  int64_t least_copied_bytes = GpuLinks().least_copied_bytes;  // of all tensors of these models, or of none
};

class Grid : public testing::TestWithParam<Layout> {};

TEST_P(Grid, EveryUpdateEqualsOneRanks) {
  const auto [shape, zero, dtype, count, device, least_copied_bytes] = GetParam();
  if (mpi_test::world().world_size() < shape.ranks()) GTEST_SKIP() << "needs " << shape.ranks() << " ranks";
  if (device == Device::kCuda) {
    if (!mpi_test::take_gpu()) GTEST_SKIP() << "there is no GPU";
    if (mpi_test::world().world_size() > shape.ranks()) GTEST_SKIP() << "is for " << shape.ranks() << " ranks";
  }
  const auto mesh =
      mpi_test::world().make_mesh(shape, mpi_test::world_watchdog(), device, mpi_test::gpu_links(least_copied_bytes));
  if (!mesh) return;  // this rank is not in the mesh

  ModelConfig config = mpi_test::grouped_hybrid();
  // Rounding of f32 grows with depth, up to the limit with five layers even between two runs of one rank.
  if (dtype == DType::kF32) {
    config.layers = {"kda", "gdn", "mla", "attention"};
    config.num_layers = 4;
  }
  const TrainStepOptions options = {.z_loss = 1e-3, .grad_clip = 0.05, .update = UpdateRule::kSgd};
  MeshRun one(config, Mesh::single(), dtype, options, SharedBatch::kMaxTokens, 1, device);
  MeshRun split(config, *mesh, dtype, options, SharedBatch::kMaxTokens, zero, device);
  const Outcome expected = one_step(one, SharedBatch(config.vocab_size, 1, Mesh::single(), 3));
  const Outcome got = one_step(split, SharedBatch(config.vocab_size, 1, *mesh, count));

  Context context = split.context();  // where whole values come when they are needed
  for (size_t group = 0; group < split.registry().groups().size(); ++group)
    context.hooks->need_values(context, static_cast<int64_t>(group));

  const double limit = dtype == DType::kF64 ? 1e-10 : 1e-5;
  EXPECT_NEAR(got.result.loss, expected.result.loss, limit * expected.result.loss);
  EXPECT_NEAR(got.result.z_loss, expected.result.z_loss, limit * expected.result.z_loss);
  EXPECT_NEAR(got.result.grad_norm, expected.result.grad_norm, limit * expected.result.grad_norm);
  EXPECT_TRUE(got.result.applied);
  std::string worst_name;
  double worst = 0;
  for (const Parameter& parameter : split.registry().parameters()) {
    std::vector<double> part = got.updates.at(parameter.spec.name), whole = expected.updates.at(parameter.spec.name);
    const Tensor part_view(part.data(), DType::kF64, parameter.value_shard.shape());
    const Tensor whole_view(whole.data(), DType::kF64, parameter.spec.shape);
    const double error = mpi_test::block_error(parameter, part_view, whole_view, parameter.shard.begin);
    EXPECT_LE(error, limit) << parameter.spec.name;
    EXPECT_FALSE(std::isnan(error)) << parameter.spec.name;
    if (error >= worst) {
      worst = error;
      worst_name = parameter.spec.name;
    }
    // With a low level of zero everybody has everything, and the same.
    if (zero < 3) {
      const double all =
          mpi_test::block_error(parameter, HostCopy(parameter.value).fetch().tensor(),
                                HostCopy(one.registry().find(parameter.spec.name)->value).fetch().tensor());
      EXPECT_LE(all, 10 * limit) << parameter.spec.name;
    }
  }
  if (mesh->world().rank() == 0)
    std::printf("%s: data %ld, sequence %ld%s, tensor %ld, zero %ld, %s: worst update %s, %.1e\n", name_of(device),
                static_cast<long>(shape.data), static_cast<long>(shape.sequence),
                shape.layout == kZigzag ? " zig-zag" : "", static_cast<long>(shape.tensor), static_cast<long>(zero),
                name_of(dtype), worst_name.c_str(), worst);
}

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const MeshShape& shape :
       {MeshShape{1, 1, 1}, MeshShape{2, 1, 1}, MeshShape{3, 1, 1}, MeshShape{1, 1, 2}, MeshShape{2, 1, 2},
        MeshShape{1, 1, 4}, MeshShape{4, 1, 2}, MeshShape{8, 1, 1}, MeshShape{1, 2, 1}, MeshShape{2, 2, 1},
        MeshShape{1, 2, 2, kZigzag}, MeshShape{2, 2, 2}, MeshShape{2, 2, 2, kZigzag}, MeshShape{1, 4, 1},
        MeshShape{1, 4, 1, kZigzag}, MeshShape{1, 4, 2, kZigzag}, MeshShape{1, 3, 1, kZigzag}, MeshShape{1, 8, 1}}) {
    for (const int64_t zero : {1, 2, 3}) {
      if (zero > 1 && shape.data * shape.sequence == 1) continue;  // nothing to share
      all.push_back({shape, zero, DType::kF64});
      if (zero != 2) all.push_back({shape, zero, DType::kF32});
    }
  }
  for (const int64_t zero : {1, 2, 3})
    for (const int64_t micro_batches : {1, 4}) all.push_back({{2, 1, 1}, zero, DType::kF64, micro_batches});
  return all;
}

std::vector<Layout> gpu_layouts() {
  std::vector<Layout> all;
  const auto add = [&](const MeshShape& shape, int64_t zero, int64_t least_copied_bytes) {
    all.push_back({shape, zero, DType::kF32, 2, Device::kCuda, least_copied_bytes});
  };
  const int64_t usual = GpuLinks().least_copied_bytes;
  for (const MeshShape& shape :
       {MeshShape{2, 1, 1}, MeshShape{1, 1, 2}, MeshShape{1, 2, 1}, MeshShape{1, 2, 1, kZigzag}}) {
    for (const int64_t zero : {1, 2, 3}) {
      if (zero > 1 && shape.data * shape.sequence == 1) continue;
      add(shape, zero, usual);
      add(shape, zero, 0);
    }
  }
  for (const MeshShape& shape :
       {MeshShape{4, 1, 1}, MeshShape{1, 1, 4}, MeshShape{1, 4, 1}, MeshShape{1, 4, 1, kZigzag}, MeshShape{2, 1, 2},
        MeshShape{2, 2, 1}, MeshShape{1, 2, 2, kZigzag}}) {
    add(shape, 1, usual);
    for (const int64_t zero : {1, 3})
      if (zero == 1 || shape.data * shape.sequence > 1) add(shape, zero, 0);
  }
  return all;
}

std::string name_of_case(const testing::TestParamInfo<Layout>& info) {
  const auto& [shape, zero, dtype, count, device, least_copied_bytes] = info.param;
  return "data" + std::to_string(shape.data) + "_sequence" + std::to_string(shape.sequence) +
         (shape.layout == kZigzag ? "zigzag" : "") + "_tensor" + std::to_string(shape.tensor) + "_zero" +
         std::to_string(zero) + "_" + name_of(dtype) + "_micro" + std::to_string(count) +
         (device == Device::kCuda ? "_cuda" : "") + (least_copied_bytes == 0 ? "_copies" : "");
}

INSTANTIATE_TEST_SUITE_P(Layouts, Grid, testing::ValuesIn(layouts()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, Grid, testing::ValuesIn(gpu_layouts()), name_of_case);

}  // namespace
}  // namespace palimpsest
