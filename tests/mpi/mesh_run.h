// A hybrid model (KDA, GDN, MLA, softmax attention; grouped heads) on any mesh, with all its memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/language_model.h"
#include "tests/support/tiny_run.h"
#include "trainer/memory_plan.h"
#include "trainer/train_step.h"

namespace palimpsest::mpi_test {

// Vocabulary 53, which no degree divides; 2 key heads for 4 value heads, 2 key/value heads for 4 query heads.
ModelConfig grouped_hybrid();

class MeshRun {
 public:
  // Initial weights are those of one rank, whatever the mesh. max_tokens: of one micro-batch.
  MeshRun(const ModelConfig& config, const Mesh& mesh, DType dtype, const TrainStepOptions& options,
          int64_t max_tokens);

  ParameterRegistry& registry() { return registry_; }
  const LanguageModel& model() const { return model_; }
  TrainStep& step() { return *step_; }
  Context context() { return {*stream_, regions_->activations, dtype_, mesh_}; }

 private:
  const Mesh& mesh_;
  DType dtype_;
  ParameterRegistry registry_;
  LanguageModel model_;
  std::optional<Regions> regions_;
  std::optional<Stream> stream_;
  std::optional<TrainStep> step_;
};

// norm(part - whole) / norm(whole), where `part` is the block of `whole` (a tensor of spec.shape) that `parameter` has.
double block_error(const Parameter& parameter, const Tensor& part, const Tensor& whole);

}  // namespace palimpsest::mpi_test
