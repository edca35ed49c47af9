#include "trainer/workbench.h"

#include <omp.h>

#include "kernels/device.h"

namespace palimpsest {

Workbench::Workbench(const Config& config, const Mesh& mesh)
    : mesh_(mesh),
      device_(device_of(config)),
      types_(types_of(config)),
      registry_({.rank = mesh.tensor().rank(), .size = mesh.tensor().size()},
                {.rank = mesh.replica().rank(), .size = mesh.replica().size(), .zero = config.parallel.zero}),
      model_(config.model, registry_),
      values_(registry_) {
  set_threads(config);
  // Of several ranks each has taken its own before the mesh was made.
  if (device_ == Device::kCuda && mesh.world().size() == 1) use_gpu(0);
}

RegionBytes Workbench::rehearse_training(const BatchLimits& limits, const TrainStepOptions& options) {
  return palimpsest::rehearse_training(model_, registry_, device_, types_, limits, options, mesh_);
}

RegionBytes Workbench::rehearse_evaluation(const BatchLimits& limits) {
  return palimpsest::rehearse_evaluation(model_, registry_, device_, types_, limits, mesh_);
}

SentBytes Workbench::rehearse_step_bytes(const StepRows& rows, const TrainStepOptions& options) {
  return palimpsest::rehearse_step_bytes(model_, registry_, device_, types_, rows, options, mesh_);
}

void Workbench::allocate(ParameterUse use, const RegionBytes& bytes) {
  regions_.emplace(device_, bytes);
  stream_.emplace(device_, regions_->scratch);
  registry_.bind(parameter_dtype(types_.dtype), use, regions_->parameters, regions_->gradients, regions_->optimizer);
}

void set_threads(const Config& config) {
  if (config.hardware.threads) omp_set_num_threads(static_cast<int>(*config.hardware.threads));
}

TrainStepOptions train_step_options(const Config& config) {
  return {.z_loss = config.train.z_loss,
          .checkpointing = config.train.activation_checkpointing,
          .grad_clip = config.optimizer.grad_clip,
          .adamw = {.beta1 = config.optimizer.betas[0],
                    .beta2 = config.optimizer.betas[1],
                    .eps = config.optimizer.eps,
                    .weight_decay = config.optimizer.weight_decay}};
}

}  // namespace palimpsest
