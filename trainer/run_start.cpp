#include "trainer/run_start.h"

#include <algorithm>
#include <filesystem>

#include "parallel/agreement.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/hf_folder.h"
#include "trainer/run_setup.h"

namespace palimpsest {

namespace {

Config saved_config(const CheckpointReader& checkpoint) {
  return parse_config(checkpoint.manifest().header.config, checkpoint.folder());
}

// "model.kda.num_heads (4 there, 8 here), ..."; empty when the models compute the same.
std::string model_differences(const Config& saved, const Config& config) {
  std::string text;
  for (const ConfigDifference& difference : differences(saved, config))
    if (decides_computation(difference.key))
      text += (text.empty() ? "" : ", ") + difference.key + " (" + difference.before + " there, " + difference.after +
              " here)";
  return text;
}

// Loads behind a progress bar.
void load(CheckpointReader& checkpoint, Workbench& bench, CheckpointContent content, Console& console) {
  int64_t bytes = 0;
  for (const CheckpointBlock& block : wanted_blocks(bench.registry(), content)) bytes += block.tensor.bytes();
  ProgressBar progress(console, "load " + checkpoint.folder(), bytes, "", ProgressBar::Unit::kBytes);
  checkpoint.load(bench.registry(), content, [&](int64_t read) { progress.add(read); });
}

// What was passed over on the way to the checkpoint that a run starts from, and what of its config has changed since.
std::vector<std::string> notices_of(const NewestCheckpoint& newest, const std::vector<std::string>& changes = {}) {
  std::vector<std::string> notices;
  for (const SkippedCheckpoint& skipped : newest.skipped) notices.push_back(to_text(skipped));
  for (const std::string& change : changes) notices.push_back("resume: " + change);
  return notices;
}

void warn_of(const std::vector<std::string>& notices, Console& console) {
  for (const std::string& notice : notices) console.warning(notice);
}

std::vector<int64_t> damaged_steps(const NewestCheckpoint& newest) {
  std::vector<int64_t> steps;
  for (const SkippedCheckpoint& skipped : newest.skipped) steps.push_back(skipped.step);
  return steps;
}

// Each rank has read the rows of its shard.
void complete_values(Workbench& bench) {
  Context context = bench.context();
  context.hooks->values_changed(context);
}

// The newest step that run.dir holds a finished checkpoint of; 0 when there is none.
int64_t newest_step(const Config& config, Communicator& world) {
  int64_t newest = 0;
  for (const CheckpointEntry& entry : list_checkpoints(checkpoint_path(config)))
    if (entry.has_manifest) newest = std::max(newest, entry.step);
  return max_over(world, newest);
}

// Resumes from the checkpoint that `use` is called with.
class Resume {
 public:
  Resume(const Config& config, Workbench& bench, Console& console)
      : config_(config), bench_(bench), console_(console) {}

  void operator()(CheckpointReader& checkpoint) {
    const CheckpointHeader& header = checkpoint.manifest().header;
    changes_ = resume_notices(saved_config(checkpoint), config_);
    load(checkpoint, bench_, CheckpointContent::kWeightsAndOptimizer, console_);
    state_ = header.state;
  }

  RunStart finish(const NewestCheckpoint& newest) const {
    complete_values(bench_);
    warn_of(notices_of(newest, changes_), console_);
    console_.info("resumed from " + *newest.path + " at step " + std::to_string(state_.step));
    return {.state = state_, .damaged_steps = damaged_steps(newest)};
  }

