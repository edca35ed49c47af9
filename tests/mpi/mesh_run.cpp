#include "tests/mpi/mesh_run.h"

#include <algorithm>
#include <cmath>

#include "kernels/elementwise.h"

namespace palimpsest::mpi_test {

namespace {

double element(const Tensor& tensor, int64_t i) {
  return tensor.dtype() == DType::kF64 ? tensor.data<double>()[i] : tensor.data<float>()[i];
}

}  // namespace

ModelConfig grouped_hybrid() {
  ModelConfig config = support::tiny_config().model;
  config.vocab_size = 53;
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

MeshRun::MeshRun(const ModelConfig& config, const Mesh& mesh, DType dtype, const TrainStepOptions& options,
                 int64_t max_tokens)
    : mesh_(mesh),
      dtype_(dtype),
      registry_({.rank = mesh.tensor().rank(), .size = mesh.tensor().size()},
                {.rank = mesh.replica().rank(), .size = mesh.replica().size()}),
      model_(config, registry_) {
  std::vector<int32_t> ids(static_cast<size_t>(max_tokens), 0);
  const Tensor tokens(ids.data(), DType::kI32, {max_tokens});
  const ModelInput input = {.tokens = tokens,
                            .targets = tokens,
                            .sequence = {.documents = Documents::single(max_tokens), .positions = tokens}};
  Regions planned = Regions::planning(Device::kCpu);
  const auto bind = [&](Regions& regions, Stream& stream) {
    registry_.bind(dtype, ParameterUse::kTraining, regions.parameters, regions.gradients, regions.optimizer);
    step_.emplace(model_, registry_, Context{stream, regions.activations, dtype_, mesh_}, regions.optimizer, options);
  };
  {
    Stream stream(Device::kCpu, planned.scratch);
    bind(planned, stream);
    step_->run({&input, 1}, 1, 0.0);
    Context context{stream, planned.activations, dtype_, mesh_};
    Arena::Scope scope(planned.activations);
    model_.forward_logits(context, input, planned.activations.allocate(dtype, {max_tokens, config.vocab_size}));
  }
  regions_.emplace(Device::kCpu, planned.peaks());
  stream_.emplace(Device::kCpu, regions_->scratch);
  bind(*regions_, *stream_);
  registry_.initialize(7, 0.1);
  registry_.zero_optimizer(*stream_);
}

double block_error(const Parameter& parameter, const Tensor& part, const Tensor& whole) {
  const Shape& global = parameter.spec.shape;
  const TensorBlock& block = parameter.block;
  double difference = 0, reference = 0;
  for (int64_t i = 0; i < part.numel(); ++i) {
    int64_t rest = i, index = 0, stride = 1;
    for (int dim = global.num_dims() - 1; dim >= 0; --dim) {
      index += (block.start[dim] + rest % block.shape[dim]) * stride;
      rest /= block.shape[dim];
      stride *= global[dim];
    }
    const double a = element(part, i), b = element(whole, index);
    difference += (a - b) * (a - b);
    reference += b * b;
  }
  return std::sqrt(difference) / std::max(std::sqrt(reference), 1e-300);
}

}  // namespace palimpsest::mpi_test
