// A hybrid model (KDA, GDN, MLA, softmax attention, RetNet; grouped heads) on any mesh, with all its memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/language_model.h"
#include "model/local_input.h"
#include "tests/support/tiny_run.h"
#include "trainer/memory_plan.h"
#include "trainer/train_step.h"

namespace palimpsest::mpi_test {

// Vocabulary 53, which no degree divides; 2 key heads for 4 value heads, 2 key/value heads for 4 query heads.
ModelConfig grouped_hybrid();

class MeshRun {
 public:
  // Initial weights are those of one rank, whatever the mesh. max_tokens: of one micro-batch.
  MeshRun(const ModelConfig& config, const Mesh& mesh, DType dtype, const TrainStepOptions& options, int64_t max_tokens,
          int64_t zero = 1, Device device = Device::kCpu);

  ParameterRegistry& registry() { return registry_; }
  const LanguageModel& model() const { return model_; }
  TrainStep& step() { return *step_; }
  Context context() {
    return {
        .stream = *stream_, .activations = regions_->activations, .dtype = dtype_, .mesh = mesh_, .hooks = &*values_};
  }
  RegionBytes regions() const { return regions_->peaks(); }

 private:
  const Mesh& mesh_;
  DType dtype_;
  ParameterRegistry registry_;
  LanguageModel model_;
  std::optional<Regions> regions_;
  std::optional<Stream> stream_;
  std::optional<WholeValues> values_;
  std::optional<TrainStep> step_;
  std::optional<SharedMemory> shared_memory_;
};

// norm(part - whole) / norm(whole), where `whole` has spec.shape and `part` is, of the block of it that `parameter`
// has, the rows from first_row on.
double block_error(const Parameter& parameter, const Tensor& part, const Tensor& whole, int64_t first_row = 0);

// Eight rows of documents, cut into micro-batches as data ranks have them: each rank `count` of them, some without
// targets, and together every row once. Sequence ranks have their part of each.
class SharedBatch {
 public:
  SharedBatch(int64_t vocab_size, uint64_t seed, const Mesh& mesh, int64_t count);
  const std::vector<ModelInput>& micro_batches() const { return inputs_; }
  int64_t num_targets() const { return num_targets_; }  // of all ranks
  static constexpr int64_t kMaxTokens = 300;

 private:
  std::vector<support::OwnedBatch> batches_;
  std::vector<LocalInput> parts_;
  std::vector<ModelInput> inputs_;
  int64_t num_targets_ = 0;
};

}  // namespace palimpsest::mpi_test
