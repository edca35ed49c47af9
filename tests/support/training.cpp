#include "tests/support/training.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "data/file_ops.h"
#include "data/shards.h"
#include "kernels/random.h"
#include "tests/support/shard_files.h"
#include "tests/support/tiny_run.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run_setup.h"

namespace palimpsest::support {

RecordedConsole::RecordedConsole() : file_(std::tmpfile()), console_(file_) {
  CHECK(file_ != nullptr, "no temporary file");
}

RecordedConsole::~RecordedConsole() {
  std::fclose(file_);
}

std::string RecordedConsole::text() const {
  std::string text(static_cast<size_t>(std::ftell(file_)), '\0');
  std::rewind(file_);
  text.resize(std::fread(text.data(), 1, text.size(), file_));
  return text;
}

void write_learnable_shards(const std::string& directory, int64_t num_tokens, uint64_t seed, int64_t longest_document) {
  constexpr int64_t kIds = 35;
  ShardWriter writer(directory, small_vocabulary(kIds + 2), num_tokens / 2 + 1);
  uint64_t index = 0;
  const auto draw = [&](int64_t below) {
    return static_cast<int64_t>(random_bits(seed, hash_of("learnable"), index++) % static_cast<uint64_t>(below));
  };
  for (int64_t written = 0; written < num_tokens;) {
    const int64_t length = 1 + draw(longest_document), begin = draw(kIds), stride = 1 + draw(3);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < length; ++i) ids.push_back(static_cast<int32_t>((begin + i * stride) % kIds));
    writer.begin_document();
    writer.append(ids);
    writer.end_document(length);
    written += length + 2;
  }
  writer.finish();
}

Config tiny_run_config(const TempDirectory& root, const std::string& name) {
  Config config = tiny_config(Precision::kF32, {"kda", "mla"});
  config.run.dir = root / name;
  config.data.sequence_length = 24;
  config.data.tokenizer = "none.model";  // training needs no tokenizer, and 37 ids are too few for bytes
  config.data.train = {{.path = root / "shards"}};
  config.data.eval = {{"held_out", root / "held_out"}};
  config.train.steps = 10;
  config.train.sequences_per_step = 4;
  config.train.micro_batch = 4;
  config.checkpoint.every = 0;
  config.checkpoint.background = false;
  config.optimizer.lr = 1e-2;
  config.hardware.peak_tflops = 10;
  if (!path_exists(root / "shards")) write_learnable_shards(root / "shards", 1500);  // 20 steps reach the second epoch
  if (!path_exists(root / "held_out")) write_learnable_shards(root / "held_out", 300, 2);
  return config;
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

void wait_for_steps(const Config& config, size_t steps) {
  const std::string path = config.run.dir + "/metrics.jsonl";
  for (int i = 0; i < 1200; ++i) {
    if (path_exists(path) && count(read_file(path), "\n") >= steps) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  FAIL() << "no " << steps << " steps after a minute";
}

std::vector<nlohmann::json> metrics_of(const Config& config) {
  const std::string text = read_file(config.run.dir + "/metrics.jsonl");
  std::vector<nlohmann::json> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(nlohmann::json::parse(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return lines;
}

std::vector<nlohmann::json> results_of(const Config& config) {
  std::vector<nlohmann::json> lines = metrics_of(config);
  for (nlohmann::json& line : lines) {
    line.erase("tokens_per_second");
    line.erase("mfu");
    line.erase("bytes_sent");  // a process gathers more in its first step
  }
  return lines;
}

std::string checkpoint_bytes(const Config& config, int64_t step) {
  return read_file(checkpoint_path(config) + "/" + checkpoint_name(step) + "/rank-00000-of-00001.h5");
}

}  // namespace palimpsest::support
