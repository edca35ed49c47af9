// A hybrid model on 2 and 4 tensor ranks against the same model on one: logits, and every gradient of one micro-batch.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/mpi/mesh_run.h"
#include "tests/mpi/world.h"

namespace palimpsest {
namespace {

using mpi_test::MeshRun;

class TensorParallel : public testing::TestWithParam<int64_t> {};

TEST_P(TensorParallel, LogitsAndEveryGradientEqualOneRanks) {
  const int64_t T = GetParam();
  if (mpi_test::world().world_size() < T) GTEST_SKIP() << "needs " << T << " ranks";
  const auto mesh = mpi_test::world().make_mesh({.tensor = T}, mpi_test::world_watchdog());
  if (!mesh) return;  // this rank is not in the mesh
  const ModelConfig config = mpi_test::grouped_hybrid();
  const support::OwnedBatch batch(support::random_documents({1, 3, 37, 30}, config.vocab_size, 5));
  const int64_t N = batch.input().tokens.dim(0);
  MeshRun one(config, Mesh::single(), DType::kF64, {}, N), split(config, *mesh, DType::kF64, {}, N);

  EXPECT_DOUBLE_EQ(split.model().flops_per_token(64), one.model().flops_per_token(64));

  std::vector<double> expected(static_cast<size_t>(N * config.vocab_size), NAN), got(expected);
  Context one_context = one.context(), split_context = split.context();
  one.model().forward_logits(one_context, batch.input(), {expected.data(), DType::kF64, {N, config.vocab_size}});
  split.model().forward_logits(split_context, batch.input(), {got.data(), DType::kF64, {N, config.vocab_size}});
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-10) << "logit " << i;

  one.step().run({&batch.input(), 1}, batch.num_targets(), 0.0);
  split.step().run({&batch.input(), 1}, batch.num_targets(), 0.0);
  for (const Parameter& part : split.registry().parameters()) {
    const double error = mpi_test::block_error(part, part.grad, one.registry().find(part.spec.name)->grad);
    EXPECT_LE(error, 1e-10) << part.spec.name;
    EXPECT_FALSE(std::isnan(error)) << part.spec.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Degrees, TensorParallel, testing::Values(1, 2, 4));

}  // namespace
}  // namespace palimpsest
