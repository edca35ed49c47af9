#include "trainer/config.h"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <utility>

#include "kernels/random.h"
#include "trainer/config_fields.h"
#include "trainer/yaml_tree.h"

namespace palimpsest {

namespace {

// Key and value in one line: "data.sequence_length is -5, must be at least 1".
template <class T>
void require(bool holds, std::string_view key, const T& value, std::string_view wanted) {
  if (!holds) throw_user_error(fmt::format("{} is {}, must be {}", key, value, wanted));
}

void validate_path(std::string_view key, const std::string& path) {
  if (path.empty()) throw_user_error(fmt::format("{} is empty, must be a path", key));
}

void validate(const RunConfig& run) {
  validate_path("run.dir", run.dir);
  require(run.seed >= 0, "run.seed", run.seed, "at least 0");
}

void validate(const HardwareConfig& hardware) {
  if (hardware.peak_tflops) {
    require(*hardware.peak_tflops > 0, "hardware.peak_tflops", *hardware.peak_tflops, "above 0, or null");
  }
  if (hardware.threads) {
    require(*hardware.threads >= 1 && *hardware.threads <= 1024, "hardware.threads", *hardware.threads,
            "from 1 to 1024, or null");
  }
}

void validate(const DataConfig& data) {
  for (size_t i = 0; i < data.train.size(); ++i) {
    const std::string key = data.train.size() == 1 ? "data.train" : fmt::format("data.train[{}]", i);
    validate_path(key, data.train[i].path);
    constexpr double kLargestWeight = 1e9;  // sums of weights stay finite
    require(data.train[i].weight > 0 && data.train[i].weight <= kLargestWeight, fmt::format("data.train[{}].weight", i),
            data.train[i].weight, "above 0 and at most 1e9");
  }
  for (const NamedPath& set : data.eval) {
    // The names become keys of metrics.jsonl and TensorBoard tags.
    const auto is_plain = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
    };
    bool plain = !set.name.empty();
    for (const char c : set.name) plain = plain && is_plain(c);
    if (!plain) {
      throw_user_error("data.eval has a set named ", quote(set.name), ", must be of letters, digits, '_' and '-'");
    }
    validate_path("data.eval." + quote(set.name), set.path);
  }
  validate_path("data.tokenizer", data.tokenizer);
  constexpr int64_t kLongestRow = int64_t{1} << 30;
  require(data.sequence_length >= 1, "data.sequence_length", data.sequence_length, "at least 1");
  require(data.sequence_length <= kLongestRow, "data.sequence_length", data.sequence_length, "at most 2^30");
}

void validate(const TrainConfig& train, int64_t sequence_length) {
  if (train.steps) require(*train.steps >= 1, "train.steps", *train.steps, "at least 1");
  if (train.tokens) require(*train.tokens >= 1, "train.tokens", *train.tokens, "at least 1");
  if (train.steps && train.tokens) {
    throw_user_error(
        "train.tokens and train.steps are both given, must be one of the two (train.steps=null drops one)");
  }
  constexpr int64_t kMostRows = int64_t{1} << 30;
  require(train.sequences_per_step >= 1 && train.sequences_per_step <= kMostRows, "train.sequences_per_step",
          train.sequences_per_step, "from 1 to 2^30");
  require(train.micro_batch >= 1 && train.micro_batch <= kMostRows, "train.micro_batch", train.micro_batch,
          "from 1 to 2^30");
  // Token positions within a micro-batch are 32-bit numbers.
  require(train.micro_batch <= INT32_MAX / sequence_length, "train.micro_batch", train.micro_batch,
          fmt::format("at most {} with a data.sequence_length of {}", INT32_MAX / sequence_length, sequence_length));
  require(train.eval_every >= 0, "train.eval_every", train.eval_every, "at least 0 (0: never)");
  if (train.eval_rows) require(*train.eval_rows >= 1, "train.eval_rows", *train.eval_rows, "at least 1, or null");
  if (train.max_minutes) {
    require(*train.max_minutes > 0, "train.max_minutes", *train.max_minutes, "above 0, or null");
  }
  require(train.z_loss >= 0, "train.z_loss", train.z_loss, "at least 0");
  require(train.max_skipped_steps >= 0, "train.max_skipped_steps", train.max_skipped_steps, "at least 0");
}

void validate(const OptimizerConfig& optimizer) {
  require(optimizer.lr >= 0, "optimizer.lr", optimizer.lr, "at least 0");
  for (const double beta : optimizer.betas)
    require(beta >= 0 && beta < 1, "optimizer.betas", beta, "from 0 to below 1");
  require(optimizer.eps > 0, "optimizer.eps", optimizer.eps, "above 0");
  require(optimizer.weight_decay >= 0, "optimizer.weight_decay", optimizer.weight_decay, "at least 0");
  if (optimizer.grad_clip) {
    require(*optimizer.grad_clip > 0, "optimizer.grad_clip", *optimizer.grad_clip, "above 0, or null");
  }
}

void validate(const ScheduleConfig& schedule, double lr) {
  require(schedule.warmup_steps >= 0, "schedule.warmup_steps", schedule.warmup_steps, "at least 0");
  if (schedule.decay_steps) {
    require(*schedule.decay_steps >= 0, "schedule.decay_steps", *schedule.decay_steps, "at least 0, or null");
  }
  require(schedule.min_lr >= 0, "schedule.min_lr", schedule.min_lr, "at least 0");
  require(schedule.min_lr <= lr, "schedule.min_lr", schedule.min_lr, fmt::format("at most optimizer.lr, {}", lr));
}

void validate(const ParallelConfig& parallel, int64_t sequence_length) {
  const auto require_size = [](std::string_view key, int64_t size) {
    require(size == -1 || size >= 1, key, size, "at least 1, or -1 for what the other axes leave");
  };
  require_size("parallel.data", parallel.data);
  require_size("parallel.sequence", parallel.sequence);
  const int64_t most = sequence_length / (parallel.sequence_layout == SequenceLayout::kZigzag ? 2 : 1);
  require(parallel.sequence <= most, "parallel.sequence", parallel.sequence,
          fmt::format("at most {}: the ranks share the {} tokens of a row", most, sequence_length));
  require_size("parallel.tensor", parallel.tensor);
  require(parallel.zero >= 1 && parallel.zero <= 3, "parallel.zero", parallel.zero, "1, 2 or 3");
  // A clock of nanoseconds ends at 9e9.
  require(parallel.timeout_s > 0 && parallel.timeout_s <= 1e9, "parallel.timeout_s", parallel.timeout_s,
          "above 0 and at most 1e9");
}

void validate(const CheckpointConfig& checkpoint) {
  require(checkpoint.every >= 0, "checkpoint.every", checkpoint.every, "at least 0 (0: at the end alone)");
  constexpr int64_t kMostKept = 10000;
  require(checkpoint.keep_last >= 1 && checkpoint.keep_last <= kMostKept, "checkpoint.keep_last", checkpoint.keep_last,
          fmt::format("from 1 to {}; keep_every keeps more", kMostKept));
  require(checkpoint.keep_every >= 0, "checkpoint.keep_every", checkpoint.keep_every, "at least 0 (0: none)");
}

const char* name_of(Precision precision) {
  return EnumNames<Precision>::values[static_cast<size_t>(precision)];
}

void validate_precision(const Config& config) {
  if (config.precision == Precision::kBF16 && config.device == DeviceChoice::kCpu) {
    throw_user_error("precision is bf16, must be f32 or f64 on the CPU: bf16 is for device: cuda");
  }
  if (config.precision == Precision::kF64 && config.device == DeviceChoice::kCuda) {
    throw_user_error("precision is f64, must be f32 or bf16 on a GPU: f64 is for device: cpu");
  }
  // The residual stream is as precision or the next wider, where both are known.
  const auto allows = [&](Precision wider) { return config.residual == config.precision || config.residual == wider; };
  const bool cuda = config.device == DeviceChoice::kCuda;
  if (config.residual == Precision::kAuto) return;
  if (config.precision == Precision::kBF16 && !allows(Precision::kF32))
    throw_user_error("residual is ", name_of(config.residual), ", must be bf16 or f32 with precision: bf16");
  if (config.precision == Precision::kF32 && !allows(cuda ? Precision::kF32 : Precision::kF64))
    throw_user_error("residual is ", name_of(config.residual), ", must be f32", cuda ? "" : " or f64",
                     " with precision: f32", cuda ? " on a GPU" : "");
  if (config.precision == Precision::kF64 && !allows(Precision::kF64))
    throw_user_error("residual is ", name_of(config.residual), ", must be f64 with precision: f64");
}

void validate(const ProfileConfig& profile) {
  if (!profile.steps) return;
  const auto [first, last] = *profile.steps;
  if (first < 1 || last < first)
    throw_user_error("profile.steps is [", first, ", ", last, "], must be [first, last] with 1 <= first <= last");
}

}  // namespace

