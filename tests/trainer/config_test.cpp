#include "trainer/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "model/mixers.h"
#include "tests/support/files.h"
#include "trainer/config_fields.h"

namespace palimpsest {
namespace {

// Every kind of field.
constexpr const char* kExample = R"(
run:       {dir: runs/a, seed: 7}
device:    cpu
precision: f64
from:      runs/b
hardware:  {peak_tflops: 0.2, threads: 2}
model:
  vocab_size: 1000
  hidden_size: 96
  num_layers: 5
  layers: [kda, gdn, mla]       # repeated over the depth
  norm: one_centred
  tie_embeddings: true
  kda: {num_heads: 3, head_dim: 32, conv_size: 4, gate_lower_bound: -5}
  gdn:
    num_heads: 2
    num_value_heads: 4
  mla: {q_lora_rank: null, kv_lora_rank: 48, rope: interleaved}
data:
  train: [{path: "a b", weight: 2.5}, plain/path]
  eval: {bible: one.h5, news-2: two.h5}
  tokenizer: path.model
  sequence_length: 4096
train:     {tokens: 1e6, sequences_per_step: 6, micro_batch: 4, max_minutes: 1.5, activation_checkpointing: selective}
optimizer: {lr: 3.0e-4, betas: [0.8, 0.99], grad_clip: null}
schedule:  {kind: wsd, warmup_steps: 10, decay_steps: 20, min_lr: 3.0e-5}
parallel:  {data: 1, timeout_s: 20}
checkpoint: {every: 7, background: false}
)";

TEST(Config, ReadsEveryKindOfField) {
  const Config config = parse_config(kExample, "example.yaml");
  EXPECT_EQ(config.run.dir, "runs/a");
  EXPECT_EQ(config.run.seed, 7);
  EXPECT_EQ(config.device, DeviceChoice::kCpu);
  EXPECT_EQ(config.precision, Precision::kF64);
  EXPECT_EQ(config.resume, "auto");
  EXPECT_EQ(config.from, "runs/b");
  EXPECT_EQ(config.hardware.peak_tflops, 0.2);
  EXPECT_EQ(config.hardware.threads, 2);
  EXPECT_EQ(config.model.layers, (std::vector<std::string>{"kda", "gdn", "mla"}));
  EXPECT_EQ(config.model.norm, NormWeight::kOneCentred);
  EXPECT_TRUE(config.model.tie_embeddings);
  EXPECT_EQ(config.model.kda.gate_lower_bound, -5.0);
  EXPECT_EQ(config.model.gdn.num_value_heads, 4);
  EXPECT_EQ(config.model.gdn.head_dim, 128);  // a default
  EXPECT_EQ(config.model.mla.q_lora_rank, std::nullopt);
  EXPECT_EQ(config.model.mla.rope, RopeKind::kInterleaved);
  EXPECT_EQ(config.data.train, (std::vector<DataSource>{{"a b", 2.5}, {"plain/path", 1.0}}));
  EXPECT_EQ(config.data.eval, (std::vector<NamedPath>{{"bible", "one.h5"}, {"news-2", "two.h5"}}));
  EXPECT_EQ(config.train.steps, std::nullopt);
  EXPECT_EQ(config.train.tokens, 1000000);
  EXPECT_EQ(config.train.max_minutes, 1.5);
  EXPECT_EQ(config.train.activation_checkpointing, ActivationCheckpointing::kSelective);
  EXPECT_EQ(config.optimizer.lr, 3e-4);
  EXPECT_EQ(config.optimizer.betas, (std::array<double, 2>{0.8, 0.99}));
  EXPECT_EQ(config.optimizer.grad_clip, std::nullopt);
  EXPECT_EQ(config.schedule.kind, ScheduleKind::kWsd);
  EXPECT_EQ(config.parallel.timeout_s, 20.0);
  EXPECT_FALSE(config.checkpoint.background);
  EXPECT_EQ(tokens_per_step(config), 6 * 4096);
  EXPECT_EQ(total_steps(config), 41);  // 1e6 / 24576 = 40.69
}

TEST(Config, AFileMayLeaveEverythingOut) {
  const Config config = parse_config("", "runs/x/small.yaml");
  EXPECT_EQ(config.run.dir, "runs/small");
  EXPECT_EQ(config.model.layers, (std::vector<std::string>{"kda", "kda", "kda", "mla"}));
  EXPECT_EQ(to_yaml(parse_config("train:\nmodel:\n  kda:\n", "runs/x/small.yaml")), to_yaml(config));
}

TEST(Config, ABarePathIsOneSource) {
  const Config config = parse_config("data: {train: shards/, eval: held-out/}", "c.yaml");
  EXPECT_EQ(config.data.train, (std::vector<DataSource>{{"shards/", 1.0}}));
  EXPECT_EQ(config.data.eval, (std::vector<NamedPath>{{"eval", "held-out/"}}));
}

TEST(Config, OverridesComeLastAndMerge) {
  const Config config = parse_config(
      kExample, "example.yaml",
      {"optimizer.lr=1e-3", "model.kda={head_dim: 64}", "model.layers=[gdn]", "data.eval.all=a=b.h5", "data.train=x y",
       "from=null", "optimizer.lr=2e-3", "train.tokens=null", "train.steps= 12", "run.dir='null'"});
  EXPECT_EQ(config.optimizer.lr, 2e-3);
  EXPECT_EQ(config.model.kda.head_dim, 64);
  EXPECT_EQ(config.model.kda.num_heads, 3);  // from the file
  EXPECT_EQ(config.model.layers, std::vector<std::string>{"gdn"});
  EXPECT_EQ(config.data.eval, (std::vector<NamedPath>{{"all", "a=b.h5"}}));
  EXPECT_EQ(config.data.train, (std::vector<DataSource>{{"x y", 1.0}}));
  EXPECT_EQ(config.from, std::nullopt);
  EXPECT_EQ(total_steps(config), 12);
  EXPECT_EQ(config.run.dir, "null");
}

TEST(Config, PrintedConfigReadsBackIdentically) {
  Config config = parse_config(kExample, "example.yaml");
  config.optimizer.lr = 0.1 + 0.2;
  config.optimizer.eps = 5e-324;
  config.optimizer.weight_decay = 1.7976931348623157e308;
  config.run.seed = INT64_MAX;
  config.train.max_minutes = 1e22;
  for (const char* text : {"null",
                           "~",
                           "true",
                           "No",
                           "1e3",
                           ".5",
                           "-",
                           "- a",
                           "a: b",
                           "#c",
                           "a #b",
                           " lead",
                           "trail ",
                           "'",
                           "\"",
                           "\\",
                           "a\nb",
                           "tab\there",
                           "&x",
                           "*x",
                           "!t",
                           "{a",
                           "[a]",
                           "a, b",
                           "%d",
                           "@",
                           "`",
                           "\x01\x7f",
                           "\xc3\xa9\xe2\x80\xa8\xc2\x85\xf0\x9f\x98\x80",
                           ".",
                           "..",
                           "./a",
                           ".inf",
                           "0x1f",
                           "=",
                           "?",
                           "? a",
                           ": a",
                           "<<",
                           "---",
                           "..."}) {
    config.run.dir = text;
    config.from = text;
    config.data.train = {{text, 1.0}, {"b", 0.3}};
    config.data.eval = {{"x", text}};
    const std::string printed = to_yaml(config);
    const Config again = parse_config(printed, "printed.yaml");
    EXPECT_EQ(to_yaml(again), printed) << text;
    EXPECT_EQ(again.run.dir, text);
    EXPECT_EQ(again.from, text);
    EXPECT_EQ(again.data.train, config.data.train) << text;
    EXPECT_EQ(again.data.eval, config.data.eval) << text;
    EXPECT_EQ(again.optimizer.lr, config.optimizer.lr);
    EXPECT_EQ(again.optimizer.eps, config.optimizer.eps);
    EXPECT_EQ(again.optimizer.weight_decay, config.optimizer.weight_decay);
    EXPECT_EQ(again.run.seed, config.run.seed);
    EXPECT_EQ(again.train.max_minutes, config.train.max_minutes);
  }
}

TEST(Config, HashFollowsEveryChange) {
  const Config config = parse_config(kExample, "example.yaml");
  EXPECT_EQ(hash_text(config), hash_text(parse_config(to_yaml(config), "other name.yaml")));
  EXPECT_EQ(hash_text(config).size(), 16u);
  std::set<std::string> hashes = {hash_text(config)};
  for (const char* change : {"run.seed=8", "device=auto", "model.kda.num_heads=4", "optimizer.lr=3.0000000000000001e-4",
                             "optimizer.lr=3.0000000000000003e-4", "data.eval.bible=one.h5"}) {
    hashes.insert(hash_text(parse_config(kExample, "example.yaml", {change})));
  }
  EXPECT_EQ(hashes.size(), 6u);  // 3.0000000000000001e-4 is the same number as 3e-4
}

TEST(Config, DifferencesNameKeyAndBothValues) {
  const Config before = parse_config(kExample, "example.yaml");
  EXPECT_TRUE(differences(before, before).empty());
  const Config after = parse_config(kExample, "example.yaml", {"model.gdn.num_heads=4", "train.z_loss=1e-4"});
  const auto found = differences(before, after);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].key, "model.gdn.num_heads");
  EXPECT_EQ(found[0].before, "2");
  EXPECT_EQ(found[0].after, "4");
  EXPECT_EQ(found[1].key, "train.z_loss");
}

