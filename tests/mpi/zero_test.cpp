// The levels of zero: the same training, less memory, and what is on its way while the model computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/mpi/mesh_run.h"
#include "tests/mpi/world.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using mpi_test::MeshRun;
using mpi_test::SharedBatch;
using Kind = ReductionEvent::Kind;

constexpr int64_t kRows = SharedBatch::kMaxTokens;

class Zero : public testing::TestWithParam<int64_t> {
 protected:
  // Null on ranks that are not in it; `skip_` where there are too few.
  std::unique_ptr<Mesh> mesh(const MeshShape& shape) {
    skip_ = mpi_test::world().world_size() < shape.ranks();
    return skip_ ? nullptr : mpi_test::world().make_mesh(shape, mpi_test::world_watchdog());
  }
  bool skip_ = false;
};

SharedBatch batch_of_step(const ModelConfig& config, const Mesh& mesh, int64_t step, int64_t count) {
  return {config.vocab_size, static_cast<uint64_t>(10 + step), mesh, count};
}

TEST_P(Zero, TwentyStepsOfAdamwEqualOneRanks) {
  for (const MeshShape& shape : {MeshShape{3, 1, 1}, MeshShape{2, 1, 2}}) {
    const auto mesh = this->mesh(shape);
    if (!mesh) continue;
    ModelConfig config = mpi_test::grouped_hybrid();
    config.num_layers = 4;  // steps of AdamW multiply rounding, the more the deeper the model and the longer the step
    constexpr double kLearningRate = 2e-3;
    const TrainStepOptions options = {.grad_clip = 0.5, .adamw = {.weight_decay = 0.1}};
    MeshRun one(config, Mesh::single(), DType::kF64, options, kRows);
    MeshRun split(config, *mesh, DType::kF64, options, kRows, GetParam());
    for (int64_t step = 0; step < 20; ++step) {
      const SharedBatch whole = batch_of_step(config, Mesh::single(), step, 1);
      const SharedBatch part = batch_of_step(config, *mesh, step, 2);
      const StepResult expected = one.step().run(whole.micro_batches(), whole.num_targets(), kLearningRate);
      const StepResult got = split.step().run(part.micro_batches(), part.num_targets(), kLearningRate);
      ASSERT_NEAR(got.loss, expected.loss, 1e-10 * expected.loss) << "step " << step;
      ASSERT_NEAR(got.grad_norm, expected.grad_norm, 1e-9 * expected.grad_norm) << "step " << step;
    }
    for (const Parameter& parameter : split.registry().parameters()) {
      const Parameter& whole = *one.registry().find(parameter.spec.name);
      const int64_t first = parameter.shard.begin;
      EXPECT_LE(mpi_test::block_error(parameter, parameter.value_shard, whole.value, first), 1e-9)
          << parameter.spec.name;
      EXPECT_LE(mpi_test::block_error(parameter, parameter.adam_m, whole.adam_m, first), 1e-9) << parameter.spec.name;
      EXPECT_LE(mpi_test::block_error(parameter, parameter.adam_v, whole.adam_v, first), 1e-9) << parameter.spec.name;
    }
  }
  if (skip_) GTEST_SKIP() << "needs 4 ranks";
}

// Tied embeddings are needed at both ends of a forward, and their gradient is complete at the end of the backward.
TEST_P(Zero, TiedEmbeddingsTrainAsOnOneRank) {
  const auto mesh = this->mesh({.data = 2});
  if (!mesh) return;
  ModelConfig config = mpi_test::grouped_hybrid();
  config.tie_embeddings = true;
  config.layers = {"kda"};
  config.num_layers = 3;
  MeshRun one(config, Mesh::single(), DType::kF64, {}, kRows);
  MeshRun split(config, *mesh, DType::kF64, {}, kRows, GetParam());
  for (int64_t step = 0; step < 3; ++step) {
    const SharedBatch whole = batch_of_step(config, Mesh::single(), step, 1);
    const SharedBatch part = batch_of_step(config, *mesh, step, 2);
    const StepResult expected = one.step().run(whole.micro_batches(), whole.num_targets(), 1e-2);
    const StepResult got = split.step().run(part.micro_batches(), part.num_targets(), 1e-2);
    EXPECT_NEAR(got.loss, expected.loss, 1e-10 * expected.loss);
    EXPECT_NEAR(got.grad_norm, expected.grad_norm, 1e-10 * expected.grad_norm);
  }
}

