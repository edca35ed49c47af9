// A hybrid model on 2 and 4 tensor ranks against the same model on one: loss, logits and every gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/elementwise.h"
#include "model/language_model.h"
#include "model/tensor_parallel.h"
#include "tests/mpi/world.h"
#include "tests/support/tiny_run.h"

namespace palimpsest {
namespace {

// A model in f64 with all its memory, on any mesh.
class MeshRun {
 public:
  MeshRun(const ModelConfig& config, const Mesh& mesh, const ModelInput& input)
      : mesh_(mesh),
        registry_({.rank = mesh.tensor().rank(), .size = mesh.tensor().size()}),
        model_(config, registry_),
        num_tokens_(input.tokens.dim(0)) {
    Arena parameters = Arena::planning("parameters", Device::kCpu), gradients = parameters_planning(),
          optimizer = parameters_planning(), activations = parameters_planning(), scratch = parameters_planning();
    registry_.bind(DType::kF64, ParameterUse::kGradients, parameters, gradients, optimizer);
    Stream planning(Device::kCpu, scratch);
    Context context{planning, activations, DType::kF64, mesh};
    allocate_results(activations);
    run(context, input);
    parameters_.emplace("parameters", Device::kCpu, parameters.peak());
    gradients_.emplace("gradients", Device::kCpu, gradients.peak());
    activations_.emplace("activations", Device::kCpu, activations.peak());
    scratch_.emplace("scratch", Device::kCpu, scratch.peak());
    registry_.bind(DType::kF64, ParameterUse::kGradients, *parameters_, *gradients_, optimizer);
    registry_.initialize(7, 0.1);
    stream_.emplace(Device::kCpu, *scratch_);
    Context real{*stream_, *activations_, DType::kF64, mesh};
    allocate_results(*activations_);
    registry_.zero_gradients(*stream_);
    fill_zero(*stream_, loss_sum);
    fill_zero(*stream_, z_sum);
    run(real, input);
  }

  ParameterRegistry& registry() { return registry_; }
  Tensor loss_sum, z_sum;  // [1] f64
  Tensor logits;           // [N, V]

 private:
  static Arena parameters_planning() { return Arena::planning("planning", Device::kCpu); }

  void allocate_results(Arena& arena) {
    loss_sum = arena.allocate(DType::kF64, {1});
    z_sum = arena.allocate(DType::kF64, {1});
    logits = arena.allocate(DType::kF64, {num_tokens_, model_.config().vocab_size});
  }

  void run(Context& context, const ModelInput& input) {
    model_.forward_backward(context, input, {.grad_scale = 0.01, .z_loss = 1e-3}, loss_sum, z_sum);
    for (Parameter& parameter : registry_.parameters()) sum_over_copies(context, parameter, parameter.grad);
    model_.forward_logits(context, input, logits);
  }

  const Mesh& mesh_;
  ParameterRegistry registry_;
  LanguageModel model_;
  int64_t num_tokens_;
  std::optional<Arena> parameters_, gradients_, activations_, scratch_;
  std::optional<Stream> stream_;
};

// norm(a - b) / norm(b) of this rank's block of a gradient against the whole one.
double block_error(const Parameter& part, const Parameter& whole) {
  const Shape& global = whole.spec.shape;
  double difference = 0, reference = 0;
  for (int64_t i = 0; i < part.grad.numel(); ++i) {
    int64_t rest = i, index = 0, stride = 1;
    for (int dim = global.num_dims() - 1; dim >= 0; --dim) {
      index += (part.block.start[dim] + rest % part.block.shape[dim]) * stride;
      rest /= part.block.shape[dim];
      stride *= global[dim];
    }
    const double a = part.grad.data<double>()[i], b = whole.grad.data<double>()[index];
    difference += (a - b) * (a - b);
    reference += b * b;
  }
  return std::sqrt(difference) / std::max(std::sqrt(reference), 1e-300);
}

ModelConfig grouped_hybrid() {
  ModelConfig config = support::tiny_config().model;
  config.vocab_size = 53;  // not divisible by 2 or 4
  config.hidden_size = 24;
  config.num_layers = 4;
  config.layers = {"kda", "gdn", "mla", "attention"};
  config.kda = {.num_heads = 2, .num_value_heads = 4, .head_dim = 8};
  config.gdn = {.num_heads = 2, .num_value_heads = 4, .head_dim = 6, .value_head_dim = 10};
  config.mla = {.num_heads = 4,
                .q_lora_rank = 12,
                .kv_lora_rank = 10,
                .qk_nope_head_dim = 6,
                .qk_rope_head_dim = 4,
                .v_head_dim = 8,
                .rope = RopeKind::kInterleaved};
  config.attention = {
      .num_heads = 4, .num_kv_heads = 2, .head_dim = 8, .rope_dim = 4, .output_gate = true, .qk_norm = true};
  config.mlp.intermediate_size = 20;
  return config;
}

class TensorParallel : public testing::TestWithParam<int64_t> {};

TEST_P(TensorParallel, EveryGradientEqualsOneRanks) {
  const int64_t T = GetParam();
  if (mpi_test::world().world_size() < T) GTEST_SKIP() << "needs " << T << " ranks";
  const auto mesh = mpi_test::world().make_mesh({.tensor = T}, mpi_test::world_watchdog());
  if (!mesh) return;  // this rank is not in the mesh
  const ModelConfig config = grouped_hybrid();
  const support::OwnedBatch batch(support::random_documents({1, 3, 37, 30}, config.vocab_size, 5));
  MeshRun one(config, Mesh::single(), batch.input());
  MeshRun split(config, *mesh, batch.input());

  EXPECT_NEAR(split.loss_sum.data<double>()[0], one.loss_sum.data<double>()[0], 1e-9);
  EXPECT_NEAR(split.z_sum.data<double>()[0], one.z_sum.data<double>()[0], 1e-9);
  for (int64_t i = 0; i < one.logits.numel(); ++i)
    ASSERT_NEAR(split.logits.data<double>()[i], one.logits.data<double>()[i], 1e-10) << "logit " << i;
  std::string worst_name;
  double worst = 0;
  for (const Parameter& part : split.registry().parameters()) {
    const double error = block_error(part, *one.registry().find(part.spec.name));
    EXPECT_LE(error, 1e-10) << part.spec.name;
    EXPECT_FALSE(std::isnan(error)) << part.spec.name;
    if (error >= worst) {
      worst = error;
      worst_name = part.spec.name;
    }
  }
  std::printf("tensor = %ld, rank %ld: worst gradient %s, %.1e\n", static_cast<long>(T),
              static_cast<long>(mesh->tensor().rank()), worst_name.c_str(), worst);
}

INSTANTIATE_TEST_SUITE_P(Degrees, TensorParallel, testing::Values(1, 2, 4));

}  // namespace
}  // namespace palimpsest
