#include "trainer/run_start.h"

#include <algorithm>

#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/run_setup.h"

namespace palimpsest {

namespace {

// "model.kda.num_heads (4 there, 8 here), ..."; empty when the models are equal.
std::string model_differences(const CheckpointReader& checkpoint, const Config& config) {
  const Config saved = parse_config(checkpoint.manifest().header.config, checkpoint.folder());
  std::string text;
  for (const ConfigDifference& difference : differences(saved, config))
    if (difference.key.starts_with("model."))
      text += (text.empty() ? "" : ", ") + difference.key + " (" + difference.before + " there, " + difference.after +
              " here)";
  return text;
}

void report_skipped(const NewestCheckpoint& newest, Console& console) {
  for (const SkippedCheckpoint& skipped : newest.skipped)
    console.warning("skipped checkpoint " + skipped.path + ": " + skipped.reason);
}

std::vector<int64_t> damaged_steps(const NewestCheckpoint& newest) {
  std::vector<int64_t> steps;
  for (const SkippedCheckpoint& skipped : newest.skipped) steps.push_back(skipped.step);
  return steps;
}

// The newest step that run.dir holds a finished checkpoint of; 0 when there is none.
int64_t newest_step(const Config& config) {
  int64_t newest = 0;
  for (const CheckpointEntry& entry : list_checkpoints(checkpoint_path(config)))
    if (entry.has_manifest) newest = std::max(newest, entry.step);
  return newest;
}

// Resumes from the checkpoint that `use` is called with.
class Resume {
 public:
  Resume(const Config& config, Workbench& bench) : config_(config), bench_(bench) {}

  void operator()(CheckpointReader& checkpoint) {
    const CheckpointHeader& header = checkpoint.manifest().header;
    notices_ = resume_notices(parse_config(header.config, checkpoint.folder()), config_);
    checkpoint.load(bench_.registry(), CheckpointContent::kWeightsAndOptimizer);
    state_ = header.state;
  }

  RunStart finish(const NewestCheckpoint& newest, Console& console) const {
    report_skipped(newest, console);
    for (const std::string& notice : notices_) console.warning("resume: " + notice);
    console.info("resumed from " + *newest.path + " at step " + std::to_string(state_.step));
    return {.state = state_, .damaged_steps = damaged_steps(newest)};
  }

 private:
  const Config& config_;
  Workbench& bench_;
  TrainState state_;
  std::vector<std::string> notices_;
};

// A run that goes on from elsewhere must not leave newer checkpoints of an older course beside its own.
RunStart resume_from_path(const Config& config, Workbench& bench, Console& console) {
  Resume resume(config, bench);
  const NewestCheckpoint newest = use_checkpoint(config.resume, std::ref(resume));
  RunStart start = resume.finish(newest, console);
  const int64_t in_folder = newest_step(config);
  if (in_folder > start.state.step)
    throw_user_error("resume is ", *newest.path, ", at step ", start.state.step, ", but ", checkpoint_path(config),
                     " holds step ", in_folder, " already; give another run.dir, or remove the newer checkpoints");
  return start;
}

void use_other_weights(const Config& config, Workbench& bench, Console& console) {
  std::string other;
  const NewestCheckpoint newest = use_checkpoint(*config.from, [&](CheckpointReader& checkpoint) {
    other = model_differences(checkpoint, config);
    checkpoint.load(bench.registry(), CheckpointContent::kWeights);
  });
  report_skipped(newest, console);
  if (!other.empty()) console.warning("from: the weights were trained as another model: " + other);
  console.info("weights from " + *newest.path);
}

RunStart start_new(const Config& config, Workbench& bench, Console& console) {
  if (config.from) {
    use_other_weights(config, bench, console);
  } else {
    bench.registry().initialize(static_cast<uint64_t>(config.run.seed), config.model.initializer_range);
  }
  bench.registry().zero_optimizer(bench.stream());
  RunStart start;
  start.state.seed = config.run.seed;
  return start;
}

}  // namespace

RunStart start_run(const Config& config, Workbench& bench, Console& console) {
  if (config.resume == "none") {
    if (const int64_t step = newest_step(config); step > 0)
      throw_user_error("resume is none, but ", checkpoint_path(config), " holds a run at step ", step,
                       "; resume: auto continues it, another run.dir starts a new one");
    return start_new(config, bench, console);
  }
  if (config.resume != "auto") return resume_from_path(config, bench, console);
  Resume resume(config, bench);
  const NewestCheckpoint newest = use_newest_checkpoint(checkpoint_path(config), std::ref(resume));
  if (newest.path) return resume.finish(newest, console);
  report_skipped(newest, console);
  return start_new(config, bench, console);
}

void load_trained_weights(const Config& config, Workbench& bench, Console& console) {
  const std::string path = config.from.value_or(config.run.dir);
  const NewestCheckpoint newest = use_checkpoint(path, [&](CheckpointReader& checkpoint) {
    if (const std::string other = model_differences(checkpoint, config); !other.empty())
      throw_user_error(checkpoint.folder(), " is of another model: ", other, "; set these as they are there");
    checkpoint.load(bench.registry(), CheckpointContent::kWeights);
  });
  report_skipped(newest, console);
  console.info("weights from " + *newest.path);
}

}  // namespace palimpsest
