// A training run before anything is allocated or written: its data opened and checked, its model declared, its memory
// planned. `train` goes on from here; `train --dry-run` prints it and stops.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/loader.h"
#include "trainer/checkpoint_manifest.h"
#include "trainer/config.h"
#include "trainer/console.h"
#include "trainer/evaluation.h"
#include "trainer/memory_plan.h"
#include "trainer/workbench.h"

namespace palimpsest {

class RunSetup {
 public:
  // `config` is resolved; the mesh must outlive the setup. Every rank makes one. Throws a UserError where config, data,
  // model and mesh do not fit each other.
  explicit RunSetup(const Config& config, const Mesh& mesh = Mesh::single());
  RunSetup(const RunSetup&) = delete;
  RunSetup& operator=(const RunSetup&) = delete;

  const Config& config() const { return config_; }
  const TrainingData& data() const { return data_; }
  const std::vector<EvalSet>& eval_sets() const { return eval_sets_; }
  const Mesh& mesh() const { return bench_.mesh(); }
  Workbench& bench() { return bench_; }
  const MemoryPlan& plan() const { return plan_; }
  const SentBytes& step_bytes() const { return step_bytes_; }  // that this rank sends in a step
  int64_t snapshot_bytes() const { return snapshot_bytes_; }   // 0 when saves are not in the background

  // Throws on all ranks unless every rank sees the same data.
  void check_same_data() const;

  // Config, data, parameters, decay groups, FLOPs, memory: what a run prints first. With notices on what is legal but
  // may surprise.
  void print(Console& console) const;

 private:
  MemoryPlan make_plan();

  Config config_;
  TrainingData data_;
  std::vector<EvalSet> eval_sets_;
  Workbench bench_;
  int64_t snapshot_bytes_ = 0;
  SentBytes step_bytes_;
  MemoryPlan plan_;
};

// This rank's share of the steps after `state`.
LoaderOptions loader_options(const Config& config, const TrainState& state, const Mesh& mesh);
// What a run says that is at its end already.
std::string nothing_to_do(const TrainState& state, int64_t total_steps);

std::string config_path(const Config& config);      // <run.dir>/config.yaml
std::string checkpoint_path(const Config& config);  // <run.dir>/checkpoints

// Every rank's setup, or RanksFailed on all.
std::unique_ptr<RunSetup> set_up_ranks(const Config& config, const Mesh& mesh);

// --dry-run: prints the setup, where the run would start, and the first batch, decoded.
void dry_run(const Config& config, const Mesh& mesh, Console& console);

}  // namespace palimpsest