TEST(Config, ResumeRefusesAnotherModelAndNotesTheRest) {
  const Config saved = parse_config(kExample, "example.yaml");
  const Config moved = parse_config(kExample, "example.yaml", {"run.dir=elsewhere", "resume=none", "from=null"});
  EXPECT_TRUE(resume_notices(saved, moved).empty());
  const Config other_weights = parse_config(kExample, "example.yaml", {"from=elsewhere"});
  EXPECT_EQ(resume_notices(saved, other_weights),
            std::vector<std::string>{"from is elsewhere, but the run keeps its own weights"});
  EXPECT_TRUE(resume_notices(other_weights, other_weights).empty());
  const Config longer = parse_config(kExample, "example.yaml", {"train.tokens=2e6"});
  EXPECT_EQ(resume_notices(saved, longer), std::vector<std::string>{"train.tokens was 1000000 and is now 2000000"});
  const Config other =
      parse_config(kExample, "example.yaml", {"model.hidden_size=64", "model.layers=[mla]", "run.seed=3"});
  EXPECT_EQ(support::user_error_of([&] { resume_notices(saved, other); }),
            "the checkpoint is of another model: model.hidden_size (96 there, 64 here), model.layers ([kda, gdn, mla] "
            "there, [mla] here); set these back, or give another run.dir");
}

