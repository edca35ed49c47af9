// Perplexity over the fixed set of tokens that a data set's files define: every token with a context is scored exactly
// once, whatever the batch size.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/batch.h"
#include "data/dataset.h"
#include "model/language_model.h"
#include "model/local_input.h"
#include "parallel/agreement.h"
#include "trainer/config.h"
#include "trainer/console.h"
#include "trainer/json_object.h"

namespace palimpsest {

struct Evaluation {
  double loss_sum = 0.0;         // nats
  int64_t tokens = 0;            // scored
  int64_t left_out = 0;          // not scored: the first token of each document has no context
  std::optional<int64_t> bytes;  // of the original documents; none when part of the set was taken

  double mean_loss() const;                     // nats a token; 0 without tokens
  double perplexity() const;                    // exp(loss_sum / tokens)
  std::optional<double> bits_per_byte() const;  // loss_sum / ln 2 / bytes
};
std::string to_text(const Evaluation& evaluation);
JsonObject to_json(const Evaluation& evaluation);

struct EvaluationOptions {
  int64_t row_length = 0;           // of the windows
  int64_t stride = 0;               // new tokens of a window, the others are their context; at most row_length
  int64_t batch_rows = 1;           // windows at once
  std::optional<int64_t> max_rows;  // the first windows alone; none: all
};

// token_loss [N] f32 or f64 of each batch, in the order of the stream; on the first rank alone.
using OnScoredBatch = std::function<void(const Batch& batch, const Tensor& token_loss)>;
// Every rank of context.mesh calls it and gets the same figures; the rows are shared by its data ranks.
Evaluation evaluate(const LanguageModel& model, Context context, const Dataset& dataset,
                    const EvaluationOptions& options, Console& console, const std::string& name,
                    const OnScoredBatch& on_batch = {});

// A batch as the model takes it on this rank: views of its vectors, or of the sequence rank's part of them.
LocalInput local_input(Batch& batch, const Mesh& mesh);

// A data set to be evaluated. Throws a UserError where it cannot be read or does not fit the model.
std::unique_ptr<Dataset> open_checked_dataset(const std::string& path, const Config& config);

// What there is to say where shards were not made with data.tokenizer; empty where they were. The name alone decides
// where that file cannot be read: using shards needs no tokenizer.
std::string tokenizer_notice(const Config& config, const Vocabulary& shards);

struct EvalSet {
  std::string name;
  std::unique_ptr<Dataset> dataset;
};
// data.eval, each checked.
std::vector<EvalSet> open_eval_sets(const Config& config);
// For check_same_on_ranks.
RankItem contents_of(const std::string& name, const Dataset& dataset);

// Writes <out>: `logprob` [N] f32, the log-probability of each token of the stream, NaN where it has no context, beside
// `tokens` [N] i32. The file appears whole or not at all. Every rank of context.mesh calls it, the first one writes.
Evaluation score_to_file(const LanguageModel& model, Context context, const Dataset& dataset,
                         const EvaluationOptions& options, Console& console, const std::string& out);

}  // namespace palimpsest
