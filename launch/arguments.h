// The command line as plain structs, one for each subcommand. arguments.cpp alone knows the parsing library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "data/tokenize.h"
#include "trainer/generation.h"

namespace palimpsest {

// CONFIG [key=value ...], which most subcommands begin with.
struct ConfigArguments {
  std::string path;
  std::vector<std::string> overrides;
};

struct TrainArguments {
  ConfigArguments config;
  bool dry_run = false;
  std::string print_key;  // empty: none
};
struct ExplainArguments {};
struct EvalArguments {
  ConfigArguments config;
  std::optional<int64_t> stride;
  std::string json;  // empty: none
};
struct ScoreArguments {
  ConfigArguments config;
  std::optional<int64_t> stride;
  std::string tokens, out;
};
struct GenerateArguments {
  ConfigArguments config;
  std::string prompt;
  std::string prompt_file;  // in its place; "-": standard input
  int64_t max_tokens = 256;
  SamplingOptions sampling;
};
struct TokenizeArguments {
  CorpusOptions corpus;
  std::string tokenizer = "bytes";
  std::string out;
  std::optional<int64_t> train_sentencepiece;  // vocabulary of the model to train first and write to `tokenizer`
  int threads = 0;                             // 0: all cores
};
struct InspectArguments {
  std::string path;
  bool verify = false;  // the verdict alone
};
struct MergeArguments {
  std::string in, out;
};
struct ImportHfArguments {
  std::string directory, out;
};
struct PlanArguments {
  ConfigArguments config;
  int64_t ranks = 1;
  std::vector<int64_t> layout;  // data, sequence, tensor; empty: all that there are
  int64_t ranks_per_host = 8;
  std::optional<double> memory_gib;  // most that a rank may need
  int64_t top = 20;                  // layouts in the table
  std::string json;
};
struct ExportHfArguments {
  std::string checkpoint, out;
  bool drop_unknown = false;
};
struct BenchTrainArguments {
  ConfigArguments config;
  int64_t steps = 10;
  std::string json;
};
struct BenchKernelsArguments {
  ConfigArguments config;
  double seconds = 0.2;
  std::string only;
  std::string json;
};
// --help and --version: text for standard output, and nothing else to do.
struct TextArguments {
  std::string text;
};

using Arguments =
    std::variant<TextArguments, TrainArguments, ExplainArguments, EvalArguments, ScoreArguments, GenerateArguments,
                 TokenizeArguments, InspectArguments, MergeArguments, ImportHfArguments, ExportHfArguments,
                 PlanArguments, BenchTrainArguments, BenchKernelsArguments>;

// Throws a UserError of one line on arguments that make no sense.
Arguments parse_arguments(int argc, const char* const* argv);

}  // namespace palimpsest
