// A hybrid model whose rows several sequence ranks share, against one rank: order of tokens, losses and logits a token,
// steps with few targets, and what is sent.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/cross_entropy.h"
#include "model/local_input.h"
#include "parallel/planned_mesh.h"
#include "tests/mpi/mesh_run.h"
#include "tests/mpi/world.h"

namespace palimpsest {
namespace {

using mpi_test::MeshRun;
using Values = std::vector<double>;

class SequenceParallel : public testing::TestWithParam<MeshShape> {
 protected:
  void SetUp() override {
    if (mpi_test::world().world_size() < GetParam().ranks()) GTEST_SKIP() << "needs " << GetParam().ranks() << " ranks";
    mesh_ = mpi_test::world().make_mesh(GetParam(), mpi_test::world_watchdog());
  }
  std::unique_ptr<Mesh> mesh_;  // null on ranks beyond it
};

TEST_P(SequenceParallel, TokensAndTargetsKeepTheirOrder) {
  if (!mesh_) return;
  constexpr int64_t kRows = 3, kLength = 21, N = kRows * kLength;
  std::vector<int32_t> tokens(N), targets(N), positions(N);
  for (int32_t i = 0; i < N; ++i) {
    tokens[i] = i;
    targets[i] = (i + 1) % kLength == 0 ? kIgnoreTarget : i + 1;
    positions[i] = i % kLength;
  }
  const auto view = [](std::vector<int32_t>& values) { return Tensor(values.data(), DType::kI32, {N}); };
  const ModelInput whole = {.tokens = view(tokens),
                            .targets = view(targets),
                            .sequence = {.documents = Documents::rows(kRows, kLength), .positions = view(positions)}};
  const SequenceCut cut = cut_rows(*mesh_, kRows, kLength);
  const LocalInput local(whole, cut, mesh_->sequence().rank());
  const int64_t n = local.input().tokens.dim(0);
  Values ids(n), next(n);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t id = local.input().tokens.data<int32_t>()[i];
    EXPECT_EQ(local.input().targets.data<int32_t>()[i], targets[id]);  // also the next rank's first token
    EXPECT_EQ(local.input().sequence.positions.data<int32_t>()[i], positions[id]);
    ids[i] = id;
  }
  Arena scratch("scratch", Device::kCpu, 1 << 16);
  Stream stream(Device::kCpu, scratch);
  Context context{stream, scratch, DType::kF64, *mesh_};
  Values gathered(N, NAN);
  gather_token_values(context, {gathered.data(), DType::kF64, {N}}, {ids.data(), DType::kF64, {n}}, cut);
  for (int64_t i = 0; i < N; ++i) EXPECT_EQ(gathered[i], static_cast<double>(i));
}

TEST_P(SequenceParallel, LossAndLogitsOfEveryTokenEqualOneRanks) {
  if (!mesh_) return;
  const ModelConfig config = mpi_test::grouped_hybrid();
  const int64_t V = config.vocab_size;
  const support::OwnedBatch batch(support::random_documents({1, 3, 37, 30, 2, 64}, V, 5));
  const int64_t N = batch.input().tokens.dim(0);
  const SequenceCut cut = cut_rows(*mesh_, 1, N);
  const LocalInput local(batch.input(), cut, mesh_->sequence().rank());
  const int64_t n = local.input().tokens.dim(0);
  MeshRun one(config, Mesh::single(), DType::kF64, {}, N), split(config, *mesh_, DType::kF64, {}, N);
  Context one_context = one.context(), context = split.context();

  Values expected(N, NAN), part(n, NAN), got(N, NAN);
  one.model().forward_loss(one_context, batch.input(), {expected.data(), DType::kF64, {N}});
  split.model().forward_loss(context, local.input(), {part.data(), DType::kF64, {n}});
  gather_token_values(context, {got.data(), DType::kF64, {N}}, {part.data(), DType::kF64, {n}}, cut);
  for (int64_t i = 0; i < N; ++i) ASSERT_NEAR(got[i], expected[i], 1e-10) << "loss of token " << i;

  Values logits(N * V, NAN), part_logits(n * V, NAN);
  one.model().forward_logits(one_context, batch.input(), {logits.data(), DType::kF64, {N, V}});
  split.model().forward_logits(context, local.input(), {part_logits.data(), DType::kF64, {n, V}});
  const std::vector<int64_t> places = cut.tokens_of(mesh_->sequence().rank());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t id = 0; id < V; ++id)
      ASSERT_NEAR(part_logits[i * V + id], logits[places[i] * V + id], 1e-10) << "token " << places[i];
}

