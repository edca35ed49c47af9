// Memory of a run: the five regions everything numerical lives in, and how large they must be. The sizes come from a
// rehearsal, the same code on planning arenas, so they hold to the byte; what else a process is known to use is listed
// beside them, and the whole is printed before anything is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/arena.h"
#include "model/language_model.h"
#include "model/parameters.h"
#include "trainer/train_step.h"

namespace palimpsest {

// Of weights, gradients and moments, given the activations': f64 with f64, else f32.
inline DType parameter_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

struct RegionBytes {
  int64_t parameters = 0, gradients = 0, optimizer = 0, activations = 0, scratch = 0;
  int64_t total() const { return parameters + gradients + optimizer + activations + scratch; }
};

struct Regions {
  Arena parameters, gradients, optimizer, activations, scratch;

  static Regions planning(Device device);
  // Owns the bytes, uninitialised. Throws a UserError that names the region when there are not enough.
  Regions(Device device, const RegionBytes& bytes);
  RegionBytes peaks() const;

 private:
  explicit Regions(Device device);
};

// The largest batches that a run will pass to the model.
struct BatchLimits {
  int64_t train_rows = 0;  // of one micro-batch
  int64_t eval_rows = 0;   // of one evaluation batch; 0: no evaluation
  int64_t row_length = 0;  // tokens
};

// Binds the registry to planning arenas and runs one step (a micro-batch forward and backward, norm, AdamW) and one
// evaluation batch on them, once with rows as documents and once with documents of one token. Bind again before use.
RegionBytes rehearse_training(const LanguageModel& model, ParameterRegistry& registry, Device device,
                              const ActivationTypes& types, const BatchLimits& limits, const TrainStepOptions& options,
                              const Mesh& mesh = Mesh::single());
// The same for a model that only evaluates.
RegionBytes rehearse_evaluation(const LanguageModel& model, ParameterRegistry& registry, Device device,
                                const ActivationTypes& types, const BatchLimits& limits,
                                const Mesh& mesh = Mesh::single());

// What a rank takes in a step.
struct StepRows {
  int64_t rows = 0;         // of this rank's data share
  int64_t micro_batch = 0;  // most rows at once
  int64_t row_length = 0;   // tokens
};
// Bytes that this rank sends in such a step, from a rehearsal. Binds the registry to planning arenas.
SentBytes rehearse_step_bytes(const LanguageModel& model, ParameterRegistry& registry, Device device,
                              const ActivationTypes& types, const StepRows& rows, const TrainStepOptions& options,
                              const Mesh& mesh);
// A line for each axis on which something is sent.
std::string to_text(const SentBytes& bytes);

struct MemoryItem {
  std::string name;  // "parameters", "checkpoint snapshot"
  int64_t bytes = 0;
};
struct MemoryPlan {
  RegionBytes regions;
  std::vector<MemoryItem> others;  // beside the regions
  int64_t total() const;
  // What the communicators take of a GPU for copies between GPUs, once all is rehearsed.
  void add_copies(const Mesh& mesh);
};
// A line for each region and item, and the total.
std::string to_text(const MemoryPlan& plan);
double in_mib(int64_t bytes);

// Throws a UserError where an item beside the regions, which lies in the host's memory, needs more than this machine
// has, swap included. It is taken in small pieces: the system would hand out all of them, and kill the process in the
// end.
void check_machine_memory(const MemoryPlan& plan);

// This process so far, from the system; 0 where it does not say.
int64_t peak_resident_bytes();     // the most it ever held in memory (VmHWM)
int64_t current_resident_bytes();  // what it holds now (VmRSS)
// What the regions lie in: the process's peak on the CPU, what is taken of the GPU's memory on one.
int64_t memory_in_use(Device device);

}  // namespace palimpsest
