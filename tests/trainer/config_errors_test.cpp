// Every message is compared as a whole: one line, with the position, what was wrong and what would be right.
#include <gtest/gtest.h>

#include "kernels/random.h"
#include "tests/support/files.h"
#include "trainer/config.h"
#include "trainer/yaml_tree.h"

namespace palimpsest {
namespace {

std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(text, "c.yaml", overrides);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

struct BadText {
  const char* text;
  const char* message;
};

TEST(ConfigErrors, UnknownKeysNameTheNearest) {
  for (const BadText& bad : std::initializer_list<BadText>{
           {"optimizer:\n  learnig_rate: 1e-3\n",
            "c.yaml:2:3: unknown key 'optimizer.learnig_rate', the nearest is optimizer.lr"},
           {"train:\n  step: 3\n", "c.yaml:2:3: unknown key 'train.step', the nearest is train.steps"},
           {"model:\n  kda:\n    num_heads: 2\n    haed_dim: 64\n",
            "c.yaml:4:5: unknown key 'model.kda.haed_dim', the nearest is model.kda.head_dim"},
           {"modle: {}", "c.yaml:1:1: unknown key 'modle', the nearest is model"},
           // The right name in the wrong section.
           {"train: {steps: 3, lr: 1e-3}", "c.yaml:1:19: unknown key 'train.lr', the nearest is optimizer.lr"},
           {"hidden_size: 8", "c.yaml:1:1: unknown key 'hidden_size', the nearest is model.hidden_size"},
           {"data: {train: [{path: a, wieght: 1}]}",
            "c.yaml:1:26: unknown key 'data.train[0].wieght', the nearest is data.train[0].weight"},
           // What others call it.
           {"train: {global_batch_size: 8}",
            "c.yaml:1:9: unknown key 'train.global_batch_size', the nearest is train.sequences_per_step"},
       }) {
    EXPECT_EQ(error_of(bad.text), bad.message);
  }
}

TEST(ConfigErrors, WrongTypesNameKeyAndValue) {
  for (const BadText& bad : std::initializer_list<BadText>{
           {"optimizer: {lr: 1e-3x}", "c.yaml:1:17: optimizer.lr is '1e-3x', must be a number"},
           {"optimizer: {lr: .inf}", "c.yaml:1:17: optimizer.lr is '.inf', must be a number"},
           {"optimizer: {lr: nan}", "c.yaml:1:17: optimizer.lr is 'nan', must be a number"},
           {"optimizer: {lr: 1e999}", "c.yaml:1:17: optimizer.lr is '1e999', must be a number"},
           {"optimizer: {lr: \"1\"}", "c.yaml:1:17: optimizer.lr is '1', must be a number"},
           {"optimizer: {lr: +-1}", "c.yaml:1:17: optimizer.lr is '+-1', must be a number"},
           {"optimizer: {lr: [1]}", "c.yaml:1:17: optimizer.lr is a list, must be a number"},
           {"optimizer: {lr: }", "c.yaml:1:17: optimizer.lr is null, must be a number"},
           {"optimizer: {betas: 0.9}", "c.yaml:1:20: optimizer.betas is '0.9', must be a list of two numbers"},
           {"optimizer: {betas: [0.9]}", "c.yaml:1:20: optimizer.betas has 1 entries, must be a list of two numbers"},
           {"optimizer: {betas: [0.9, x]}", "c.yaml:1:26: optimizer.betas[1] is 'x', must be a number"},
           {"checkpoint:\n  background: ture", "c.yaml:2:15: checkpoint.background is 'ture', must be true or false"},
           {"checkpoint: {every: 1.5}", "c.yaml:1:21: checkpoint.every is '1.5', must be a whole number"},
           {"checkpoint: {every: 1e300}", "c.yaml:1:21: checkpoint.every is '1e300', must be a whole number"},
           {"checkpoint: {every: 99999999999999999999}",
            "c.yaml:1:21: checkpoint.every is '99999999999999999999', must be a whole number"},
           {"checkpoint: {every: 0x10}", "c.yaml:1:21: checkpoint.every is '0x10', must be a whole number"},
           {"schedule: {kind: cosin}",
            "c.yaml:1:18: schedule.kind is 'cosin', must be one of cosine, wsd, linear, constant"},
           {"run: {dir: [a]}", "c.yaml:1:12: run.dir is a list, must be text"},
           {"run: {dir: null}", "c.yaml:1:12: run.dir is null, must be text"},
           {"run: \"a\"", "c.yaml:1:6: run is 'a', must be a map of fields (key: value)"},
           {"[a, b]", "c.yaml:1:1: the config is a list, must be a map of fields (key: value)"},
           {"model: {layers: kda}", "c.yaml:1:17: model.layers is 'kda', must be a list, such as [a, b]"},
           {"model: {layers: [kda, [mla]]}", "c.yaml:1:23: model.layers[1] is a list, must be text"},
           {"data: {train: {path: a}}",
            "c.yaml:1:15: data.train is a map, must be a path, or a list of {path, weight}"},
           {"data: {eval: [a]}", "c.yaml:1:14: data.eval is a list, must be a path, or a map of name: path"},
       }) {
    EXPECT_EQ(error_of(bad.text), bad.message);
  }
}

TEST(ConfigErrors, ValuesOutOfRangeHaveAPosition) {
  for (const BadText& bad : std::initializer_list<BadText>{
           {"data:\n  sequence_length: -5", "c.yaml:2:20: data.sequence_length is -5, must be at least 1"},
           {"model: {hidden_size: -5}", "c.yaml:1:22: model.hidden_size is -5, must be at least 1"},
           {"model: {kda: {head_dim: 512}}", "c.yaml:1:25: model.kda.head_dim is 512, must be at most 256"},
           {"model: {vocab_size: 257}",
            "c.yaml:1:21: model.vocab_size is 257, must be at least 258, the ids of data.tokenizer: bytes"},
           {"train: {steps: 0}", "c.yaml:1:16: train.steps is 0, must be at least 1"},
           {"train: {steps: 5, tokens: 7}",
            "c.yaml:1:27: train.tokens and train.steps are both given, must be one of the two (train.steps=null drops "
            "one)"},
           {"train: {micro_batch: 1000000}\ndata: {sequence_length: 4096}",
            "c.yaml:1:22: train.micro_batch is 1000000, must be at most 524287 with a data.sequence_length of 4096"},
           {"optimizer: {betas: [0.9, 1]}", "c.yaml:1:20: optimizer.betas is 1, must be from 0 to below 1"},
           {"optimizer: {eps: 0}", "c.yaml:1:18: optimizer.eps is 0, must be above 0"},
           {"optimizer: {grad_clip: 0}", "c.yaml:1:24: optimizer.grad_clip is 0, must be above 0, or null"},
           {"optimizer: {lr: 1e-3}\nschedule: {min_lr: 2e-3}",
            "c.yaml:2:20: schedule.min_lr is 0.002, must be at most optimizer.lr, 0.001"},
           {"parallel: {tensor: -2}",
            "c.yaml:1:20: parallel.tensor is -2, must be at least 1, or -1 for what the other axes leave"},
           {"parallel: {data: 0}",
            "c.yaml:1:18: parallel.data is 0, must be at least 1, or -1 for what the other axes leave"},
           {"parallel: {zero: 4}", "c.yaml:1:18: parallel.zero is 4, must be 1, 2 or 3"},
           {"parallel: {timeout_s: 1e10}",
            "c.yaml:1:23: parallel.timeout_s is 10000000000, must be above 0 and at most 1e9"},
           {"checkpoint: {keep_last: 0}",
            "c.yaml:1:25: checkpoint.keep_last is 0, must be from 1 to 10000; keep_every keeps more"},
           {"checkpoint: {keep_last: 9223372036854775807}",
            "c.yaml:1:25: checkpoint.keep_last is 9223372036854775807, must be from 1 to 10000; keep_every keeps more"},
           {"data: {train: [{path: a, weight: -1}]}",
            "c.yaml:1:34: data.train[0].weight is -1, must be above 0 and at most 1e9"},
           {"data: {train: [{path: a, weight: 1e308}, {path: b, weight: 1e308}]}",
            "c.yaml:1:34: data.train[0].weight is 1e+308, must be above 0 and at most 1e9"},
           {"model: {hidden_size: 9223372036854775807}",
            "c.yaml:1:22: model.hidden_size is 9223372036854775807, must be at most 1048576"},
           {"data: {train: [{weight: 1}, b]}", "c.yaml:1:16: data.train[0] is empty, must be a path"},
           {"data: {eval: {a/b: c}}",
            "c.yaml:1:14: data.eval has a set named 'a/b', must be of letters, digits, '_' and '-'"},
           {"precision: f64\nresidual: f32", "c.yaml:2:11: residual is f32, must be f64 with precision: f64"},
           {"precision: bf16\nresidual: f64", "c.yaml:2:11: residual is f64, must be bf16 or f32 with precision: bf16"},
           {"profile: {steps: [3, 2]}",
            "c.yaml:1:18: profile.steps is [3, 2], must be [first, last] with 1 <= first <= last"},
           {"device: cpu\nprecision: bf16",
            "c.yaml:2:12: precision is bf16, must be f32 or f64 on the CPU: bf16 is for device: cuda"},
       }) {
    EXPECT_EQ(error_of(bad.text), bad.message);
  }
}

TEST(ConfigErrors, MalformedTextHasAPosition) {
  for (const BadText& bad : std::initializer_list<BadText>{
           {"run: {seed: 1}\ntrain: {}\nrun: {seed: 2}", "c.yaml:3:1: duplicate key 'run', first given at line 1"},
           {"train:\n  steps: 1\n  micro_batch: 1\n  \"steps\": 2\n",
            "c.yaml:4:3: duplicate key 'steps', first given at line 2"},
           {"run: &a {seed: 1}",
            "c.yaml:1:6: anchors (&name) and aliases (*name) are not used in configs; write the "
            "value out"},
           {"run: !!map {seed: 1}", "c.yaml:1:6: tags (!name) are not used in configs; write the value alone"},
           {"run: {seed: 1}\n---\nrun: {seed: 1}", "c.yaml:3:1: a second document begins; a config is one"},
           {"? [a]\n: b", "c.yaml:1:3: a key must be a name"},
           {"run:\n  dir: a\xff\x62", "c.yaml:2:9: not UTF-8 text"},
           {"run: \xed\xa0\x80", "c.yaml:1:6: not UTF-8 text"},
           {"run: \xc0\xaf", "c.yaml:1:6: not UTF-8 text"},
           {"run: \xf4\x90\x80\x80", "c.yaml:1:6: not UTF-8 text"},
           {"run: \xe2\x82", "c.yaml:1:6: not UTF-8 text"},
           {"run:\n  dir: \x04", "c.yaml:2:8: control character 0x04, a config holds text alone"},
           {"run: {dir: \"a\\0b\"}", "c.yaml:1:12: run.dir is 'a\\x00b', must be text"},
       }) {
    EXPECT_EQ(error_of(bad.text), bad.message);
  }
}

TEST(ConfigErrors, MalformedYamlHasTheLibrarysReasonAndALine) {
  for (const BadText& bad : std::initializer_list<BadText>{{"\nrun: {seed: 1", "c.yaml:2:"},
                                                           {"run:\n\tseed: 1", "c.yaml:2:"},
                                                           {"run: {seed: 1}\n\n]", "c.yaml:3:"},
                                                           {"run: {seed: 1}\ntrain: \"steps", "c.yaml:2:"},
                                                           {"run: {seed: 1}\n  train: {}", "c.yaml:2:"},
                                                           {"run: *a", "c.yaml:1:"}}) {
    const std::string message = error_of(bad.text);
    EXPECT_TRUE(message.starts_with(bad.message)) << message;
    EXPECT_NE(message.find(": malformed YAML: "), std::string::npos) << message;
  }
}

TEST(ConfigErrors, OverridesNameThemselves) {
  struct BadOverride {
    const char* text;
    const char* message;
  };
  for (const BadOverride& bad : std::initializer_list<BadOverride>{
           {"optimizer.lr=1e-3x", "override 'optimizer.lr=1e-3x': optimizer.lr is '1e-3x', must be a number"},
           {"train.step=5", "override 'train.step=5': unknown key 'train.step', the nearest is train.steps"},
           {"steps=5", "override 'steps=5': unknown key 'steps', the nearest is train.steps"},
           {"train.steps.x=5", "override 'train.steps.x=5': train.steps is a map, must be a whole number"},
           {"data.sequence_length=-5",
            "override 'data.sequence_length=-5': data.sequence_length is -5, must be at least 1"},
           {"train.steps", "override 'train.steps': must have the form key=value"},
           {"train.steps=", "override 'train.steps=': has no value; null stands for none"},
           {"=5", "override '=5': the key must name a field, such as train.steps"},
           {"train.=5", "override 'train.=5': the key must name a field, such as train.steps"},
           {".steps=5", "override '.steps=5': the key must name a field, such as train.steps"},
           {"train={steps: 1, steps: 2}",
            "override 'train={steps: 1, steps: 2}': duplicate key 'steps', first given at line 1"},
           {"run.dir=[a", "override 'run.dir=[a': malformed YAML: end of sequence flow not found"},
           {"run.dir=\xff", "override 'run.dir=\\xff': not UTF-8 text"},
           {"run.\ndir=x", "override 'run.\\x0adir=x': unknown key 'run.\\x0adir', the nearest is run.dir"},
       }) {
    EXPECT_EQ(error_of("run: {seed: 1}", {bad.text}), bad.message);
  }
}

TEST(ConfigErrors, FilesThatCannotBeReadAreNamed) {
  const auto load_error = [](const std::string& path) { return support::user_error_of([&] { load_config(path); }); };
  EXPECT_EQ(load_error("no/such.yaml"), "no/such.yaml: the config cannot be read: No such file or directory");
  EXPECT_EQ(load_error("/proc"), "/proc: the config cannot be read: Is a directory");
  EXPECT_EQ(load_error("/dev/zero"), "/dev/zero: longer than 256 KiB, which no config is");
}

// ---- hostile text ----

std::string repeated(const std::string& text, size_t count) {
  std::string result;
  for (size_t i = 0; i < count; ++i) result += text;
  return result;
}

TEST(ConfigErrors, HostileTextGivesOneLine) {
  std::string indented;
  for (size_t depth = 0; depth < 400; ++depth) indented += std::string(depth, ' ') + "a:\n";
  const std::string many = repeated("x", 100000);
  for (const std::string& text :
       std::initializer_list<std::string>{repeated("[", 100000),
                                          repeated("{", 100000),
                                          repeated("- ", 100000),
                                          repeated("? ", 100000),
                                          indented,
                                          repeated("a: ", 50000),
                                          repeated("!!a ", 50000),
                                          repeated("&a ", 50000),
                                          repeated("{a: [", 20000),
                                          repeated("\"", 99999),
                                          repeated("'", 99999),
                                          "a: &a [x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
                                          "\"" + many + "\": 1",
                                          many,
                                          "run: {dir: " + many,
                                          repeated("---\n", 20000),

                                          repeated("k: v\n", 50000),
                                          "run: |\n" + repeated(" a\n", 50000),
                                          std::string("\xef\xbb\xbf[", 4),
                                          std::string("\xff\xfe\x00\x00", 4),
                                          repeated(" ", 100000) + "]",
                                          repeated("a\n", 100000)}) {
    const std::string message = error_of(text);
    EXPECT_EQ(message.find_first_of("\r\n"), std::string::npos) << message;
    EXPECT_EQ(message.substr(0, 7), "c.yaml:") << text.substr(0, 60);
    EXPECT_LT(message.size(), 400u);
  }
}

TEST(ConfigErrors, DamagedConfigsNeverCrash) {
  // Bytes of a good config replaced, removed and doubled: it reads, or gives one line.
  const std::string good =
      "run: {dir: \"runs/\\x41\", seed: 1}\nmodel:\n  layers: [kda, kda, mla]\n  kda:\n    num_heads: 2\n"
      "data:\n  train: [{path: 'a', weight: 2}, b]\n  eval: {x: y}\ntrain: {steps: 10} # words\n";
  const std::string bytes = "{}[]:,-?&*!|>'\"%@`# \n\t\\0a\xc3\xff";
  int refused = 0;
  constexpr uint64_t kCases = 4000;
  for (uint64_t i = 0; i < kCases; ++i) {
    std::string text = good;
    const uint64_t edits = 1 + i % 4;
    for (uint64_t edit = 0; edit < edits; ++edit) {
      const uint64_t bits = random_bits(1, i, edit);
      const size_t at = static_cast<size_t>(bits >> 8) % text.size();
      const char byte = bytes[(bits >> 40) % bytes.size()];
      switch (bits % 3) {
        case 0:
          text[at] = byte;
          break;
        case 1:
          text.insert(at, 1, byte);
          break;
        default:
          text.erase(at, 1 + (bits >> 60));
          break;
      }
    }
    const std::string message = error_of(text);
    if (message == "no error") continue;
    ++refused;
    ASSERT_EQ(message.find_first_of("\r\n"), std::string::npos) << message << "\n" << text;
  }
  EXPECT_GT(refused, 1000);
  EXPECT_LT(refused, static_cast<int>(kCases));
}

}  // namespace
}  // namespace palimpsest