void validate(const Config& config) {
  validate(config.run);
  validate_path("resume", config.resume);
  if (config.from) validate_path("from", *config.from);
  validate_precision(config);
  validate(config.hardware);
  validate(config.model);
  validate(config.data);
  constexpr int64_t kByteIds = 258;
  if (config.data.tokenizer == "bytes") {
    require(config.model.vocab_size >= kByteIds, "model.vocab_size", config.model.vocab_size,
            "at least 258, the ids of data.tokenizer: bytes");
  }
  validate(config.train, config.data.sequence_length);
  validate(config.optimizer);
  validate(config.schedule, config.optimizer.lr);
  validate(config.parallel, config.data.sequence_length);
  validate(config.checkpoint);
  validate(config.profile);
}

void validate_for_training(const Config& config) {
  if (config.data.train.empty()) {
    throw_user_error("data.train is missing: give a folder of token shards, as `palimpsest tokenize` writes them");
  }
  if (!config.train.steps && !config.train.tokens) {
    throw_user_error("train.steps is missing: give train.steps, or train.tokens in its place");
  }
}

Config resolve(Config config, bool has_cuda) {
  if (config.device == DeviceChoice::kAuto) config.device = has_cuda ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  const bool cuda = config.device == DeviceChoice::kCuda;
  if (cuda && !has_cuda)
    throw_user_error("device is cuda, but there is no GPU that this build can use; try device=cpu");
  if (config.precision == Precision::kAuto) config.precision = cuda ? Precision::kBF16 : Precision::kF32;
  // Said where there is a choice, so that a run resumes in the types that it began with.
  if (config.precision == Precision::kBF16 && config.residual == Precision::kAuto) config.residual = Precision::kF32;
  validate_precision(config);
  return config;
}

