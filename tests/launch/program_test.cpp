// The program as a user meets it: help, errors, exit codes, signals.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdio>
#include <filesystem>

#include "data/dataset.h"
#include "data/tokenizer.h"
#include "model/mixers.h"
#include "tests/launch/run_folder.h"
#include "tests/support/shard_files.h"
#include "tests/support/training.h"

namespace palimpsest {
namespace {

using support::expect_user_error;
using support::is_one_line;
using support::metrics_of;
using support::ProgramResult;
using support::read_file;
using support::run_palimpsest;
using support::TempDirectory;
using support::write_file;

// ---- the command line -----------------------------------------------------------------------------------------------

TEST(Program, HelpOfEverySubcommandIsCompleteWithExitCodes) {
  const std::vector<std::vector<std::string>> commands = {{},
                                                          {"train"},
                                                          {"eval"},
                                                          {"score"},
                                                          {"generate"},
                                                          {"tokenize"},
                                                          {"inspect"},
                                                          {"checkpoint"},
                                                          {"checkpoint", "merge"},
                                                          {"import"},
                                                          {"import", "hf"},
                                                          {"export"},
                                                          {"export", "hf"},
                                                          {"plan"},
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
  expect_user_error({"bench", "train", "x.yaml", "--steps", "0"}, {"--steps: '0' must be a whole number, at least 1"});
}

TEST(Program, NumbersOutOfRangeAndEmptyNamesAreRefused) {
  const std::vector<std::string> generate = {"generate", "x.yaml"}, tokenize = {"tokenize", "--out", "o", "a.txt"};
  struct Bad {
    std::vector<std::string> command;
    const char* option;
    const char* value;
    const char* message;
  };
  for (const Bad& bad : std::vector<Bad>{
           {generate, "--max-tokens", "-1", "'-1' must be a whole number, at least 0 and at most 16777216 ("},
           {generate, "--max-tokens", "9999999999999", "must be a whole number"},
           {generate, "--max-tokens", "1e3", "'1e3' must be a whole number"},
           {generate, "--seed", "-1", "'-1' must be a whole number, at least 0 ("},
           {generate, "--seed", "9223372036854775808", "at least 0 and at most 9223372036854775807 ("},
           {tokenize, "--threads", "100000", "at most 1024"},
           {tokenize, "--threads", "x", "'x' must be a whole number"},
           {tokenize, "--train-sentencepiece", "0", "at least 1"},
           {tokenize, "--split", "", "must not be empty"},
           {tokenize, "--tokenizer", "", "must not be empty"},
           {{"tokenize", "a.txt"}, "--out", "", "must not be empty"},
           {{"score", "x.yaml", "--tokens", "s"}, "--out", "", "must not be empty"},
           {{"eval", "x.yaml"}, "--stride", "0", "at least 1 ("},
           {{"eval", "x.yaml"}, "--json", "", "must not be empty"},
           {{"plan", "x.yaml"}, "--ranks", "0", "at least 1"},
           {{"plan", "x.yaml", "--ranks", "4"}, "--layout", "4,1", "'4,1' must be three whole numbers"},
           {{"plan", "x.yaml", "--ranks", "4"}, "--layout", "4,1,1,1", "must be three whole numbers"},
           {{"plan", "x.yaml", "--ranks", "4"}, "--layout", "4,1,", "must be three whole numbers"},
           {{"plan", "x.yaml", "--ranks", "4"}, "--layout", "4,1,1x", "must be three whole numbers"},
           {{"plan", "x.yaml", "--ranks", "4"}, "--memory", "-1", "'-1' must be a number above 0"},
           {{"plan", "x.yaml", "--ranks", "4"}, "--memory", "inf", "must be a number above 0"},
           {{"bench", "kernels", "x.yaml"}, "--seconds", "1s", "'1s' must be a number above 0"}}) {
    std::vector<std::string> words = bad.command;
    words.insert(words.end(), {bad.option, bad.value});
    expect_user_error(words, {std::string("error: ") + bad.option + ": ", bad.message});
  }
  expect_user_error({"checkpoint", "merge", "run", ""}, {"OUT: must not be empty"});
}

class TrainCommand : public support::RunFolder {};

// ---- runs -----------------------------------------------------------------------------------------------------------

TEST_F(TrainCommand, SignalsSaveAndExitWithZero) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    Config config = config_;
    config.run.dir = root_ / ("signal-" + std::to_string(signal));
    support::RunningProgram program({"train", file_, "run.dir=" + config.run.dir, "train.steps=100000000"}, {});
    support::wait_for_steps(config, 3);
    program.signal(signal);
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    const auto last = static_cast<int64_t>(metrics_of(config).size());
    EXPECT_TRUE(has_manifest(checkpoint_path(config) + "/" + checkpoint_name(last)));
  }
}

// The config comes through a pipe that holds the start up until the signal has come.
TEST_F(TrainCommand, SignalsDuringTheStartEndItInGoodOrder) {
  const std::string pipe = root_ / "pipe.yaml";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto signalled = [&](const std::vector<std::string>& arguments, int signal, const std::string& text) {
    support::RunningProgram program(arguments, {});
    std::FILE* writer = std::fopen(pipe.c_str(), "w");  // waits for the program to open its config
    program.signal(signal);
    std::fwrite(text.data(), 1, text.size(), writer);
    if (!text.empty()) std::fclose(writer);
    ProgramResult result = program.wait();
    if (text.empty()) std::fclose(writer);
    return result;
  };
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    const ProgramResult result = signalled({"train", pipe}, signal, read_file(file_));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    EXPECT_NE(result.out.find("stopped before anything was written, by signal "), std::string::npos) << result.out;
    EXPECT_FALSE(path_exists(config_.run.dir));
  }
  // Nothing to save here: it does not read on.
  EXPECT_EQ(signalled({"train", pipe, "--dry-run"}, SIGTERM, "").exit_code, -SIGTERM);
  train();  // as if nothing had happened
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

TEST_F(TrainCommand, ReportsGoToStandardOutputAlone) {
  train();
  const ProgramResult eval = run_palimpsest({"eval", file_, "--json", "-"});
  EXPECT_EQ(eval.exit_code, 0) << eval.err;
  EXPECT_GT(nlohmann::json::parse(eval.out).at("tokens").get<int64_t>(), 0);
  EXPECT_NE(eval.err.find("perplexity"), std::string::npos) << eval.err;
  const ProgramResult plan = run_palimpsest({"plan", file_, "--ranks", "2", "--json", "-"});
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_FALSE(nlohmann::json::parse(plan.out).empty());
}

TEST_F(TrainCommand, ShardsInOtherTokensAreWarnedOf) {
  train();
  write_file(root_ / "text.txt", "a text in bytes");
  ASSERT_EQ(run_palimpsest({"tokenize", "--out", root_ / "bytes", root_ / "text.txt"}).exit_code, 0);
  // Every id but bos and eos fits the model; one that was trained on these shards would read them well.
  const std::vector<std::string> model = {"model.vocab_size=258", "run.dir=" + (root_ / "other")};
  const auto with = [&](std::vector<std::string> words) {
    words.insert(words.end(), model.begin(), model.end());
    return run_palimpsest(words);
  };
  ASSERT_EQ(with({"train", file_, "train.steps=1"}).exit_code, 0);
  const std::string warning = (root_ / "bytes") + ": data.tokenizer is none.model, but the shards were made with bytes";
  const ProgramResult eval = with({"eval", file_, "data.eval=" + (root_ / "bytes")});
  EXPECT_EQ(eval.exit_code, 0) << eval.err;
  EXPECT_NE(eval.out.find(warning), std::string::npos) << eval.out;
  const ProgramResult score = with({"score", file_, "--tokens", root_ / "bytes", "--out", root_ / "s.h5"});
  EXPECT_EQ(score.exit_code, 0) << score.err;
  EXPECT_NE(score.out.find(warning), std::string::npos) << score.out;
}

TEST_F(TrainCommand, FieldsMayFollowALayout) {
  const ProgramResult plan = run_palimpsest(
      {"plan", file_, "--ranks", "2", "--layout", "-1,1,1", "train.sequences_per_step=6", "--json", "-"});
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_EQ(nlohmann::json::parse(plan.out).at("layouts").at(0).at("data"), 2);
}

TEST_F(TrainCommand, ReportsReachPipesAndFilesBehindLinks) {
  const auto plan = [&](const std::string& to) {
    return support::run_command_line(
        {"/bin/bash", "-c", PALIMPSEST_BINARY " plan " + file_ + " --ranks 2 --json " + to});
  };
  const std::string file = root_ / "report.json", link = root_ / "link", pipe = root_ / "pipe";
  std::filesystem::create_symlink(file, link);
  ASSERT_EQ(plan(link).exit_code, 0);  // to a file that is not there yet
  write_file(file, "old");
  std::filesystem::remove(link);
  std::filesystem::create_symlink(file, link);
  ASSERT_EQ(plan(link).exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_FALSE(nlohmann::json::parse(read_file(file)).empty());
  EXPECT_FALSE(nlohmann::json::parse(plan("/dev/stdout").out).empty());
  ASSERT_EQ(plan(">(cat > " + file + "); wait $!").exit_code, 0);
  EXPECT_FALSE(nlohmann::json::parse(read_file(file)).empty());
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0666), 0);
  ASSERT_EQ(plan(pipe + " & cat " + pipe + " > " + root_ / "read.json" + "; wait $!").exit_code, 0);
  EXPECT_FALSE(nlohmann::json::parse(read_file(root_ / "read.json")).empty());
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));  // as devices do, it stays
}