TEST(Config, ResolvesAuto) {
  const Config config = parse_config("", "c.yaml");
  const Config on_cpu = resolve(config, false);
  EXPECT_EQ(on_cpu.device, DeviceChoice::kCpu);
  EXPECT_EQ(on_cpu.precision, Precision::kF32);
  EXPECT_EQ(device_of(on_cpu), Device::kCpu);
  EXPECT_EQ(types_of(on_cpu).dtype, DType::kF32);
  const Config on_gpu = resolve(config, true);
  EXPECT_EQ(device_of(on_gpu), Device::kCuda);
  EXPECT_EQ(types_of(on_gpu).dtype, DType::kBF16);
  EXPECT_EQ(types_of(resolve(parse_config("device: cpu\nprecision: f64", "c.yaml"), true)).dtype, DType::kF64);
  EXPECT_THROW(resolve(parse_config("device: cuda", "c.yaml"), false), UserError);
  EXPECT_THROW(resolve(parse_config("precision: bf16", "c.yaml"), false), UserError);
  EXPECT_THROW(resolve(parse_config("precision: f64", "c.yaml"), true), UserError);
  EXPECT_EQ(types_of(on_gpu).residual, DType::kF32);
  EXPECT_EQ(on_gpu.residual, Precision::kF32);  // stands in what a run keeps, whatever a later default
  EXPECT_EQ(types_of(on_cpu).residual, DType::kF32);
  EXPECT_EQ(types_of(resolve(parse_config("precision: f64", "c.yaml"), false)).residual, DType::kF64);
  EXPECT_EQ(types_of(resolve(parse_config("residual: bf16", "c.yaml"), true)).residual, DType::kBF16);
  EXPECT_EQ(types_of(resolve(parse_config("residual: f64", "c.yaml"), false)).residual, DType::kF64);
  EXPECT_THROW(resolve(parse_config("residual: bf16", "c.yaml"), false), UserError);
  EXPECT_THROW(resolve(parse_config("residual: f64", "c.yaml"), true), UserError);
  EXPECT_THROW(device_of(config), Error);
  EXPECT_THROW(types_of(config), Error);
}