 private:
  const Config& config_;
  Workbench& bench_;
  Console& console_;
  TrainState state_;
  std::vector<std::string> changes_;
};

void refuse_to_start_over(const Config& config, Communicator& world) {
  const int64_t step = newest_step(config, world);
  agree(world, [&] {
    if (step > 0)
      throw_user_error("resume is none, but ", checkpoint_path(config), " holds a run at step ", step,
                       "; resume: auto continues it, another run.dir starts a new one");
  });
}

// A run that goes on from elsewhere must not leave newer checkpoints of an older course beside its own.
void refuse_to_fall_behind(const Config& config, Communicator& world, const std::string& from, int64_t step) {
  const int64_t in_folder = newest_step(config, world);
  agree(world, [&] {
    if (in_folder > step)
      throw_user_error("resume is ", from, ", at step ", step, ", but ", checkpoint_path(config), " holds step ",
                       in_folder, " already; give another run.dir, or remove the newer checkpoints");
  });
}

RunStart resume_from_path(const Config& config, Workbench& bench, Console& console) {
  Resume resume(config, bench, console);
  const NewestCheckpoint newest = use_checkpoint(config.resume, std::ref(resume), bench.mesh().world());
  RunStart start = resume.finish(newest);
  refuse_to_fall_behind(config, bench.mesh().world(), *newest.path, start.state.step);
  return start;
}

void use_other_weights(const Config& config, Workbench& bench, Console& console) {
  std::string other;
  const NewestCheckpoint newest = use_checkpoint(
      *config.from,
      [&](CheckpointReader& checkpoint) {
        other = model_differences(saved_config(checkpoint), config);
        load(checkpoint, bench, CheckpointContent::kWeights, console);
      },
      bench.mesh().world());
  complete_values(bench);
  warn_of(notices_of(newest), console);
  if (!other.empty()) console.warning("from: the weights were trained as another model: " + other);
  console.info("weights from " + *newest.path);
}

// A public model's folder whose model is that of the config.
HfFolder open_hf_folder(const std::string& path, const Config& config) {
  HfFolder folder(path);
  Config imported = config;
  imported.model = folder.model.config;
  if (const std::string other = model_differences(imported, config); !other.empty())
    throw_user_error(path, " is another model: ", other, "; set these as they are there");
  return folder;
}

// Weights straight from a public model's folder.
void use_hf_weights(const std::string& path, const Config& config, Workbench& bench, Console& console) {
  const HfFolder folder = open_hf_folder(path, config);
  const HfWeights weights(folder.tensors, folder.model, bench.registry());
  const std::vector<CheckpointBlock> blocks = wanted_blocks(bench.registry(), CheckpointContent::kWeights);
  int64_t bytes = 0;
  for (const CheckpointBlock& block : blocks) bytes += block.tensor.bytes();
  ProgressBar progress(console, "load " + path, bytes, "", ProgressBar::Unit::kBytes);
  for (const CheckpointBlock& block : blocks) {
    weights.read(block);
    progress.add(block.tensor.bytes());
  }
  for (const std::string& notice : weights.notices()) console.warning(notice);
  console.info("weights from " + path);
}

RunStart start_new(const Config& config, Workbench& bench, Console& console) {
  if (config.from && is_hf_folder(*config.from)) {
    agree(bench.mesh().world(), [&] { use_hf_weights(*config.from, config, bench, console); });
    complete_values(bench);
  } else if (config.from) {
    use_other_weights(config, bench, console);
  } else {
    ProgressBar progress(console, "draw initial weights", bench.registry().num_elements(), "numbers");
    bench.registry().initialize(static_cast<uint64_t>(config.run.seed), config.model.initializer_range,
                                [&](int64_t elements) { progress.add(elements); });
  }
  bench.registry().zero_optimizer(bench.stream());
  RunStart start;
  start.state.seed = config.run.seed;
  return start;
}

// "with the weights of PATH" or the like, for a new run.
std::string planned_weights(const Config& config, const Workbench& bench) {
  Communicator& world = bench.mesh().world();
  if (!config.from) return "from initial weights";
  if (is_hf_folder(*config.from)) {
    agree(world, [&] {
      const HfFolder folder = open_hf_folder(*config.from, config);
      HfWeights(folder.tensors, folder.model, bench.registry());
    });
    return "with the weights of " + *config.from;
  }
  const auto take_weights = [&](CheckpointReader& checkpoint) {
    saved_config(checkpoint);  // one that cannot be read is an error
    checkpoint.check_parameters(bench.registry(), CheckpointContent::kWeights);
  };
  return "with the weights of " + *use_checkpoint(*config.from, take_weights, world).path;
}

}  // namespace

RunStart start_run(const Config& config, Workbench& bench, Console& console) {
  if (config.resume == "none") {
    refuse_to_start_over(config, bench.mesh().world());
    return start_new(config, bench, console);
  }
  if (config.resume != "auto") return resume_from_path(config, bench, console);
  Resume resume(config, bench, console);
  const NewestCheckpoint newest =
      use_newest_checkpoint(checkpoint_path(config), std::ref(resume), bench.mesh().world());
  if (newest.path) return resume.finish(newest);
  warn_of(notices_of(newest), console);
  return start_new(config, bench, console);
}

PlannedStart planned_start(const Config& config, const Workbench& bench) {
  Communicator& world = bench.mesh().world();
  PlannedStart start;
  std::vector<std::string> changes;
  const auto resume = [&](CheckpointReader& checkpoint) {
    changes = resume_notices(saved_config(checkpoint), config);
    checkpoint.check_parameters(bench.registry(), CheckpointContent::kWeightsAndOptimizer);
    start.state = checkpoint.manifest().header.state;
  };
  NewestCheckpoint continued;
  if (config.resume == "auto") {
    continued = use_newest_checkpoint(checkpoint_path(config), resume, world);
  } else if (config.resume == "none") {
    refuse_to_start_over(config, world);
  } else {
    continued = use_checkpoint(config.resume, resume, world);
    refuse_to_fall_behind(config, world, *continued.path, start.state.step);
  }
  if (!continued.path) changes.clear();  // since a checkpoint that could not be used
  start.notices = notices_of(continued, changes);
  if (continued.path) {
    start.words = "continues from " + *continued.path;
    return start;
  }
  start.state = {};  // of a checkpoint that could not be used
  start.words = "starts " + planned_weights(config, bench);
  return start;
}

void load_trained_weights(const Config& config, Workbench& bench, Console& console) {
  const std::string path = config.from.value_or(config.run.dir);
  if (is_hf_folder(path)) {
    agree(bench.mesh().world(), [&] { use_hf_weights(path, config, bench, console); });
    complete_values(bench);
    return;
  }
  std::string tokenizer;
  const NewestCheckpoint newest = use_checkpoint(
      path,
      [&](CheckpointReader& checkpoint) {
        const Config saved = saved_config(checkpoint);
        if (const std::string other = model_differences(saved, config); !other.empty())
          throw_user_error(checkpoint.folder(), " is of another model: ", other, "; set these as they are there");
        tokenizer = saved.data.tokenizer;
        load(checkpoint, bench, CheckpointContent::kWeights, console);
      },
      bench.mesh().world());
  complete_values(bench);
  if (std::filesystem::path(tokenizer).filename() != std::filesystem::path(config.data.tokenizer).filename())
    console.warning("data.tokenizer is " + config.data.tokenizer + ", the model was trained with " + tokenizer);
  warn_of(notices_of(newest), console);
  console.info("weights from " + *newest.path);
}

void keep_public_files(const Config& config, const ParameterRegistry& registry) {
  if (!config.from) return;
  const std::string to = config.run.dir + "/" + kKeptFolder;
  if (is_hf_folder(*config.from)) {
    const HfFolder folder(*config.from);
    keep_hf_files(folder, HfWeights(folder.tensors, folder.model, registry).unknown(), to);
  } else if (const auto kept = find_kept_files(*config.from)) {
    copy_kept_files(*kept, to);
  }
}

}  // namespace palimpsest
