#include "tests/support/tiny_run.h"

#include "kernels/cross_entropy.h"
#include "kernels/device.h"
#include "kernels/random.h"
#include "tests/support/tensors.h"

namespace palimpsest::support {

Config tiny_config(Precision precision, std::vector<std::string> layers) {
  Config config;
  config.device = DeviceChoice::kCpu;
  config.precision = precision;
  config.hardware.peak_tflops = 0.1;
  config.model = {.vocab_size = 37,
                  .hidden_size = 20,
                  .num_layers = static_cast<int64_t>(layers.size()),
                  .layers = layers,
                  .kda = {.num_heads = 2, .head_dim = 8, .conv_size = 4, .gate_lower_bound = -5.0},
                  .gdn = {.num_heads = 1, .num_value_heads = 3, .head_dim = 6, .value_head_dim = 10, .conv_size = 3},
                  .retnet = {.num_heads = 3, .head_dim = 6, .value_head_dim = 10},
                  .mla = {.num_heads = 3,
                          .q_lora_rank = 9,
                          .kv_lora_rank = 7,
                          .qk_nope_head_dim = 5,
                          .qk_rope_head_dim = 4,
                          .v_head_dim = 6,
                          .rope = RopeKind::kInterleaved},
                  .attention = {.num_heads = 4, .num_kv_heads = 2, .head_dim = 6, .output_gate = true, .qk_norm = true},
                  .mlp = {.intermediate_size = 28}};
  config.optimizer.lr = 1e-3;
  return config;
}

OwnedBatch::OwnedBatch(const std::vector<std::vector<int32_t>>& documents) {
  std::vector<int64_t> offsets = {0};
  for (const std::vector<int32_t>& document : documents) {
    for (size_t i = 0; i < document.size(); ++i) {
      const bool scored = i + 1 < document.size();
      tokens_.push_back(document[i]);
      targets_.push_back(scored ? document[i + 1] : kIgnoreTarget);
      positions_.push_back(static_cast<int32_t>(i));
      num_targets_ += scored ? 1 : 0;
    }
    offsets.push_back(static_cast<int64_t>(tokens_.size()));
  }
  const auto N = static_cast<int64_t>(tokens_.size());
  input_ = {.tokens = Tensor(tokens_.data(), DType::kI32, {N}),
            .targets = Tensor(targets_.data(), DType::kI32, {N}),
            .sequence = {.documents = Documents(offsets), .positions = Tensor(positions_.data(), DType::kI32, {N})}};
}

void OwnedBatch::ignore_target(int64_t position) {
  num_targets_ -= targets_[position] != kIgnoreTarget ? 1 : 0;
  targets_[position] = kIgnoreTarget;
}

std::vector<std::vector<int32_t>> random_documents(const std::vector<int64_t>& lengths, int64_t vocab_size,
                                                   uint64_t seed) {
  std::vector<std::vector<int32_t>> documents;
  uint64_t index = 0;
  for (const int64_t length : lengths) {
    std::vector<int32_t>& document = documents.emplace_back();
    for (int64_t i = 0; i < length; ++i)
      document.push_back(
          static_cast<int32_t>(random_bits(seed, hash_of("documents"), index++) % static_cast<uint64_t>(vocab_size)));
  }
  return documents;
}

TinyRun::TinyRun(const Config& config, int64_t max_tokens) : bench_(std::make_unique<Workbench>(config)) {
  const BatchLimits limits = {.train_rows = 1, .eval_rows = 1, .row_length = max_tokens};
  const TrainStepOptions options = train_step_options(config);
  bench_->allocate(ParameterUse::kTraining, bench_->rehearse_training(limits, options));
  bench_->registry().initialize(static_cast<uint64_t>(config.run.seed), config.model.initializer_range);
  bench_->registry().zero_optimizer(bench_->stream());
  step_ = std::make_unique<TrainStep>(bench_->model(), bench_->registry(), bench_->context(),
                                      bench_->regions().optimizer, options);
}

Parameter& TinyRun::parameter(const std::string& name) {
  Parameter* parameter = bench_->registry().find(name);
  CHECK(parameter != nullptr, "no parameter ", name);
  return *parameter;
}

std::vector<double> state_of(TinyRun& run) {
  std::vector<double> state;
  for (const Parameter& parameter : run.registry().parameters()) {
    for (const Tensor& tensor : {parameter.value, parameter.adam_m, parameter.adam_v}) {
      const std::vector<double> values = values_of(HostCopy(tensor).fetch().tensor());
      state.insert(state.end(), values.begin(), values.end());
    }
  }
  state.push_back(static_cast<double>(run.step().applied_steps()));
  return state;
}

std::vector<double> gradients_of(ParameterRegistry& registry) {
  std::vector<double> gradients;
  for (const Parameter& parameter : registry.parameters()) {
    const std::vector<double> values = values_of(HostCopy(parameter.grad).fetch().tensor());
    gradients.insert(gradients.end(), values.begin(), values.end());
  }
  return gradients;
}

}  // namespace palimpsest::support