// All ranks give the model the same tokens; the values come through the same hooks.
TEST_P(Zero, LogitsEqualOneRanksBeforeAndAfterAStep) {
  const auto mesh = this->mesh({.data = 3});
  if (!mesh) return;
  const ModelConfig config = mpi_test::grouped_hybrid();
  MeshRun one(config, Mesh::single(), DType::kF64, {}, kRows), split(config, *mesh, DType::kF64, {}, kRows, GetParam());
  const support::OwnedBatch tokens(support::random_documents({1, 17}, config.vocab_size, 3));
  const auto logits = [&](MeshRun& run) {
    std::vector<double> values(static_cast<size_t>(18 * config.vocab_size), NAN);
    Context context = run.context();
    run.model().forward_logits(context, tokens.input(), {values.data(), DType::kF64, {18, config.vocab_size}});
    return values;
  };
  EXPECT_TRUE(support::is_close(logits(split), logits(one), 1e-12));
  const SharedBatch whole = batch_of_step(config, Mesh::single(), 0, 1), part = batch_of_step(config, *mesh, 0, 1);
  one.step().run(whole.micro_batches(), whole.num_targets(), 1e-1);
  split.step().run(part.micro_batches(), part.num_targets(), 1e-1);
  EXPECT_TRUE(support::is_close(logits(split), logits(one), 1e-10));
}

TEST_P(Zero, ReducesABlockBeforeTheBackwardOfTheNextEnds) {
  const auto mesh = this->mesh({.data = 2});
  if (!mesh) return;
  const ModelConfig config = mpi_test::grouped_hybrid();
  MeshRun run(config, *mesh, DType::kF64, {}, kRows, GetParam());
  constexpr int64_t kMicroBatches = 3;
  const SharedBatch batch = batch_of_step(config, *mesh, 0, kMicroBatches);
  run.step().run(batch.micro_batches(), batch.num_targets(), 0.0);
  const std::vector<ReductionEvent>& trace = run.step().trace();
  const auto index_of = [&](Kind kind, int64_t group, int64_t micro_batch) {
    const auto found = std::find_if(trace.begin(), trace.end(), [&](const ReductionEvent& event) {
      return event.kind == kind && event.group == group && event.micro_batch == micro_batch;
    });
    EXPECT_NE(found, trace.end()) << "event " << static_cast<int>(kind) << " of group " << group << " in micro-batch "
                                  << micro_batch;
    return found - trace.begin();
  };
  // Groups: embedding, blocks, head. Zero 1 reduces once a step, the other levels in every micro-batch.
  const int64_t groups = config.num_layers + 2;
  const int64_t first = GetParam() == 1 ? kMicroBatches - 1 : 0;
  for (int64_t micro_batch = first; micro_batch < kMicroBatches; ++micro_batch) {
    for (int64_t group = groups - 1; group > 0; --group) {
      const auto starts = index_of(Kind::kReduceStarts, group, micro_batch);
      const auto ends = index_of(Kind::kReduceEnds, group, micro_batch);
      const auto next_ends = index_of(Kind::kBackwardEnds, group - 1, micro_batch);
      EXPECT_GT(starts, index_of(Kind::kBackwardEnds, group, micro_batch));
      EXPECT_LT(starts, next_ends) << "group " << group << " waited for the backward of the next";
      EXPECT_GT(ends, next_ends) << "the backward after group " << group << " waited for its reduce";
      EXPECT_LE(trace[starts].time, trace[next_ends].time);
    }
  }
  const auto reduces = std::count_if(trace.begin(), trace.end(),
                                     [](const ReductionEvent& event) { return event.kind == Kind::kReduceStarts; });
  EXPECT_EQ(reduces, groups * (kMicroBatches - first));
}

TEST_P(Zero, SkipsAStepThatIsNotFiniteOnOneRank) {
  const auto mesh = this->mesh({.data = 2});
  if (!mesh) return;
  const ModelConfig config = mpi_test::grouped_hybrid();
  MeshRun run(config, *mesh, DType::kF64, {}, kRows, GetParam());
  const SharedBatch batch = batch_of_step(config, *mesh, 0, 2);
  EXPECT_TRUE(run.step().run(batch.micro_batches(), batch.num_targets(), 1e-2).applied);
  const auto state = [&] {
    std::vector<std::vector<double>> values;
    for (const Parameter& parameter : run.registry().parameters())
      for (const Tensor& tensor : {parameter.value_shard, parameter.adam_m, parameter.adam_v})
        values.push_back(support::values_of(tensor));
    return values;
  };
  const auto before = state();
  const std::string bad = "model.layers.1.mlp.up_proj.weight";
  const Parameter& parameter = *run.registry().find(bad);
  run.step().begin(batch.num_targets());
  for (const ModelInput& micro_batch : batch.micro_batches()) run.step().accumulate(micro_batch);
  const Tensor& gradient = GetParam() == 1 ? parameter.grad : parameter.grad_shard;
  const bool is_bad_rank = mesh->world().rank() == 1;
  if (is_bad_rank) {
    ASSERT_GT(gradient.numel(), 3);
    gradient.data<double>()[3] = std::numeric_limits<double>::quiet_NaN();
  }
  const StepResult result = run.step().finish(1e-2);
  EXPECT_FALSE(result.applied);
  EXPECT_TRUE(std::isnan(result.grad_norm));
  EXPECT_TRUE(std::isfinite(result.loss));
  EXPECT_EQ(run.step().applied_steps(), 1);
  EXPECT_EQ(state(), before);
  const std::string found = first_non_finite_gradient(run.registry());
  EXPECT_EQ(found, is_bad_rank ? "gradient of " + bad : "");
  EXPECT_TRUE(run.step().run(batch.micro_batches(), batch.num_targets(), 1e-2).applied);
  EXPECT_EQ(run.step().applied_steps(), 2);
  EXPECT_NE(state(), before);
}