TEST_F(TrainCommand, AReportThatCannotBeWrittenIsRefusedBeforeTheWork) {
  // There is no run either, at which eval would stop a little later.
  for (const std::string& to : {root_ / "nowhere/e.json", root_.path()}) {
    expect_user_error({"eval", file_, "--json", to}, {to});
    const ProgramResult plan = run_palimpsest({"plan", file_, "--ranks", "2", "--json", to});
    EXPECT_EQ(plan.exit_code, 2);
    EXPECT_EQ(plan.out, "");
    EXPECT_NE(plan.err.find(to), std::string::npos) << plan.err;
  }
}

TEST_F(TrainCommand, OutputThatCannotBeWrittenIsAnErrorOfCommandsThatPrint) {
  train();
  const auto with_output = [&](const std::string& redirection, const std::string& arguments) {
    return support::run_command_line({"/bin/sh", "-c", PALIMPSEST_BINARY " " + arguments + redirection});
  };
  for (const std::string& arguments : {"inspect " + config_.run.dir, "eval " + file_, std::string("train --explain")}) {
    const ProgramResult result = with_output(" > /dev/full", arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_NE(result.err.find("error: standard output cannot be written"), std::string::npos) << result.err;
  }
  EXPECT_EQ(with_output(" > /dev/full", "train " + file_ + " train.steps=12").exit_code, 0);
  // A closed stream's place is not taken by a file of the run, into which its lines would go.
  EXPECT_EQ(with_output(" >&-", "train " + file_ + " train.steps=14").exit_code, 0);
  EXPECT_EQ(run_palimpsest({"inspect", config_.run.dir, "--verify"}).exit_code, 0);
  const ProgramResult streams = with_output(" <&- >&- 2>&-", "tokenize --out " + (root_ / "t") + " " + file_ + ".txt");
  EXPECT_EQ(streams.exit_code, 2);
}

TEST_F(TrainCommand, OutlivesTheReaderOfItsLog) {
  const ProgramResult result = support::run_command_line(
      {"/bin/bash", "-c", "set -o pipefail; " PALIMPSEST_BINARY " train " + file_ + " | true"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(has_manifest(checkpoint_path(config_) + "/" + checkpoint_name(10)));
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
  write_file(root / "prompt", "in the");
  EXPECT_EQ(
      run_palimpsest(with({"generate"}, {"--prompt-file", root / "prompt", "--max-tokens", "20", "--seed", "5"})).out,
      sample.out);
  std::vector<std::string> from_input = {"/bin/sh", "-c", PALIMPSEST_BINARY " \"$@\" < " + (root / "prompt"), "sh"};
  for (const std::string& word : with({"generate"}, {"--prompt-file", "-", "--max-tokens", "20", "--seed", "5"}))
    from_input.push_back(word);
  EXPECT_EQ(support::run_command_line(from_input).out, sample.out);
  expect_user_error(with({"generate"}, {"--prompt-file", root / "none"}), {root / "none", "No such file"});
  const ProgramResult inspected = run_palimpsest({"inspect", root / "run"});
  EXPECT_EQ(inspected.exit_code, 0);
  EXPECT_NE(inspected.out.find("match their checksums"), std::string::npos);
  const ProgramResult verified = run_palimpsest({"inspect", root / "run", "--verify"});
  EXPECT_EQ(verified.exit_code, 0);
  EXPECT_TRUE(is_one_line(verified.out)) << verified.out;
}

// As the README has it: shards and a ready config are enough.
TEST(Program, ConfigsOfEveryMixerTrainOnShardsAlone) {
  const TempDirectory root;
  write_file(root / "text.txt", std::string(3000, 'a'));
  ASSERT_EQ(run_palimpsest({"tokenize", "--out", root / "shards", root / "text.txt"}).exit_code, 0);
  for (const std::string& kind : mixer_kinds()) {
    const ProgramResult result =
        run_palimpsest({"train", PALIMPSEST_SOURCE_DIR "/configs/" + kind + ".yaml", "data.train=" + (root / "shards"),
                        "run.dir=" + (root / kind), "train.steps=1", "hardware.peak_tflops=1"});
    EXPECT_EQ(result.exit_code, 0) << kind << ": " << result.err;
  }
}

TEST(Program, TokenizeSaysWhenNoLineSeparates) {
  const TempDirectory root;
  write_file(root / "text.txt", "one\n\ntwo\n");
  const ProgramResult typo =
      run_palimpsest({"tokenize", "--out", root / "a", root / "text.txt", "--split", "blank-line"});
  EXPECT_EQ(typo.exit_code, 0) << typo.err;
  EXPECT_NE(typo.out.find("warning: --split blank-line: no line"), std::string::npos) << typo.out;
  const ProgramResult right =
      run_palimpsest({"tokenize", "--out", root / "b", root / "text.txt", "--split", "blank-lines"});
  EXPECT_EQ(right.out.find("warning"), std::string::npos) << right.out;
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
