// One optimizer step: the gradient of any number of micro-batches, on every rank of the mesh those of its own rows, the
// sum over the ranks (trainer/replica.h), the global norm, AdamW on this rank's shard of the parameters. Knows neither
// files nor consoles, so that tests, bench and the training loop drive the same code.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "model/language_model.h"
#include "model/layer.h"
#include "model/parameters.h"
#include "trainer/expert_use.h"
#include "trainer/replica.h"

namespace palimpsest {

// Plain SGD (p <- p - lr * gradient, no decay, no moments) is for tests of parity, where AdamW would hide a wrong
// scale.
enum class UpdateRule : uint8_t { kAdamw, kSgd };

struct TrainStepOptions {
  double z_loss = 0.0;
  ActivationCheckpointing checkpointing = ActivationCheckpointing::kNone;
  std::optional<double> grad_clip;  // largest global norm
  UpdateRule update = UpdateRule::kAdamw;
  AdamwOptions adamw;  // lr is given to each step; weight_decay holds for WeightDecay::kYes alone
};

struct StepResult {
  double loss = 0.0;          // mean over the targets of the step
  double z_loss = 0.0;        // mean of the z and balance terms, not part of `loss`
  double grad_norm = 0.0;     // of the whole model, before clipping
  bool applied = true;        // false: something was not finite, and weights, moments and applied_steps are as before
  int64_t applied_steps = 0;  // AdamW's counter after it
  std::vector<ExpertUse> experts;  // a layer with routed experts each
};

// Whether a micro-batch is the last of its step: its backward can then send gradients on their way.
enum class MicroBatch : uint8_t { kInner, kLast };

class TrainStep {
 public:
  // The registry must be bound for training and outlive this, as must what the context refers to: its hooks provide
  // whole values, and are told when a step has changed them. A few numbers are taken from `numbers`.
  TrainStep(const LanguageModel& model, ParameterRegistry& registry, Context context, Arena& numbers,
            const TrainStepOptions& options);
  TrainStep(const TrainStep&) = delete;
  TrainStep& operator=(const TrainStep&) = delete;

  // Every rank of the mesh makes the same calls, with micro-batches of its own; num_targets and what finish() returns
  // are those of all ranks. A step is begin, accumulate for each micro-batch, finish. num_targets counts the scored
  // targets of the whole step: loss and gradient are divided by it once, so how the rows are cut into micro-batches
  // makes no difference. A micro-batch without targets adds nothing. Nothing is wrong where none is called the last,
  // but what ranks send each other then waits for finish().
  void begin(int64_t num_targets);
  void accumulate(const ModelInput& micro_batch, MicroBatch place = MicroBatch::kInner);
  StepResult finish(double lr);
  // In place of finish: leaves in grad, with zero > 1 in grad_shard, what was accumulated so far.
  void give_up() { reduction_.settle(context_); }
  StepResult run(std::span<const ModelInput> micro_batches, int64_t num_targets, double lr);

  const std::vector<ReductionEvent>& trace() const { return reduction_.trace(); }

  int64_t applied_steps() const;  // AdamW's counter
  void set_applied_steps(int64_t steps);

 private:
  void accumulate_norm();  // of this rank's shards
  void sum_over_ranks();
  void update_parameters(double lr);
  void update_selection_biases();
  StepResult result_of_step() const;
  std::vector<ExpertUse> expert_use() const;

  const LanguageModel& model_;
  ParameterRegistry& registry_;
  GradientReduction reduction_;
  Context context_;  // with reduction_ as its hooks
  TrainStepOptions options_;
  LossOptions loss_options_;
  Tensor control_;      // [4] f64, see StepControl
  Tensor loss_sum_;     // [1] f64
  Tensor z_sum_;        // [1] f64
  Tensor expert_load_;  // [layers with experts, E] f64; absent without any
};

// The scored targets of a batch.
int64_t count_targets(const Tensor& targets);

// For messages after a skipped step: "weight NAME" of the first parameter that holds a number that is not finite;
// "gradient of NAME" of the first in the order in which backward fills them, from the head down. Empty: there is none
// in what this rank holds.
std::string first_non_finite_weight(const ParameterRegistry& registry);
std::string first_non_finite_gradient(const ParameterRegistry& registry);

// What AdamW does to whom: one line a group with its weight decay, then the names in it, numbers as '*'.
std::string decay_group_table(const ParameterRegistry& registry, double weight_decay);

}  // namespace palimpsest