// As the search for the first tensor that is not finite does.
TEST_P(Zero, AStepThatNeverFinishesLeavesNothingToTheNext) {
  const auto mesh = this->mesh({.data = 2});
  if (!mesh) return;
  const ModelConfig config = mpi_test::grouped_hybrid();
  const SharedBatch wanted = batch_of_step(config, *mesh, 0, 2), unwanted = batch_of_step(config, *mesh, 1, 2);
  MeshRun plain(config, *mesh, DType::kF64, {}, kRows, GetParam());
  const StepResult expected = plain.step().run(wanted.micro_batches(), wanted.num_targets(), 1e-2);
  for (const bool gives_up : {true, false}) {
    MeshRun run(config, *mesh, DType::kF64, {}, kRows, GetParam());
    run.step().begin(unwanted.num_targets());
    for (const ModelInput& micro_batch : unwanted.micro_batches()) run.step().accumulate(micro_batch);
    if (gives_up) run.step().give_up();
    const StepResult got = run.step().run(wanted.micro_batches(), wanted.num_targets(), 1e-2);
    EXPECT_EQ(got.loss, expected.loss);
    EXPECT_EQ(got.grad_norm, expected.grad_norm) << (gives_up ? "given up" : "left");
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Zero, testing::Values(1, 2, 3));

// Bytes of the largest group of each slot, whole.
int64_t bytes_of_slots(const ParameterRegistry& registry) {
  std::vector<int64_t> slots(8, 0);
  for (const ParameterGroup& group : registry.groups()) {
    int64_t bytes = 0;
    for (const ParameterStack* stack : group.stacks) bytes += stack->whole_grad.bytes();
    slots[group.slot] = std::max(slots[group.slot], bytes);
  }
  return std::accumulate(slots.begin(), slots.end(), int64_t{0});
}

TEST(ZeroMemory, ShrinksAsTheLevelsSay) {
  if (mpi_test::world().world_size() < 8) GTEST_SKIP() << "needs 8 ranks";
  constexpr int64_t kRanks = 8;
  const auto mesh = mpi_test::world().make_mesh({.data = kRanks}, mpi_test::world_watchdog());
  ModelConfig config = mpi_test::grouped_hybrid();
  config.num_layers = 20;
  config.hidden_size = 64;
  config.mlp.intermediate_size = 256;
  const auto regions = [&](int64_t zero) { return MeshRun(config, *mesh, DType::kF32, {}, 8, zero).regions(); };
  const RegionBytes one = regions(1), two = regions(2), three = regions(3);
  MeshRun run(config, *mesh, DType::kF32, {}, 8, 2);
  const int64_t slots = bytes_of_slots(run.registry());
  const int64_t whole = one.parameters;
  // Shards, two blocks and an end whole, and what is received for those; a tenth for shards that are rounded up.
  const auto predicted = [&](int64_t copies_of_received) {
    return static_cast<double>(whole / kRanks + slots + copies_of_received * slots / kRanks);
  };
  EXPECT_NEAR(static_cast<double>(two.gradients), static_cast<double>(predicted(1)), 0.1 * predicted(1));
  EXPECT_NEAR(static_cast<double>(three.parameters), static_cast<double>(predicted(0)), 0.1 * predicted(0));
  EXPECT_LT(2 * two.gradients, one.gradients);
  EXPECT_LT(2 * three.parameters, one.parameters);
  EXPECT_EQ(two.parameters, one.parameters);
  EXPECT_EQ(three.gradients, two.gradients);
  EXPECT_EQ(three.optimizer, one.optimizer);
  EXPECT_EQ(three.activations, one.activations);
  EXPECT_LT(std::abs(one.optimizer - 2 * whole / kRanks), whole / 10);
}

}  // namespace
}  // namespace palimpsest
