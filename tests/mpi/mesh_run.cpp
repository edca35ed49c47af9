#include "tests/mpi/mesh_run.h"

#include <algorithm>
#include <cmath>

#include "kernels/elementwise.h"
#include "model/mixers.h"

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
  config.layers = mixer_kinds();
  config.num_layers = static_cast<int64_t>(config.layers.size());
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
  config.retnet = {.num_heads = 4, .head_dim = 5, .value_head_dim = 7};
  config.mlp.intermediate_size = 20;
  return config;
}

MeshRun::MeshRun(const ModelConfig& config, const Mesh& mesh, DType dtype, const TrainStepOptions& options,
                 int64_t max_tokens, int64_t zero, Device device)
    : mesh_(mesh),
      dtype_(dtype),
      registry_({.rank = mesh.tensor().rank(), .size = mesh.tensor().size()},
                {.rank = mesh.replica().rank(), .size = mesh.replica().size(), .zero = zero}),
      model_(config, registry_) {
  std::vector<int32_t> ids(static_cast<size_t>(max_tokens), 0);
  const Tensor tokens(ids.data(), DType::kI32, {max_tokens});
  const SequenceCut cut = cut_rows(mesh, 1, max_tokens);
  const auto input = [&](int64_t document_length) {
    const ModelInput whole = {
        .tokens = tokens,
        .targets = tokens,
        .sequence = {.documents = Documents::rows(max_tokens / document_length, document_length), .positions = tokens}};
    return LocalInput(whole, cut, mesh.sequence().rank());
  };
  Regions planned = Regions::planning(device);
  const auto bind = [&](Regions& regions, Stream& stream) {
    registry_.bind(dtype, ParameterUse::kTraining, regions.parameters, regions.gradients, regions.optimizer);
    values_.emplace(registry_);
    step_.emplace(
        model_, registry_,
        Context{
            .stream = stream, .activations = regions.activations, .dtype = dtype_, .mesh = mesh_, .hooks = &*values_},
        regions.optimizer, options);
  };
  {
    Stream stream(device, planned.scratch);
    bind(planned, stream);
    for (const int64_t document_length : {max_tokens, int64_t{1}}) {
      const LocalInput batch = input(document_length);
      step_->run({&batch.input(), 1}, 1, 0.0);
    }
    Context context{
        .stream = stream, .activations = planned.activations, .dtype = dtype_, .mesh = mesh_, .hooks = &*values_};
    Arena::Scope scope(planned.activations);
    const LocalInput batch = input(max_tokens);
    model_.forward_logits(
        context, batch.input(),
        planned.activations.allocate(dtype, {cut.num_tokens(mesh.sequence().rank()), config.vocab_size}));
  }
  regions_.emplace(device, planned.peaks());
  stream_.emplace(device, regions_->scratch);
  bind(*regions_, *stream_);
  shared_memory_.emplace(mesh);
  registry_.initialize(7, 0.1);
  registry_.zero_optimizer(*stream_);
}

SharedBatch::SharedBatch(int64_t vocab_size, uint64_t seed, const Mesh& mesh, int64_t count) {
  const int64_t data_rank = mesh.data().rank(), data_size = mesh.data().size();
  const std::vector<std::vector<int64_t>> lengths = {{1, 3, 37}, {30, 4}, {130}, {1, 1}, {5}, {64, 2}, {9, 2}, {1}};
  std::vector<std::vector<std::vector<int32_t>>> mine(static_cast<size_t>(count));
  for (size_t row = 0; row < lengths.size(); ++row) {
    const auto documents = support::random_documents(lengths[row], vocab_size, seed * lengths.size() + row);
    for (const auto& document : documents) num_targets_ += static_cast<int64_t>(document.size()) - 1;
    const auto index = static_cast<int64_t>(row);
    if (index % data_size != data_rank) continue;
    auto& micro_batch = mine[index / data_size % count];
    micro_batch.insert(micro_batch.end(), documents.begin(), documents.end());
  }
  for (auto& documents : mine) {
    if (documents.empty()) documents.push_back({5});  // nothing to score
    const ModelInput& whole = batches_.emplace_back(documents).input();
    const SequenceCut cut = cut_rows(mesh, 1, whole.tokens.dim(0));
    inputs_.push_back(parts_.emplace_back(whole, cut, mesh.sequence().rank()).input());
  }
}

double block_error(const Parameter& parameter, const Tensor& part, const Tensor& whole, int64_t first_row) {
  const Shape& global = parameter.spec.shape;
  const TensorBlock& block = parameter.block;
  double difference = 0, reference = 0;
  for (int64_t i = 0; i < part.numel(); ++i) {
    int64_t rest = first_row * part.row_size() + i, index = 0, stride = 1;
    for (int dim = global.num_dims() - 1; dim >= 0; --dim) {
      index += (block.start[dim] + rest % block.shape[dim]) * stride;
      rest /= block.shape[dim];
      stride *= global[dim];
    }
    const double error = element(part, i) - element(whole, index);
    difference += error * error;
  }
  for (int64_t i = 0; i < whole.numel(); ++i) reference += element(whole, i) * element(whole, i);
  return std::sqrt(difference) / std::max(std::sqrt(reference), 1e-300);
}

}  // namespace palimpsest::mpi_test
