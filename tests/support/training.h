// Whole runs in a temporary folder: shards, a tiny config, and what the run wrote.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/files.h"
#include "trainer/config.h"
#include "trainer/console.h"

namespace palimpsest::support {

// A console whose lines can be read.
class RecordedConsole {
 public:
  RecordedConsole();
  ~RecordedConsole();
  RecordedConsole(const RecordedConsole&) = delete;
  RecordedConsole& operator=(const RecordedConsole&) = delete;
  operator Console&() { return console_; }  // NOLINT: stands for the console in calls
  std::string text() const;

 private:
  std::FILE* file_;
  Console console_;
};

// Shards of `num_tokens` tokens or a little more, in documents of 3 to 60 tokens that repeat a few patterns, so that
// there is something to learn. 35 ids and bos, eos.
void write_learnable_shards(const std::string& directory, int64_t num_tokens, uint64_t seed = 1,
                            int64_t longest_document = 58);

// tiny_config with data in `root`/shards (written when missing) and run.dir `root`/`name`: f32, kda and mla, rows of
// 24, 4 rows a step, saves by the loop itself.
Config tiny_run_config(const TempDirectory& root, const std::string& name);

// How often `part` stands in the text.
size_t count(const std::string& text, const std::string& part);
// Until metrics.jsonl has so many lines; fails the test after a minute.
void wait_for_steps(const Config& config, size_t steps);
// metrics.jsonl, a value a line.
std::vector<nlohmann::json> metrics_of(const Config& config);
// What a step computed, without what depends on the clock.
std::vector<nlohmann::json> results_of(const Config& config);
// The bytes of the checkpoint's tensors.
std::string checkpoint_bytes(const Config& config, int64_t step);

}  // namespace palimpsest::support
