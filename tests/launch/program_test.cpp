// The program as a user meets it: help, errors, exit codes, signals.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

#include "data/dataset.h"
#include "data/file_ops.h"
#include "data/tokenizer.h"
#include "tests/support/files.h"
#include "tests/support/program.h"
#include "tests/support/shard_files.h"
#include "tests/support/training.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run_setup.h"

namespace palimpsest {
namespace {

using support::is_one_line;
using support::metrics_of;
using support::ProgramResult;
using support::read_file;
using support::run_palimpsest;
using support::SmallFileSystem;
using support::TempDirectory;
using support::write_file;

// Exit code 2 and one line on standard error that holds every part.
void expect_user_error(const std::vector<std::string>& arguments, const std::vector<std::string>& parts,
                       const support::Environment& environment = {}) {
  const ProgramResult result = run_palimpsest(arguments, environment);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_TRUE(is_one_line(result.err)) << result.err;
  EXPECT_TRUE(result.err.starts_with("error: ")) << result.err;
  for (const std::string& part : parts)
    EXPECT_NE(result.err.find(part), std::string::npos) << part << "\n" << result.err;
}

// ---- the command line -----------------------------------------------------------------------------------------------

TEST(Program, HelpOfEverySubcommandIsCompleteWithExitCodes) {
  const std::vector<std::vector<std::string>> commands = {{},
                                                          {"train"},
                                                          {"eval"},
                                                          {"score"},
                                                          {"generate"},
                                                          {"tokenize"},
                                                          {"inspect"},
                                                          {"import"},
                                                          {"import", "hf"},
                                                          {"export"},
                                                          {"export", "hf"},
                                                          {"bench"},
                                                          {"bench", "train"},
                                                          {"bench", "kernels"}};
  for (std::vector<std::string> command : commands) {
    std::string name = "palimpsest";
    for (const std::string& word : command) name += " " + word;
    command.emplace_back("--help");
    const ProgramResult result = run_palimpsest(command);
    EXPECT_EQ(result.exit_code, 0) << name;
    EXPECT_EQ(result.err, "") << name;
    EXPECT_NE(result.out.find("Usage: " + name), std::string::npos) << result.out;
    EXPECT_NE(result.out.find("Exit codes: 0 done"), std::string::npos) << name;
  }
}

TEST(Program, VersionNamesTheCommitAndTheLibraries) {
  const ProgramResult result = run_palimpsest({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  for (const char* part : {"palimpsest ", "Open MPI", "HDF5", "OpenBLAS", "SentencePiece"})
    EXPECT_NE(result.out.find(part), std::string::npos) << part;
}

TEST(Program, ExplainListsEveryField) {
  const ProgramResult result = run_palimpsest({"train", "--explain"});
  EXPECT_EQ(result.exit_code, 0);
  for (const char* key : {"model.kda.gate_lower_bound", "train.max_minutes", "checkpoint.keep_every"})
    EXPECT_NE(result.out.find(key), std::string::npos) << key;
}

TEST(Program, MistypedArgumentsAreNamed) {
  expect_user_error({"trian"}, {"'trian'", "train, eval"});
  expect_user_error({"bench", "trian"}, {"'trian'", "kernels"});
  expect_user_error({"train", "x.yaml", "--dry-rum"}, {"--dry-rum", "palimpsest train --help"});
  expect_user_error({"train"}, {"CONFIG"});
  expect_user_error({}, {"subcommand"});
  expect_user_error({"bench", "train", "x.yaml", "--steps", "0"}, {"--steps"});
}

// ---- bad input ------------------------------------------------------------------------------------------------------

// A folder with shards and the config of a short run.
class RunFolder : public testing::Test {
 protected:
  RunFolder() : config_(support::tiny_run_config(root_, "run")), file_(root_ / "config.yaml") {
    write_file(file_, to_yaml(config_));
  }

  // Training ends with a user error, and nothing was written.
  void expect_no_run(const std::vector<std::string>& parts, std::vector<std::string> overrides = {}) {
    std::vector<std::string> arguments = {"train", file_};
    arguments.insert(arguments.end(), overrides.begin(), overrides.end());
    expect_user_error(arguments, parts);
    EXPECT_FALSE(path_exists(config_.run.dir));
  }
  void train() { ASSERT_EQ(run_palimpsest({"train", file_}).exit_code, 0); }
  std::string shard() const { return root_ / "shards/tokens-00000.h5"; }
  std::string newest_rank_file() const {
    return list_checkpoints(checkpoint_path(config_)).back().path + "/rank-00000-of-00001.h5";
  }

  TempDirectory root_;
  Config config_;
  std::string file_;
};

class BadInput : public RunFolder {};
class TrainCommand : public RunFolder {};

void flip_a_bit_in_the_middle(const std::string& path) {
  std::string bytes = read_file(path);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  write_file(path, bytes);
}

void truncate_to(const std::string& path, double part) {
  const std::string bytes = read_file(path);
  write_file(path, bytes.substr(0, static_cast<size_t>(part * static_cast<double>(bytes.size()))));
}

TEST_F(BadInput, Config) {
  expect_no_run({"optimizer.learnig_rate", "override", "nearest"}, {"optimizer.learnig_rate=1"});
  expect_no_run({"train.steps", "ture"}, {"train.steps=ture"});
  expect_no_run({"train.micro_batch", "-1"}, {"train.micro_batch=-1"});
  expect_no_run({"train.steps"}, {"train.steps"});
  expect_no_run({"bf16", "device: cuda"}, {"precision=bf16"});
  expect_no_run({"device is cuda"}, {"device=cuda"});
  expect_no_run({"retnett", "known are"}, {"model.layers=[kda, retnett]"});
  expect_no_run({"data.train is missing"}, {"data.train=null"});
  expect_no_run({"train.steps is missing"}, {"train.steps=null"});
  expect_user_error({"train", root_ / "none.yaml"}, {"none.yaml"});
  write_file(file_, "train:\n  steps: 3\n  stepz: 4\n");
  expect_no_run({"config.yaml:3:3", "stepz", "steps"});
  write_file(file_, "train:\n  steps: 3\n  steps: 4\n");
  expect_no_run({"config.yaml:3:3", "steps"});
  write_file(file_, "train: {steps: 1e-3x}\n");
  expect_no_run({"config.yaml:1:16", "1e-3x"});
  write_file(file_, "train: {steps: [\n");
  expect_no_run({"config.yaml:"});
}

TEST_F(BadInput, MissingOrForeignShards) {
  expect_no_run({"nowhere"}, {"data.train=" + (root_ / "nowhere")});
  expect_no_run({"shards", "37", "36"}, {"model.vocab_size=36"});
  expect_no_run({"do not fill one row"}, {"data.sequence_length=100000"});
  support::write_documents(root_ / "other", support::small_vocabulary(30), {50, 60});
  expect_no_run({"data.eval", "other", "30 ids"}, {"data.eval=" + (root_ / "other")});
  write_file(root_ / "text.h5", "not HDF5 at all");
  expect_no_run({"text.h5"}, {"data.train=" + (root_ / "text.h5")});
}

TEST_F(BadInput, FlippedBitInAShard) {
  flip_a_bit_in_the_middle(shard());
  expect_no_run({"tokens-00000.h5"});
}

TEST_F(BadInput, TruncatedShard) {
  truncate_to(shard(), 0.7);
  expect_no_run({"tokens-00000.h5"});
}

TEST_F(BadInput, TruncatedEvaluationShard) {
  truncate_to(root_ / "held_out/tokens-00000.h5", 0.9);
  expect_no_run({"held_out/tokens-00000.h5"});
}

TEST_F(BadInput, EmptyCorpus) {
  write_file(root_ / "empty.txt", "");
  expect_user_error({"tokenize", "--out", root_ / "out", root_ / "empty.txt"}, {"no text"});
  EXPECT_FALSE(path_exists(root_ / "out"));
  expect_user_error({"tokenize", "--out", root_ / "out", root_ / "missing.txt"}, {"missing.txt"});
  write_file(root_ / "broken.jsonl", "{\"text\": \"fine\"}\n{\"text\": 3}\n");
  expect_user_error({"tokenize", "--out", root_ / "out", root_ / "broken.jsonl"}, {"broken.jsonl:2"});
  EXPECT_FALSE(path_exists(root_ / "out"));
}

TEST_F(BadInput, DamagedCheckpoint) {
  train();
  const std::string whole = read_file(newest_rank_file());
  const auto expect_damage = [&] {
    expect_user_error({"eval", file_}, {"step-000010"});
    expect_user_error({"train", file_, "train.steps=20"}, {"every checkpoint is damaged", "step-000010"});
    expect_user_error({"inspect", list_checkpoints(checkpoint_path(config_)).back().path}, {"step-000010"});
  };
  flip_a_bit_in_the_middle(newest_rank_file());
  expect_damage();
  write_file(newest_rank_file(), whole);
  truncate_to(newest_rank_file(), 0.5);
  expect_damage();
}

TEST_F(BadInput, CheckpointOfAnotherModel) {
  train();
  expect_user_error({"train", file_, "model.hidden_size=40"}, {"model.hidden_size (20 there, 40 here)"});
  expect_user_error({"eval", file_, "model.mlp.intermediate_size=40"}, {"model.mlp.intermediate_size"});
  expect_user_error({"eval", file_, "from=" + (root_ / "nowhere")}, {"nowhere"});
  expect_user_error({"train", file_, "resume=none"}, {"holds a run at step 10"});
}

TEST_F(BadInput, DamagedSafetensors) {
  create_directories(root_ / "public");
  const std::string source = std::string(PALIMPSEST_SOURCE_DIR) + "/tests/golden/models/kimi_linear_dense";
  write_file(root_ / "public/config.json", read_file(source + "/config.json"));
  const std::string whole = read_file(source + "/model.safetensors");
  for (const size_t kept : {size_t{4}, size_t{100}, whole.size() - 1}) {
    write_file(root_ / "public/model.safetensors", whole.substr(0, kept));
    expect_user_error({"import", "hf", root_ / "public", root_ / "imported"}, {"model.safetensors"});
    EXPECT_FALSE(path_exists(root_ / "imported"));
  }
  std::string flipped = whole;
  flipped[3] = static_cast<char>(flipped[3] ^ 0x40);  // in the length of the header
  write_file(root_ / "public/model.safetensors", flipped);
  expect_user_error({"import", "hf", root_ / "public", root_ / "imported"}, {"model.safetensors"});
}

TEST_F(BadInput, ReadOnlyOrFullOutput) {
  const SmallFileSystem read_only(1 << 24, /*read_only=*/true), full(1 << 14);
  if (!read_only.mounted() || !full.mounted()) GTEST_SKIP() << "mounting needs root";
  expect_user_error({"train", file_, "run.dir=" + (read_only / "run")}, {read_only.path(), "Read-only"});
  expect_user_error({"train", file_, "run.dir=" + (full / "run")}, {full.path(), "bytes are required", "free"});
  expect_user_error({"tokenize", "--out", read_only / "out", file_ + "x"}, {"config.yamlx"});
  write_file(root_ / "text.txt", std::string(1 << 16, 'a'));
  expect_user_error({"tokenize", "--out", read_only / "out", root_ / "text.txt"}, {read_only.path(), "Read-only"});
  expect_user_error({"tokenize", "--out", full / "out", root_ / "text.txt"}, {full.path(), "No space left"});
  train();
  expect_user_error({"eval", file_, "--json", read_only / "e.json"}, {read_only.path(), "Read-only"});
  expect_user_error({"score", file_, "--tokens", root_ / "shards", "--out", full / "s.h5"},
                    {full.path(), "No space left"});
  EXPECT_EQ(list_directory(full.path()), std::vector<std::string>());
}

TEST_F(BadInput, DiskThatFillsDuringASaveEndsTheRunAndLeavesTheOldCheckpoint) {
  for (const char* background : {"true", "false"}) {
    const std::string dir = root_ / (std::string("run-") + background);
    const ProgramResult result = run_palimpsest(
        {"train", file_, "run.dir=" + dir, "checkpoint.every=2", std::string("checkpoint.background=") + background},
        {{"PALIMPSEST_FAIL_AT_FILE_OPERATION", "400"}});
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_TRUE(is_one_line(result.err)) << result.err;
    EXPECT_NE(result.err.find("No space left on device"), std::string::npos) << result.err;
    EXPECT_NE(result.err.find("step-0000"), std::string::npos) << result.err;
    const auto left = list_checkpoints(dir + "/checkpoints");
    ASSERT_FALSE(left.empty());
    EXPECT_TRUE(left.back().has_manifest);
    EXPECT_EQ(run_palimpsest({"train", file_, "run.dir=" + dir}).exit_code, 0);
  }
}

// ---- runs -----------------------------------------------------------------------------------------------------------

void wait_for_lines(const Config& config, size_t count) {
  const std::string path = config.run.dir + "/metrics.jsonl";
  for (int i = 0; i < 600; ++i) {
    if (path_exists(path) && metrics_of(config).size() >= count) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  FAIL() << "no metrics after 30 seconds";
}

TEST_F(TrainCommand, SignalsSaveAndExitWithZero) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    Config config = config_;
    config.run.dir = root_ / ("signal-" + std::to_string(signal));
    support::RunningProgram program({"train", file_, "run.dir=" + config.run.dir, "train.steps=100000000"}, {});
    wait_for_lines(config, 3);
    program.signal(signal);
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    const auto last = static_cast<int64_t>(metrics_of(config).size());
    EXPECT_TRUE(has_manifest(checkpoint_path(config) + "/" + checkpoint_name(last)));
  }
}

TEST_F(TrainCommand, RepeatedNonFiniteStepsExitWithFour) {
  const ProgramResult result =
      run_palimpsest({"train", file_, "optimizer.lr=1e30", "optimizer.grad_clip=null", "train.max_skipped_steps=2"});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_TRUE(is_one_line(result.err)) << result.err;
  EXPECT_NE(result.err.find("the first tensor that went bad"), std::string::npos) << result.err;
}

TEST_F(TrainCommand, EvalReportsSeveralSetsByName) {
  train();
  const ProgramResult result =
      run_palimpsest({"eval", file_, "data.eval={a: " + (root_ / "shards") + ", b: " + (root_ / "held_out") + "}",
                      "--json", root_ / "eval.json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto report = nlohmann::json::parse(read_file(root_ / "eval.json"));
  EXPECT_GT(report.at("a").at("tokens").get<int64_t>(), report.at("b").at("tokens").get<int64_t>());
  EXPECT_GT(report.at("b").at("perplexity").get<double>(), 1.0);
}

TEST_F(TrainCommand, PrintsOneFieldAndNothingElse) {
  EXPECT_EQ(run_palimpsest({"train", file_, "--print", "train.steps"}).out, "10\n");
  EXPECT_FALSE(path_exists(config_.run.dir));
}

TEST(Program, TextGoesInAndComesOut) {
  const TempDirectory root;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "in the beginning was the word, number " + std::to_string(i % 7) + ".\n";
  write_file(root / "text.txt", text);
  ASSERT_EQ(run_palimpsest({"tokenize", "--out", root / "shards", root / "text.txt"}).exit_code, 0);
  const std::vector<std::string> overrides = {"run.dir=" + (root / "run"),
                                              "data.train=" + (root / "shards"),
                                              "data.eval=" + (root / "shards"),
                                              "model.hidden_size=16",
                                              "model.kda={num_heads: 2, head_dim: 8}",
                                              "model.mlp.intermediate_size=24",
                                              "data.sequence_length=64",
                                              "train.steps=3",
                                              "hardware.peak_tflops=1"};
  const auto with = [&](std::vector<std::string> first, const std::vector<std::string>& last) {
    first.emplace_back(std::string(PALIMPSEST_SOURCE_DIR) + "/configs/kda.yaml");
    first.insert(first.end(), overrides.begin(), overrides.end());
    first.insert(first.end(), last.begin(), last.end());
    return first;
  };
  ASSERT_EQ(run_palimpsest(with({"train"}, {})).exit_code, 0);
  ASSERT_EQ(run_palimpsest(with({"eval"}, {"--json", root / "eval.json"})).exit_code, 0);
  const auto report = nlohmann::json::parse(read_file(root / "eval.json"));
  EXPECT_EQ(report.at("bytes"), text.size());
  EXPECT_EQ(report.at("tokens"), text.size() + 1);  // every byte and eos
  EXPECT_NEAR(report.at("bits_per_byte").get<double>(),
              report.at("loss_sum").get<double>() / std::log(2.0) / static_cast<double>(text.size()), 1e-9);
  EXPECT_NEAR(report.at("perplexity").get<double>(),
              std::exp(report.at("loss_sum").get<double>() / report.at("tokens").get<double>()), 1e-6);

  const ProgramResult sample =
      run_palimpsest(with({"generate"}, {"--prompt", "in the", "--max-tokens", "20", "--seed", "5"}));
  EXPECT_EQ(sample.exit_code, 0) << sample.err;
  EXPECT_TRUE(sample.out.starts_with("in the"));
  EXPECT_EQ(run_palimpsest(with({"generate"}, {"--prompt", "in the", "--max-tokens", "20", "--seed", "5"})).out,
            sample.out);
  EXPECT_NE(run_palimpsest(with({"generate"}, {"--prompt", "in the", "--max-tokens", "20", "--seed", "6"})).out,
            sample.out);
  const ProgramResult inspected = run_palimpsest({"inspect", root / "run"});
  EXPECT_EQ(inspected.exit_code, 0);
  EXPECT_NE(inspected.out.find("match their checksums"), std::string::npos);
  const ProgramResult verified = run_palimpsest({"inspect", root / "run", "--verify"});
  EXPECT_EQ(verified.exit_code, 0);
  EXPECT_TRUE(is_one_line(verified.out)) << verified.out;
}

TEST(Program, TokenizersOfPublicModelsMakeShardsAndTakePrompts) {
  const TempDirectory root;
  std::string text;
  for (int i = 0; i < 5000; ++i) text += "in the beginning was the word, number " + std::to_string(i % 7) + ".\n";
  write_file(root / "text.txt", text);
  const std::string folder = PALIMPSEST_SOURCE_DIR "/tests/data/tokenizers/", path = folder + "llama3/tokenizer.json";
  const ProgramResult lossy = run_palimpsest(
      {"tokenize", "--tokenizer", folder + "unigram/tokenizer.json", "--out", root / "lossy", root / "text.txt"});
  EXPECT_EQ(lossy.exit_code, 0);
  EXPECT_NE(lossy.out.find("warning: " + folder + "unigram/tokenizer.json cannot give every text back"),
            std::string::npos)
      << lossy.out;
  const ProgramResult made =
      run_palimpsest({"tokenize", "--tokenizer", path, "--out", root / "shards", root / "text.txt"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  EXPECT_EQ(made.out.find("warning"), std::string::npos);

  const auto tokenizer = load_tokenizer(path);
  std::vector<int32_t> expected = {tokenizer->bos()};
  tokenizer->encode(text, expected);  // the shard's file was read and encoded in several windows
  expected.push_back(tokenizer->eos());
  const Dataset dataset(root / "shards");
  std::vector<int32_t> ids(dataset.num_tokens());
  dataset.read(0, ids);
  EXPECT_TRUE(ids == expected);

  const auto with = [&](std::vector<std::string> first, const std::vector<std::string>& last) {
    first.emplace_back(std::string(PALIMPSEST_SOURCE_DIR) + "/configs/kda.yaml");
    for (const std::string& field :
         {"run.dir=" + (root / "run"), "data.train=" + (root / "shards"), "data.eval=" + (root / "shards"),
          "data.tokenizer=" + path, "model.vocab_size=" + std::to_string(tokenizer->vocab_size()),
          std::string("model.hidden_size=16"), std::string("model.kda={num_heads: 2, head_dim: 8}"),
          std::string("model.mlp.intermediate_size=24"), std::string("data.sequence_length=64"),
          std::string("train.steps=1"), std::string("hardware.peak_tflops=1")})
      first.push_back(field);
    first.insert(first.end(), last.begin(), last.end());
    return first;
  };
  ASSERT_EQ(run_palimpsest(with({"train"}, {})).exit_code, 0);
  const ProgramResult sample =
      run_palimpsest(with({"generate"}, {"--prompt", "<|endoftext|>in the", "--max-tokens", "9"}));
  EXPECT_EQ(sample.exit_code, 0) << sample.err;
  EXPECT_TRUE(sample.out.starts_with("<|endoftext|>in the")) << sample.out;
  write_file(root / "tokenizer.json", "{\"version\":\"1.0\",\"model\":{\"type\":\"WordLevel\"}}");
  expect_user_error({"tokenize", "--tokenizer", root / "tokenizer.json", "--out", root / "none", root / "text.txt"},
                    {"tokenizer.json.model: the kind 'WordLevel' is not supported"});
}

TEST(Program, ImportedModelIsEvaluated) {
  const TempDirectory root;
  const std::string source = std::string(PALIMPSEST_SOURCE_DIR) + "/tests/golden/models/kimi_linear_dense";
  ASSERT_EQ(run_palimpsest({"import", "hf", source, root / "imported"}).exit_code, 0);
  const auto vocab_size = nlohmann::json::parse(read_file(source + "/config.json")).at("vocab_size").get<int64_t>();
  support::write_documents(root / "shards", support::small_vocabulary(vocab_size), {40, 70});
  const ProgramResult result =
      run_palimpsest({"eval", root / "imported/config.yaml", "from=" + (root / "imported"), "data.tokenizer=none.model",
                      "data.eval=" + (root / "shards"), "--json", root / "eval.json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(read_file(root / "eval.json")).at("tokens"), 108);
  // And straight from the public folder; and back out.
  const ProgramResult straight =
      run_palimpsest({"eval", root / "imported/config.yaml", "from=" + source, "data.tokenizer=none.model",
                      "data.eval=" + (root / "shards"), "--json", root / "straight.json"});
  EXPECT_EQ(straight.exit_code, 0) << straight.err;
  EXPECT_EQ(read_file(root / "straight.json"), read_file(root / "eval.json"));
  ASSERT_EQ(run_palimpsest({"export", "hf", root / "imported", root / "out"}).exit_code, 0);
  EXPECT_EQ(read_file(root / "out/model.safetensors"), read_file(source + "/model.safetensors"));
  expect_user_error({"export", "hf", root / "imported", root / "out"}, {"already exists"});
}

}  // namespace
}  // namespace palimpsest
