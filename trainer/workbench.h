// What every command that computes holds: a model, its parameters and the memory they work in. Made in two steps, so
// that the sizes can be printed before anything is allocated.
#pragma once

#include <memory>
#include <optional>

#include "model/language_model.h"
#include "trainer/config.h"
#include "trainer/memory_plan.h"
#include "trainer/replica.h"

namespace palimpsest {

class Workbench {
 public:
  // Declares the model's parameters, this rank's share of each; allocates nothing. `config` is resolved. Sets the
  // number of threads it asks for. The mesh must outlive the workbench.
  explicit Workbench(const Config& config, const Mesh& mesh = Mesh::single());
  Workbench(const Workbench&) = delete;
  Workbench& operator=(const Workbench&) = delete;

  const LanguageModel& model() const { return model_; }
  ParameterRegistry& registry() { return registry_; }
  const ParameterRegistry& registry() const { return registry_; }
  const Mesh& mesh() const { return mesh_; }
  Device device() const { return device_; }
  const ActivationTypes& types() const { return types_; }
  DType dtype() const { return types_.dtype; }

  RegionBytes rehearse_training(const BatchLimits& limits, const TrainStepOptions& options);
  RegionBytes rehearse_evaluation(const BatchLimits& limits);
  SentBytes rehearse_step_bytes(const StepRows& rows, const TrainStepOptions& options);

  // Allocates the regions and binds the parameters to them. Values are uninitialised.
  void allocate(ParameterUse use, const RegionBytes& bytes);
  // Lets the ranks work in each other's memory, for as long as the regions are there. Every rank calls it, when all of
  // them have allocated.
  void share_memory() { shared_memory_.emplace(mesh_); }
  Regions& regions() { return *regions_; }
  Stream& stream() { return *stream_; }
  Context context() {
    return {.stream = *stream_,
            .activations = regions_->activations,
            .dtype = types_.dtype,
            .mesh = mesh_,
            .hooks = &values_,
            .residual = types_.residual};
  }

 private:
  const Mesh& mesh_;
  Device device_;
  ActivationTypes types_;
  ParameterRegistry registry_;
  LanguageModel model_;
  WholeValues values_;
  std::optional<Regions> regions_;
  std::optional<Stream> stream_;
  std::optional<SharedMemory> shared_memory_;  // after the regions: it ends before they do
};

// Applies hardware.threads.
void set_threads(const Config& config);

// What a config says of a training step.
TrainStepOptions train_step_options(const Config& config);

}  // namespace palimpsest
