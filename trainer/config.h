// Everything a run is told, as plain structs read from one YAML file and `key=value` overrides. Each struct lists its
// fields once, in visit(): name, member, one line of help. Reader, printer, --explain, hash and comparison walk these
// lists, so a new field is one member and one line.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"
#include "model/config.h"
#include "model/language_model.h"

namespace palimpsest {

enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };
template <>
struct EnumNames<DeviceChoice> {
  static constexpr const char* values[] = {"auto", "cpu", "cuda"};
};

enum class Precision : uint8_t { kAuto, kF32, kBF16, kF64 };
template <>
struct EnumNames<Precision> {
  static constexpr const char* values[] = {"auto", "f32", "bf16", "f64"};
};

enum class ScheduleKind : uint8_t { kCosine, kWsd, kLinear, kConstant };
template <>
struct EnumNames<ScheduleKind> {
  static constexpr const char* values[] = {"cosine", "wsd", "linear", "constant"};
};

struct RunConfig {
  std::string dir = "auto";
  int64_t seed = 1;

  template <class V>
  void visit(V& v) {
    v("dir", dir, "folder of the run: config.yaml, metrics.jsonl, checkpoints/; auto: runs/<name of the config file>");
    v("seed", seed, "of the initial weights and of the order of the data");
  }
};

struct HardwareConfig {
  std::optional<double> peak_tflops;
  std::optional<int64_t> threads;

  template <class V>
  void visit(V& v) {
    v("peak_tflops", peak_tflops, "what mfu is a fraction of; null: the best of five f32 matrix products, measured");
    v("threads", threads, "threads of a rank on the CPU; null: as OpenMP decides");
  }
};

// One source of training text: a folder of shards, or one shard.
struct DataSource {
  std::string path;
  double weight = 1.0;

  template <class V>
  void visit(V& v) {
    v("path", path, "folder of token shards (*.h5, in name order), or one shard");
    v("weight", weight, "share of the rows drawn from it, relative to the other sources");
  }
  bool operator==(const DataSource&) const = default;
};

// An evaluation set.
inline constexpr std::string_view kBareEvalName = "eval";  // of a set given as a path without a name
struct NamedPath {
  std::string name;
  std::string path;
  bool operator==(const NamedPath&) const = default;
};

struct DataConfig {
  std::vector<DataSource> train;
  std::vector<NamedPath> eval;
  std::string tokenizer = "bytes";
  int64_t sequence_length = 1024;

  template <class V>
  void visit(V& v) {
    v("train", train, "token shards to train on: a path, or a list of {path, weight}");
    v("eval", eval, "token shards to evaluate on: a path, or a map of name: path");
    v("tokenizer", tokenizer, "bytes, or the path of a SentencePiece model, a tokenizer.json or a tiktoken.model");
    v("sequence_length", sequence_length, "targets in a row");
  }
};

struct TrainConfig {
  std::optional<int64_t> steps;
  std::optional<int64_t> tokens;
  int64_t sequences_per_step = 64;
  int64_t micro_batch = 8;
  int64_t eval_every = 0;
  std::optional<int64_t> eval_rows;
  std::optional<double> max_minutes;
  double z_loss = 0.0;
  ActivationCheckpointing activation_checkpointing = ActivationCheckpointing::kNone;
  int64_t max_skipped_steps = 10;

  template <class V>
  void visit(V& v) {
    v("steps", steps, "optimizer steps of the whole run; give this or tokens");
    v("tokens", tokens, "tokens of the whole run, rounded up to whole steps; give this or steps");
    v("sequences_per_step", sequences_per_step, "rows of one optimizer step, over all ranks");
    v("micro_batch", micro_batch, "most rows that one forward and backward takes, on one rank");
    v("eval_every", eval_every, "steps between evaluations on data.eval; the last step is always evaluated; 0: never");
    v("eval_rows", eval_rows, "most rows of each set that such an evaluation takes; null: all");
    v("max_minutes", max_minutes, "save and stop after this time; null: no limit");
    v("z_loss", z_loss, "weight of the squared log-normaliser of the logits, added to the loss; 0: none");
    v("activation_checkpointing", activation_checkpointing,
      "recompute in backward: none; selective, the feed-forward; full, all but the inputs of mixer and feed-forward");
    v("max_skipped_steps", max_skipped_steps, "stop after more than this many non-finite steps in a row");
  }
};

struct OptimizerConfig {
  double lr = 3e-4;
  std::array<double, 2> betas = {0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::optional<double> grad_clip = 1.0;

  template <class V>
  void visit(V& v) {
    v("lr", lr, "peak learning rate");
    v("betas", betas, "AdamW's decay rates of the first and second moment");
    v("eps", eps, "AdamW's term beside the root of the second moment");
    v("weight_decay", weight_decay, "decoupled decay of matrices and convolution kernels; norms and biases have none");
    v("grad_clip", grad_clip, "largest global gradient norm; null: no clipping");
  }
};

// Formulas: trainer/schedule.h.
struct ScheduleConfig {
  ScheduleKind kind = ScheduleKind::kCosine;
  int64_t warmup_steps = 0;
  std::optional<int64_t> decay_steps;
  double min_lr = 0.0;

