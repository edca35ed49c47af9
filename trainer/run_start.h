// Where a run begins: from initial weights, from the weights of another run, or where its own checkpoint left off.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainer/checkpoint_manifest.h"
#include "trainer/config.h"
#include "trainer/console.h"
#include "trainer/workbench.h"

namespace palimpsest {

struct RunStart {
  TrainState state;                    // of the checkpoint; step 0 for a new run
  std::vector<int64_t> damaged_steps;  // of newer checkpoints, which could not be used
};

// Fills weights and moments of an allocated workbench, on every rank of its mesh together. resume: auto continues from
// the newest whole checkpoint in run.dir, none asks for a run.dir without any, a path continues from there. Throws a
// UserError when the checkpoint is of another model, or when the new run would mix with an old one in run.dir.
RunStart start_run(const Config& config, Workbench& bench, Console& console);

struct PlannedStart {
  std::string words;                 // "continues from PATH" or the like
  TrainState state;                  // of the checkpoint; step 0 for a new run
  std::vector<std::string> notices;  // what start_run would warn of
};

// For --dry-run: where start_run would begin. Throws as it would, but for damage that only the tensors themselves show;
// changes nothing.
PlannedStart planned_start(const Config& config, const Workbench& bench);

// For commands that only use a model: the weights of `from`, or of run.dir where there is no `from`. Throws a UserError
// when they are of another model.
void load_trained_weights(const Config& config, Workbench& bench, Console& console);

// For a new run from a public model, or from a run or checkpoint that goes back to one: what `export hf` needs of it
// (trainer/hf_folder.h), into run.dir.
void keep_public_files(const Config& config, const ParameterRegistry& registry);

}  // namespace palimpsest
