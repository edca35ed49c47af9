// A tiny hybrid model, all its sizes different, with all its memory, and batches for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "trainer/config.h"
#include "trainer/train_step.h"
#include "trainer/workbench.h"

namespace palimpsest::support {

// Resolved; precision f32 or f64; small sizes for every kind of mixer.
Config tiny_config(Precision precision = Precision::kF64,
                   std::vector<std::string> layers = {"kda", "gdn", "mla", "attention"});

// A batch that owns its memory. Documents follow each other; the last target of each is not scored.
class OwnedBatch {
 public:
  // tokens[i] is a document of at least one token.
  explicit OwnedBatch(const std::vector<std::vector<int32_t>>& documents);
  OwnedBatch(OwnedBatch&&) = default;  // vectors keep their elements where they are
  OwnedBatch(const OwnedBatch&) = delete;
  const ModelInput& input() const { return input_; }
  int64_t num_targets() const { return num_targets_; }
  // Takes the target at this position out of the score.
  void ignore_target(int64_t position);

 private:
  std::vector<int32_t> tokens_, targets_, positions_;
  int64_t num_targets_ = 0;
  ModelInput input_ = {.sequence = {.documents = Documents({0})}};
};

// Documents of these lengths with random tokens below vocab_size.
std::vector<std::vector<int32_t>> random_documents(const std::vector<int64_t>& lengths, int64_t vocab_size,
                                                   uint64_t seed);

// Workbench, allocated for training with micro-batches of up to max_tokens, initialised from the config's seed.
class TinyRun {
 public:
  explicit TinyRun(const Config& config, int64_t max_tokens = 256);

  Workbench& bench() { return *bench_; }
  ParameterRegistry& registry() { return bench_->registry(); }
  TrainStep& step() { return *step_; }
  Parameter& parameter(const std::string& name);

 private:
  std::unique_ptr<Workbench> bench_;
  std::unique_ptr<TrainStep> step_;
};

// Everything a step may change, in registry order: values, moments, and the counter at the end.
std::vector<double> state_of(TinyRun& run);
std::vector<double> gradients_of(ParameterRegistry& registry);

}  // namespace palimpsest::support
