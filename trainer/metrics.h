// metrics.jsonl: one JSON object a line, one line an optimizer step.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/mesh.h"
#include "trainer/expert_use.h"

namespace palimpsest {

struct EvalMetrics {
  std::string name;  // of the set, as in data.eval
  double loss = 0;   // nats a token
  std::optional<double> bits_per_byte;
};

struct StepMetrics {
  int64_t step = 0;    // from 1
  int64_t tokens = 0;  // targets seen since the run began
  double loss = 0;     // mean over the step's targets, nats a token, without z-loss
  double grad_norm = 0;
  double lr = 0;
  double tokens_per_second = 0;
  std::optional<double> mfu;       // 0 to 1
  int64_t skipped_steps = 0;       // since the run began
  std::vector<ExpertUse> experts;  // a layer with routed experts each
  SentBytes bytes_sent;            // in the step, by the first rank
  std::vector<EvalMetrics> eval;   // when the step ended with an evaluation
};

// The line, without its end: {"step":1,"tokens":...,"loss":...,"grad_norm":...,"lr":...,"tokens_per_second":...,
// "mfu":...,"skipped_steps":...}, with routed experts "experts":{"LAYER":{"fewest":...,"most":...,"mean":...}}, the
// tokens of one expert, with several ranks "bytes_sent":{"AXIS":...}, and, after an evaluation,
// "eval":{"NAME":{"loss":...,"perplexity":...,"bits_per_byte":...}}. Numbers read back to the same bits; what is absent
// or not finite is null.
std::string to_json(const StepMetrics& metrics);

// Writes the file, a line at a time, each flushed to the operating system.
class MetricsLog {
 public:
  // Continues the file after `last_step`: lines of later steps, which the run takes again, and lines torn by a kill are
  // dropped, so that each step stands once. last_step 0 begins the file anew. Throws a UserError when the file cannot
  // be written, here and in write.
  MetricsLog(const std::string& path, int64_t last_step);
  void write(const StepMetrics& metrics);

 private:
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace palimpsest