// One target in all, the first of the row; and targets in the last tokens alone. The ranks recompute activations.
TEST_P(SequenceParallel, StepsWithTargetsOnOneRankEqualOneRanks) {
  if (!mesh_) return;
  constexpr int64_t N = 128;
  const ModelConfig config = mpi_test::grouped_hybrid();
  for (const bool first : {true, false}) {
    support::OwnedBatch batch(support::random_documents({N}, config.vocab_size, 6));
    for (int64_t i = 0; i < N; ++i)
      if (first ? i != 0 : i < N - 5) batch.ignore_target(i);
    EXPECT_EQ(batch.num_targets(), first ? 1 : 4);
    const LocalInput local(batch.input(), cut_rows(*mesh_, 1, N), mesh_->sequence().rank());
    const auto checkpointing = first ? ActivationCheckpointing::kFull : ActivationCheckpointing::kSelective;
    MeshRun one(config, Mesh::single(), DType::kF64, {}, N);
    MeshRun split(config, *mesh_, DType::kF64, {.checkpointing = checkpointing}, N);
    const StepResult expected = one.step().run({&batch.input(), 1}, batch.num_targets(), 0.0);
    const StepResult got = split.step().run({&local.input(), 1}, batch.num_targets(), 0.0);
    EXPECT_NEAR(got.loss, expected.loss, 1e-10 * expected.loss);
    EXPECT_NEAR(got.grad_norm, expected.grad_norm, 1e-10 * expected.grad_norm);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, SequenceParallel,
                         testing::Values(MeshShape{1, 2, 1}, MeshShape{1, 2, 2, SequenceLayout::kZigzag},
                                         MeshShape{1, 4, 1}, MeshShape{1, 4, 1, SequenceLayout::kZigzag},
                                         MeshShape{1, 4, 2}, MeshShape{1, 8, 1, SequenceLayout::kZigzag}),
                         [](const auto& info) {
                           return "sequence" + std::to_string(info.param.sequence) +
                                  (info.param.layout == SequenceLayout::kZigzag ? "zigzag" : "") + "_tensor" +
                                  std::to_string(info.param.tensor);
                         });

// Bytes that this rank sends over the sequence axis in the rehearsal of a model with one layer.
int64_t bytes_of_step(const Mesh& mesh, const std::string& layer, int64_t row_length) {
  ModelConfig config = mpi_test::grouped_hybrid();
  config.num_layers = 1;
  config.layers = {layer};
  Communicator& sequence = mesh.sequence();
  sequence.reset_bytes_sent();
  const MeshRun run(config, mesh, DType::kF32, {}, row_length);
  const int64_t bytes = sequence.bytes_sent();
  sequence.reset_bytes_sent();
  return bytes;
}

TEST(SequenceBytes, OfDeltaRuleLayersDoNotDependOnTheLength) {
  if (mpi_test::world().world_size() < 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = mpi_test::world().make_mesh({.sequence = 4}, mpi_test::world_watchdog());
  if (!mesh) return;
  for (const char* layer : {"kda", "gdn", "retnet"}) {
    const int64_t bytes = bytes_of_step(*mesh, layer, 64);
    EXPECT_GT(bytes, 0) << layer;
    EXPECT_EQ(bytes_of_step(*mesh, layer, 1024), bytes) << layer;
  }
  for (const char* layer : {"mla", "attention"})
    EXPECT_EQ(bytes_of_step(*mesh, layer, 1024), 16 * bytes_of_step(*mesh, layer, 64)) << layer;
  // Latent and shared key, r + dr = 14 numbers a token, to each of the later ranks: of a step forward and backward, and
  // for logits. Gradients to each of the earlier ones. The step of documents of one token sends nothing.
  const int64_t rank = mesh->sequence().rank();
  EXPECT_EQ(bytes_of_step(*mesh, "mla", 64), (3 * (3 - rank) + rank) * 16 * 14 * 4);
}

// Memory for what attention passes: the rows of two ranks, however many there are.
TEST(SequenceBytes, MemoryOfPassedRowsDoesNotGrowWithTheRanks) {
  ModelConfig config = mpi_test::grouped_hybrid();
  for (const SequenceLayout layout : {SequenceLayout::kContiguous, SequenceLayout::kZigzag})
    for (const char* layer : {"mla", "attention"}) {
      config.num_layers = 1;
      config.layers = {layer};
      const auto scratch = [&](int64_t ranks) {
        const auto mesh = planned_mesh({1, ranks, 1, layout}, ranks / 2);
        ParameterRegistry registry({}, {.rank = ranks / 2, .size = ranks});
        const LanguageModel model(config, registry);
        const int64_t row = 512 * ranks;
        return rehearse_training(model, registry, Device::kCpu, DType::kF32, {.train_rows = 1, .row_length = row}, {},
                                 *mesh)
            .scratch;
      };
      EXPECT_EQ(scratch(16), scratch(4)) << layer;
    }
}

}  // namespace
}  // namespace palimpsest
