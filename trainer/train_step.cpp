#include "trainer/train_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/cross_entropy.h"
#include "kernels/device.h"
#include "kernels/elementwise.h"
#include "kernels/router.h"
#include "kernels/trace.h"

namespace palimpsest {

namespace {

// "model.layers.3.mlp.up_proj.weight" -> "model.layers.*.mlp.up_proj.weight"
std::string with_numbers_as_stars(const std::string& name) {
  std::string text;
  for (const char c : name) {
    const bool digit = c >= '0' && c <= '9';
    const bool after_dot = text.empty() || text.back() == '.' || text.back() == '*';
    if (!digit || !after_dot) {
      text += c;
    } else if (text.empty() || text.back() != '*') {
      text += '*';
    }
  }
  return text;
}

}  // namespace

TrainStep::TrainStep(const LanguageModel& model, ParameterRegistry& registry, Context context, Arena& numbers,
                     const TrainStepOptions& options)
    : model_(model),
      registry_(registry),
      reduction_(registry, *context.hooks),
      context_(context),
      options_(options),
      loss_options_{.z_loss = options.z_loss, .checkpointing = options.checkpointing},
      control_(numbers.allocate(DType::kF64, {kStepControlSize})),
      loss_sum_(numbers.allocate(DType::kF64, {1})),
      z_sum_(numbers.allocate(DType::kF64, {1})) {
  context_.hooks = &reduction_;
  fill_zero(context_.stream, control_);
  const auto num_routed = static_cast<int64_t>(model.routed_layers().size());
  if (num_routed > 0)
    loss_options_.expert_load = expert_load_ =
        numbers.allocate(DType::kF64, {num_routed, model.config().moe.num_experts});
}

void TrainStep::begin(int64_t num_targets) {
  loss_options_.grad_scale = 1.0 / static_cast<double>(std::max<int64_t>(num_targets, 1));
  reduction_.begin(context_);
  fill_zero(context_.stream, loss_sum_);
  fill_zero(context_.stream, z_sum_);
  if (expert_load_.defined()) fill_zero(context_.stream, expert_load_);
}

void TrainStep::accumulate(const ModelInput& micro_batch, MicroBatch place) {
  const TraceRange range("micro-batch");
  reduction_.begin_micro_batch(place == MicroBatch::kLast);
  model_.forward_backward(context_, micro_batch, loss_options_, loss_sum_, z_sum_);
}

StepResult TrainStep::finish(double lr) {
  const TraceRange range("optimizer");
  reduction_.finish(context_);
  accumulate_norm();
  sum_over_ranks();
  require_finite(context_.stream, control_, loss_sum_);
  require_finite(context_.stream, control_, z_sum_);
  prepare_step(context_.stream, control_, options_.grad_clip.value_or(0.0));
  update_parameters(lr);
  update_selection_biases();
  if (context_.stream.is_planning()) {
    context_.hooks->values_changed(context_);
    return {};
  }
  // The one time in a step that the host waits for a GPU.
  StepResult result = result_of_step();
  // After a skipped step every rank keeps what it has, so that a bad number can be found where it arose.
  if (result.applied) context_.hooks->values_changed(context_);
  return result;
}

StepResult TrainStep::result_of_step() const {
  const auto number = [](const Tensor& tensor) { return HostCopy(tensor).fetch().tensor().data<double>()[0]; };
  // The sign of a NaN says nothing, and would print.
  const auto unsigned_nan = [](double value) {
    return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
  };
  HostCopy control(control_);
  const double* numbers = control.fetch().tensor().data<double>();
  return {.loss = unsigned_nan(number(loss_sum_) * loss_options_.grad_scale),
          .z_loss = unsigned_nan(number(z_sum_) * loss_options_.grad_scale),
          .grad_norm = unsigned_nan(std::sqrt(numbers[kNormSquared])),
          .applied = numbers[kFinite] != 0.0,
          .applied_steps = static_cast<int64_t>(numbers[kAppliedSteps]),
          .experts = expert_use()};
}

StepResult TrainStep::run(std::span<const ModelInput> micro_batches, int64_t num_targets, double lr) {
  begin(num_targets);
  for (size_t i = 0; i < micro_batches.size(); ++i)
    accumulate(micro_batches[i], i + 1 == micro_batches.size() ? MicroBatch::kLast : MicroBatch::kInner);
  return finish(lr);
}

void TrainStep::accumulate_norm() {
  fill_zero(context_.stream, control_.rows(kNormSquared, 1));
  std::vector<Tensor> grads;
  for (const Parameter& parameter : registry_.parameters())
    if (counts_in_sums(context_, parameter)) grads.push_back(parameter.grad_shard);
  accumulate_norm_squared(context_.stream, control_, grads);
}

// All that a step sums beside the gradients, at once. The ranks of a tensor group have the same losses and loads: one
// of them counts.
void TrainStep::sum_over_ranks() {
  std::vector<Tensor> sums = {loss_sum_, z_sum_};
  if (expert_load_.defined()) sums.push_back(expert_load_);
  if (context_.mesh.tensor().rank() > 0)
    for (const Tensor& sum : sums) fill_zero(context_.stream, sum);
  sums.push_back(control_.rows(kNormSquared, 1));
  context_.mesh.world().start_all_reduce(context_.stream, std::move(sums), ReduceOp::kSum)->wait();
}

void TrainStep::update_parameters(double lr) {
  if (options_.update == UpdateRule::kSgd) {
    for (const Parameter& parameter : registry_.parameters())
      sgd_step(context_.stream, parameter.value_shard, parameter.grad_shard, control_, lr);
    return;
  }
  AdamwOptions adamw = options_.adamw;
  adamw.lr = lr;
  std::vector<AdamwOperands> operands;
  for (const Parameter& parameter : registry_.parameters())
    operands.push_back({.param = parameter.value_shard,
                        .m = parameter.adam_m,
                        .v = parameter.adam_v,
                        .grad = parameter.grad_shard,
                        .weight_decay = parameter.spec.decay == WeightDecay::kNo ? 0.0 : adamw.weight_decay});
  adamw_step(context_.stream, operands, control_, adamw);
}

void TrainStep::update_selection_biases() {
  const MoeConfig& moe = model_.config().moe;
  if (!moe.router_bias_update_speed) return;
  int64_t row = 0;
  for (const RoutedLayer& routed : model_.routed_layers()) {
    const Tensor load = expert_load_.rows(row++, 1).view({moe.num_experts});
    const Parameter& bias = *routed.selection_bias;
    selection_bias_step(context_.stream, bias.value_shard, load, bias.shard.begin, *moe.router_bias_update_speed,
                        control_);
  }
}

std::vector<ExpertUse> TrainStep::expert_use() const {
  std::vector<ExpertUse> use;
  if (!expert_load_.defined()) return use;
  HostCopy loads(expert_load_);
  const double* load = loads.fetch().tensor().data<double>();
  const int64_t E = model_.config().moe.num_experts;
  for (const RoutedLayer& routed : model_.routed_layers()) {
    use.push_back({.layer = routed.layer,
                   .fewest = *std::min_element(load, load + E),
                   .most = *std::max_element(load, load + E),
                   .mean = std::accumulate(load, load + E, 0.0) / static_cast<double>(E)});
    load += E;
  }
  return use;
}

int64_t TrainStep::applied_steps() const {
  return static_cast<int64_t>(HostCopy(control_).fetch().tensor().data<double>()[kAppliedSteps]);
}

void TrainStep::set_applied_steps(int64_t steps) {
  HostCopy control(control_);
  control.fetch().tensor().data<double>()[kAppliedSteps] = static_cast<double>(steps);
  control.store();
}

int64_t count_targets(const Tensor& targets) {
  const int32_t* values = targets.data<int32_t>();
  return std::count_if(values, values + targets.numel(), [](int32_t target) { return target != kIgnoreTarget; });
}

std::string first_non_finite_weight(const ParameterRegistry& registry) {
  const bool sharded = registry.replica_share().zero >= 3;
  for (const Parameter& parameter : registry.parameters())
    if (!all_finite(HostCopy(sharded ? parameter.value_shard : parameter.value).fetch().tensor()))
      return "weight " + parameter.spec.name;
  return {};
}

std::string first_non_finite_gradient(const ParameterRegistry& registry) {
  const auto& parameters = registry.parameters();
  const bool sharded = registry.replica_share().zero >= 2;
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend(); ++parameter)
    if (!all_finite(HostCopy(sharded ? parameter->grad_shard : parameter->grad).fetch().tensor()))
      return "gradient of " + parameter->spec.name;
  return {};
}

std::string decay_group_table(const ParameterRegistry& registry, double weight_decay) {
  std::string text;
  for (const WeightDecay group : {WeightDecay::kYes, WeightDecay::kNo}) {
    int64_t num_tensors = 0, num_elements = 0;
    std::vector<std::string> names;
    for (const Parameter& parameter : registry.parameters()) {
      if (parameter.spec.decay != group) continue;
      ++num_tensors;
      num_elements += parameter.spec.shape.numel();
      const std::string name = with_numbers_as_stars(parameter.spec.name);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
    text += fmt::format("AdamW, weight decay {}: {} tensors, {} numbers\n",
                        group == WeightDecay::kYes ? weight_decay : 0.0, num_tensors, num_elements);
    for (const std::string& name : names) text += "  " + name + "\n";
  }
  return text;
}

}  // namespace palimpsest