  template <class V>
  void visit(V& v) {
    v("kind", kind,
      "after warm-up: cosine to min_lr; wsd, stable and then linear to min_lr; linear to min_lr; constant");
    v("warmup_steps", warmup_steps, "steps from 0 to lr, in a straight line");
    v("decay_steps", decay_steps,
      "length of wsd's decay at the end; null: a fifth of the steps; other kinds have no use");
    v("min_lr", min_lr, "learning rate of the last step (not of constant)");
  }
};

template <>
struct EnumNames<SequenceLayout> {
  static constexpr const char* values[] = {"contiguous", "zigzag"};
};

struct ParallelConfig {
  int64_t data = -1;
  int64_t sequence = 1;
  SequenceLayout sequence_layout = SequenceLayout::kContiguous;
  int64_t tensor = 1;
  int64_t zero = 1;
  double timeout_s = 300.0;

  template <class V>
  void visit(V& v) {
    v("data", data, "ranks that share the rows of a step; -1: all that sequence and tensor leave");
    v("sequence", sequence, "ranks that share the tokens of a row");
    v("sequence_layout", sequence_layout,
      "contiguous: each has one part of a row; zigzag: an early and a late one, which balances attention");
    v("tensor", tensor, "ranks that share heads, feed-forward columns and vocabulary");
    v("zero", zero, "sharded over data and sequence: 1, optimizer state; 2, gradients too; 3, parameters too");
    v("timeout_s", timeout_s, "seconds that a rank waits for the others before the job ends");
  }
};

struct CheckpointConfig {
  int64_t every = 100;
  int64_t keep_last = 2;
  int64_t keep_every = 0;
  bool background = true;

  template <class V>
  void visit(V& v) {
    v("every", every, "steps between checkpoints; the last step is always saved; 0: the last alone");
    v("keep_last", keep_last, "newest checkpoints that stay");
    v("keep_every", keep_every, "checkpoints at multiples of this many steps stay as well; 0: none");
    v("background", background, "write while training goes on");
  }
};

// Steps from the first to the second, counted from 1.
struct ProfileConfig {
  std::optional<std::array<int64_t, 2>> steps;

  template <class V>
  void visit(V& v) {
    v("steps", steps, "[first, last] step that a profiler watches on a GPU (cudaProfilerStart and Stop); null: none");
  }
};

struct Config {
  RunConfig run;
  DeviceChoice device = DeviceChoice::kAuto;
  Precision precision = Precision::kAuto;
  Precision residual = Precision::kAuto;
  std::string resume = "auto";
  std::optional<std::string> from;
  HardwareConfig hardware;
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  ParallelConfig parallel;
  CheckpointConfig checkpoint;
  ProfileConfig profile;

  template <class V>
  void visit(V& v) {
    v("run", run, "where a run lives and what it is seeded with");
    v("device", device, "cpu or cuda; auto: cuda where there is a GPU");
    v("precision", precision, "f32, bf16 (cuda) or f64 (cpu); auto: bf16 on cuda, f32 on the CPU");
    v("residual", residual,
      "type of the residual stream: as precision or the next wider; auto: f32 beside bf16, else as precision");
    v("resume", resume, "auto: continue run.dir if it holds a checkpoint; none: start afresh; or a checkpoint's path");
    v("from", from, "run, checkpoint or imported model whose weights are taken; null: none");
    v("hardware", hardware, "what the run stands on");
    v("model", model, "the model");
    v("data", data, "what is trained and evaluated on");
    v("train", train, "the training loop");
    v("optimizer", optimizer, "AdamW");
    v("schedule", schedule, "learning rate by step");
    v("parallel", parallel, "how ranks share the work");
    v("checkpoint", checkpoint, "when the state is saved, and how long it is kept");
    v("profile", profile, "what a profiler sees");
  }
};

// ---- reading: trainer/config_reader.cpp ----

// Reads a YAML file and then the overrides, "train.steps=10" or "optimizer.betas=[0.9, 0.99]", in order. Validates the
// result and replaces run.dir: auto. Throws a UserError of one line, "file:line:column: what is wrong and what would be
// right" or "override 'key=value': ...".
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {});
// The same from text; `name` stands for the file in messages.
Config parse_config(std::string_view text, const std::string& name, const std::vector<std::string>& overrides = {});

// ---- checking and resolving: trainer/config.cpp ----

// Values and combinations that make no sense for any command. Throws a UserError that begins with the field's key.
void validate(const Config& config);
// What train asks for beside that: data.train, and one of train.steps and train.tokens.
void validate_for_training(const Config& config);
// Replaces every remaining auto by what it means on this machine. Throws a UserError where the choice is not to be had.
Config resolve(Config config, bool has_cuda);

int64_t tokens_per_step(const Config& config);   // sequences_per_step * sequence_length
int64_t total_steps(const Config& config);       // train.steps, or train.tokens in whole steps
Device device_of(const Config& config);          // of a resolved config
ActivationTypes types_of(const Config& config);  // of a resolved config

// ---- printing and comparing: trainer/config.cpp ----

// YAML that parse_config reads back to the same values, every field of it.
std::string to_yaml(const Config& config);
// Every field: key, type, default, help; a line each.
std::string explain_config();
// 64-bit hash of to_yaml, 16 hexadecimal digits.
std::string hash_text(const Config& config);

struct ConfigDifference {
  std::string key;  // "model.kda.head_dim"
  std::string before, after;
};
std::vector<ConfigDifference> differences(const Config& before, const Config& after);
// Whether a field decides what the model computes, so that weights of one value do not mean the same with another:
// model.*, but for what only training asks for.
bool decides_computation(std::string_view key);
// For resuming a run saved with `saved` under `now`: throws a UserError that lists every key that decides_computation
// and differs; otherwise one line for each other key that differs and is worth a notice.
std::vector<std::string> resume_notices(const Config& saved, const Config& now);

}  // namespace palimpsest
