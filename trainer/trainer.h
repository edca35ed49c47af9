// The training loop: the story of a run.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/arena.h"
#include "kernels/device.h"
#include "trainer/checkpoint_writer.h"
#include "trainer/console.h"
#include "trainer/metrics.h"
#include "trainer/run_setup.h"
#include "trainer/run_start.h"
#include "trainer/signals.h"
#include "trainer/tensorboard.h"
#include "trainer/train_step.h"

namespace palimpsest {

// Training stopped after too many non-finite steps in a row. The last checkpoint stays.
class NonFiniteStop : public ThrownByAll {
 public:
  using ThrownByAll::ThrownByAll;
};

class Trainer {
 public:
  // Allocates, loads or initialises the weights, opens the run's files. `setup` must outlive the trainer; `program`
  // is the version that goes into checkpoints.
  Trainer(RunSetup& setup, std::string program, Console& console);

  // Trains to the last step, or until a signal or train.max_minutes asks it to save and stop.
  void run();
  // Called after each step, before it is saved.
  void on_step(std::function<void(const StepMetrics&)> observer) { observer_ = std::move(observer); }

  const TrainState& state() const { return state_; }

 private:
  void prepare_saves(const RunStart& start);
  void warm_up();
  StepMetrics profiled_step(Loader& loader);  // train_one_step, under the profiler where profile.steps says so
  StepMetrics train_one_step(Loader& loader);
  std::string reason_to_stop() const;
  void count_step(const StepResult& result, StepBatches& batches);
  std::string first_non_finite(StepBatches& batches);
  void stop_if_hopeless();
  std::vector<EvalMetrics> evaluate_all();
  void save();
  void report_saves(const std::vector<FinishedSave>& saves);
  double mfu(double tokens_per_second);
  void report_memory() const;

  RunSetup& setup_;
  const Config& config_;
  Console& console_;
  const StopSignals signals_;
  std::string program_;
  double begin_seconds_;
  int64_t total_steps_;
  TrainState state_;
  int64_t resident_before_ = 0;  // the process's peak before the regions were allocated
  double peak_flops_ = 0.0;      // of all ranks
  bool is_first_rank_;           // which writes for all
  bool warned_of_mfu_ = false;
  std::function<void(const StepMetrics&)> observer_ = [](const StepMetrics&) {};
  std::string last_non_finite_;  // what made the last skipped step bad
  std::optional<TrainStep> step_;
  std::optional<Arena> snapshot_;
  std::optional<PinnedRange> pinned_snapshot_;  // of a GPU's values
  std::optional<CheckpointWriter> writer_;
  std::optional<MetricsLog> metrics_log_;
  std::optional<TensorBoardLog> tensorboard_;
};

// Sets up a run and trains it. Every rank of the mesh calls it; the first one alone writes to the console and into
// run.dir, beside the checkpoints.
void train(const Config& config, const Mesh& mesh, const std::string& program, Console& console);

}  // namespace palimpsest