int64_t tokens_per_step(const Config& config) {
  return config.train.sequences_per_step * config.data.sequence_length;
}

int64_t total_steps(const Config& config) {
  if (config.train.steps) return *config.train.steps;
  CHECK(config.train.tokens.has_value(), "neither train.steps nor train.tokens is given");
  const int64_t step = tokens_per_step(config);
  return *config.train.tokens / step + (*config.train.tokens % step != 0 ? 1 : 0);
}

Device device_of(const Config& config) {
  CHECK(config.device != DeviceChoice::kAuto, "the config is not resolved");
  return config.device == DeviceChoice::kCuda ? Device::kCuda : Device::kCpu;
}

namespace {

DType dtype_of(Precision precision) {
  switch (precision) {
    case Precision::kF32:
      return DType::kF32;
    case Precision::kBF16:
      return DType::kBF16;
    case Precision::kF64:
      return DType::kF64;
    case Precision::kAuto:
      break;
  }
  CHECK(false, "the config is not resolved");
  return DType::kF32;
}

}  // namespace

ActivationTypes types_of(const Config& config) {
  const DType dtype = dtype_of(config.precision);
  return {dtype, config.residual == Precision::kAuto ? dtype : dtype_of(config.residual)};
}

std::string to_yaml(const Config& config) {
  std::string text;
  for (const ConfigField& field : list_fields(config)) {
    const size_t dot = field.key.rfind('.');
    size_t depth = 0;
    for (const char c : field.key) depth += c == '.' ? 1 : 0;
    text += std::string(2 * depth, ' ') + (dot == std::string::npos ? field.key : field.key.substr(dot + 1)) + ":";
    text += field.is_section ? "\n" : " " + field.value + "\n";
  }
  return text;
}

std::string explain_config() {
  std::string text;
  bool in_section = false;
  for (const ConfigField& field : list_fields(Config())) {
    if (field.is_section) {
      text += fmt::format("\n{}: {}\n", field.key, field.help);
      in_section = true;
      continue;
    }
    const bool is_nested = field.key.find('.') != std::string::npos;
    if (in_section && !is_nested) text += "\n";
    in_section = is_nested;
    text += fmt::format("{}{} ({}; default {}): {}\n", is_nested ? "  " : "", field.key, field.type, field.value,
                        field.help);
  }
  return text;
}

std::string hash_text(const Config& config) {
  return fmt::format("{:016x}", hash_of(to_yaml(config)));
}

namespace {

// One period of model.layers and many are the same model.
bool have_same_layers(const ModelConfig& a, const ModelConfig& b) {
  bool same = a.num_layers == b.num_layers && !a.layers.empty() && !b.layers.empty();
  for (int64_t i = 0; same && i < a.num_layers; ++i) same = a.layer_kind(i) == b.layer_kind(i);
  return same;
}

}  // namespace

std::vector<ConfigDifference> differences(const Config& before, const Config& after) {
  const std::vector<ConfigField> old_fields = list_fields(before);
  const std::vector<ConfigField> new_fields = list_fields(after);
  std::vector<ConfigDifference> result;
  for (size_t i = 0; i < old_fields.size(); ++i) {
    if (old_fields[i].value == new_fields[i].value) continue;
    if (old_fields[i].key == "model.layers" && have_same_layers(before.model, after.model)) continue;
    result.push_back({old_fields[i].key, old_fields[i].value, new_fields[i].value});
  }
  return result;
}

bool decides_computation(std::string_view key) {
  return key.starts_with("model.") && key != "model.initializer_range" && key != "model.moe.router_bias_update_speed" &&
         key != "model.moe.router_aux_loss_coef";
}

std::vector<std::string> resume_notices(const Config& saved, const Config& now) {
  std::string fixed;
  std::vector<std::string> notices;
  for (const ConfigDifference& difference : differences(saved, now)) {
    const std::string& key = difference.key;
    // Where the run lies, and what it is to go on from, say nothing about its course.
    if (key == "run.dir" || key == "resume") continue;
    if (key == "from") {
      if (now.from) notices.push_back(fmt::format("from is {}, but the run keeps its own weights", difference.after));
    } else if (decides_computation(key)) {
      fixed +=
          fmt::format("{}{} ({} there, {} here)", fixed.empty() ? "" : ", ", key, difference.before, difference.after);
    } else {
      notices.push_back(fmt::format("{} was {} and is now {}", key, difference.before, difference.after));
    }
  }
  if (!fixed.empty()) {
    throw_user_error("the checkpoint is of another model: ", fixed, "; set these back, or give another run.dir");
  }
  return notices;
}

}  // namespace palimpsest
