// Bad input as a user meets it: one line with file and position, exit code 2, and nothing written.
#include <gtest/gtest.h>

#include <csignal>

#include "data/dataset.h"
#include "tests/launch/run_folder.h"
#include "tests/support/shard_files.h"

namespace palimpsest {
namespace {

using support::expect_user_error;
using support::is_one_line;
using support::ProgramResult;
using support::read_file;
using support::run_palimpsest;
using support::SmallFileSystem;
using support::TempDirectory;
using support::write_file;

class BadInput : public support::RunFolder {};

void flip_a_bit_in_the_middle(const std::string& path) {
  support::flip_bit(path, static_cast<size_t>(file_size(path)) / 2, 2);
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
  expect_no_run({"config.yaml: data.train is missing"}, {"data.train=null"});
  expect_no_run({"config.yaml: train.steps is missing"}, {"train.steps=null"});
  expect_user_error({"train", root_ / "none.yaml"}, {"none.yaml"});
  expect_user_error({"eval", file_, "data.eval=null"}, {"config.yaml: data.eval is missing"});
  write_file(file_, "train:\n  steps: 3\n  stepz: 4\n");
  expect_no_run({"config.yaml:3:3", "stepz", "steps"});
  write_file(file_, "train:\n  steps: 3\n  steps: 4\n");
  expect_no_run({"config.yaml:3:3", "steps"});
  write_file(file_, "train: {steps: 1e-3x}\n");
  expect_no_run({"config.yaml:1:16", "1e-3x"});
  write_file(file_, "train: {steps: [\n");
  expect_no_run({"config.yaml:"});
}

TEST_F(BadInput, SizesThatNoMachineHolds) {
  const std::string largest = "9223372036854775807";
  for (const char* key : {"model.hidden_size", "model.num_layers", "model.mlp.intermediate_size", "model.kda.num_heads",
                          "model.kda.head_dim", "model.mla.kv_lora_rank", "model.mla.qk_rope_head_dim",
                          "model.moe.num_experts", "model.vocab_size"})
    expect_no_run({key, "is " + largest, "must be at most"}, {key + ("=" + largest)});
  // Each size alone is allowed.
  expect_no_run({"the model is too large"},
                {"model.hidden_size=1048576", "model.mlp.intermediate_size=1048576", "model.num_layers=4096"});
  expect_no_run({"out of memory: 'batches' needs ", "this machine has "}, {"train.sequences_per_step=1073741824"});
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

TEST_F(BadInput, ARenamedCheckpointIsNotTakenForANewerOne) {
  train();
  const std::string checkpoints = checkpoint_path(config_);
  rename_path(list_checkpoints(checkpoints).back().path, checkpoints + "/step-000999");
  expect_user_error({"train", file_, "train.steps=20"}, {"step-000999: renamed: its manifest is of step 10"});
  expect_user_error({"eval", file_}, {"step-000999: renamed"});
  EXPECT_EQ(run_palimpsest({"eval", file_, "from=" + checkpoints + "/step-000999"}).exit_code, 0);  // meant so
}

TEST_F(BadInput, ScoresReplaceScoresAlone) {
  train();
  const std::string whole = read_file(shard());
  for (const std::string& out : {shard(), file_, root_.path()})
    expect_user_error({"score", file_, "--tokens", root_ / "shards", "--out", out}, {out, "does not hold scores"});
  EXPECT_EQ(read_file(shard()), whole);
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(run_palimpsest({"score", file_, "--tokens", root_ / "shards", "--out", root_ / "s.h5"}).exit_code, 0);
}

TEST_F(BadInput, ASecondRunInOneFolderChangesNothing) {
  support::RunningProgram first({"train", file_, "train.steps=100000000"}, {});
  support::wait_for_steps(config_, 3);
  const std::string before = read_file(config_.run.dir + "/config.yaml");
  expect_user_error({"train", file_, "run.seed=9"}, {"another process is saving its checkpoints here"});
  EXPECT_EQ(read_file(config_.run.dir + "/config.yaml"), before);
  EXPECT_EQ(list_directory(config_.run.dir + "/tensorboard").size(), 1U);
  // An impatient user: more signals do not break the save that the first one asked for.
  for (const int signal : {SIGTERM, SIGTERM, SIGUSR1}) first.signal(signal);
  const ProgramResult result = first.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(list_checkpoints(checkpoint_path(config_)).back().has_manifest);
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

TEST_F(BadInput, AFileAtTheLimitOfItsSizeIsReported) {
  const ProgramResult result = support::run_command_line(
      {"/bin/bash", "-c", "ulimit -f 8; exec " PALIMPSEST_BINARY " train " + file_ + " > " + (root_ / "log")});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_TRUE(is_one_line(result.err)) << result.err;
  EXPECT_NE(result.err.find("File too large"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(checkpoint_path(config_)), std::string::npos) << result.err;
  EXPECT_TRUE(list_checkpoints(checkpoint_path(config_)).empty());
}

TEST_F(BadInput, QuickstartKeepsTextThatLiesWhereItWouldClear) {
  // A copy: should it go on, it has nothing to build.
  create_directories(root_ / "launch");
  for (const char* script : {"quickstart.sh", "phases.sh"})
    write_file(root_ / ("launch/" + std::string(script)),
               read_file(std::string(PALIMPSEST_SOURCE_DIR) + "/launch/" + script));
  create_directories(root_ / "runs/quickstart");
  const std::string mine = root_ / "runs/quickstart/mine.txt";
  write_file(mine, "text");
  const auto quickstart = [&](const std::string& input) {
    return support::run_command_line({"/bin/bash", root_ / "launch/quickstart.sh", input});
  };
  for (const auto& [input, part] :
       {std::pair(mine, "move it elsewhere"), std::pair(root_ / "none.txt", "cannot read")}) {
    const ProgramResult result = quickstart(input);
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_TRUE(is_one_line(result.err)) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    EXPECT_NE(result.err.find(input), std::string::npos) << result.err;
  }
  EXPECT_EQ(read_file(mine), "text");
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

}  // namespace
}  // namespace palimpsest