TEST(Config, TokensBecomeWholeSteps) {
  const auto steps = [](const char* tokens) {
    return total_steps(parse_config("train: {sequences_per_step: 4}\ndata: {sequence_length: 8}", "c.yaml",
                                    {std::string("train.tokens=") + tokens}));
  };
  EXPECT_EQ(steps("1"), 1);
  EXPECT_EQ(steps("32"), 1);
  EXPECT_EQ(steps("33"), 2);
  EXPECT_EQ(steps("9223372036854775807"), 288230376151711744);
}

TEST(Config, TrainingAsksForDataAndLength) {
  const auto check = [](const char* text) { validate_for_training(parse_config(text, "c.yaml")); };
  EXPECT_THROW(check("train: {steps: 1}"), UserError);
  EXPECT_THROW(check("data: {train: a}"), UserError);
  EXPECT_NO_THROW(check("data: {train: a}\ntrain: {steps: 1}"));
  EXPECT_NO_THROW(check("data: {train: a}\ntrain: {tokens: 1}"));
}

TEST(Config, ExplainNamesEveryField) {
  const std::string text = explain_config();
  int fields = 0;
  for (const ConfigField& field : list_fields(Config())) {
    EXPECT_FALSE(field.help.empty()) << field.key;
    EXPECT_NE(text.find(field.key + (field.is_section ? ": " : " (")), std::string::npos) << field.key;
    EXPECT_NE(text.find(field.help), std::string::npos) << field.key;
    ++fields;
  }
  EXPECT_GT(fields, 70);
  const size_t layers = text.find("model.layers (");
  const std::string of_layers = text.substr(layers, text.find('\n', layers) - layers);
  for (const std::string& kind : mixer_kinds()) EXPECT_NE(of_layers.find(" " + kind), std::string::npos) << of_layers;
  EXPECT_NE(text.find("schedule.kind (cosine | wsd | linear | constant; default cosine)"), std::string::npos);
  EXPECT_NE(text.find("optimizer.grad_clip (number | null; default 1.0)"), std::string::npos);
}

// ---- configs/ ----

std::vector<std::string> ready_configs() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(PALIMPSEST_SOURCE_DIR "/configs")) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

TEST(ReadyConfigs, AllReadAndPrint) {
  int found = 0;
  for (const std::string& path : ready_configs()) {
    const Config config = load_config(path);
    EXPECT_EQ(std::filesystem::path(config.run.dir).filename(), std::filesystem::path(path).stem()) << path;
    EXPECT_EQ(to_yaml(parse_config(to_yaml(config), "printed.yaml")), to_yaml(config)) << path;
    EXPECT_NO_THROW(total_steps(config)) << path;
    ++found;
  }
  EXPECT_GE(found, 8);
}

TEST(ReadyConfigs, OneForEachTokenMixer) {
  for (const std::string& kind : mixer_kinds()) {
    const Config config = load_config(PALIMPSEST_SOURCE_DIR "/configs/" + kind + ".yaml");
    EXPECT_EQ(config.model.layers, std::vector<std::string>{kind});
  }
}

}  // namespace
}  // namespace palimpsest
