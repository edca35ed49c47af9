#include "trainer/evaluation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "data/hdf5_file.h"
#include "kernels/elementwise.h"
#include "tests/support/files.h"
#include "tests/support/shard_files.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"
#include "tests/support/training.h"

namespace palimpsest {
namespace {

using support::OwnedBatch;
using support::RecordedConsole;
using support::TempDirectory;
using support::tiny_config;
using support::TinyRun;

constexpr int64_t kVocab = 37;

class Evaluate : public testing::Test {
 protected:
  Evaluate() : run_(tiny_config(), 8 * 512) {}

  Evaluation evaluate_rows(const Dataset& dataset, const EvaluationOptions& options,
                           const OnScoredBatch& on_batch = {}) {
    return evaluate(run_.bench().model(), run_.bench().context(), dataset, options, console_, "set", on_batch);
  }
  Dataset write(const std::string& name, const std::vector<int64_t>& lengths) {
    support::write_documents(root_ / name, support::small_vocabulary(kVocab), lengths);
    return Dataset(root_ / name);
  }
  // The losses of the documents, `together` of them in a batch, added up.
  double sum_over_documents(const Dataset& dataset, size_t together) {
    std::vector<int64_t> starts;
    dataset.document_starts(0, dataset.num_tokens(), starts);
    starts.push_back(dataset.num_tokens());
    double sum = 0.0;
    for (size_t first = 0; first + 1 < starts.size(); first += together) {
      std::vector<std::vector<int32_t>> documents;
      for (size_t i = first; i < std::min(first + together, starts.size() - 1); ++i) {
        documents.emplace_back(static_cast<size_t>(starts[i + 1] - starts[i]));
        dataset.read(starts[i], documents.back());
      }
      const OwnedBatch batch(documents);
      support::OwnedTensor losses(DType::kF64, {batch.input().tokens.dim(0)});
      Context context = run_.bench().context();
      run_.bench().model().forward_loss(context, batch.input(), losses);
      const std::vector<double> values = support::values_of(losses);
      sum = std::accumulate(values.begin(), values.end(), sum);
    }
    return sum;
  }

  TempDirectory root_;
  TinyRun run_;
  RecordedConsole console_;
};

TEST_F(Evaluate, BatchAndPackingMakeNoDifference) {
  const Dataset dataset = write("documents", {5, 64, 300});
  // The whole file in one row.
  const Evaluation packed = evaluate_rows(dataset, {.row_length = 400, .stride = 400, .batch_rows = 2});
  EXPECT_EQ(packed.tokens, 366);
  EXPECT_EQ(packed.left_out, 3);
  EXPECT_EQ(packed.bytes, 5 + 64 + 300 - 6);
  for (const size_t together : {1, 2, 3})
    EXPECT_NEAR(sum_over_documents(dataset, together), packed.loss_sum, 1e-10 * packed.loss_sum) << together;
}

TEST_F(Evaluate, TokensAreThoseOfTheFileWhateverTheBatch) {
  const Dataset dataset = write("one", {10007});
  std::vector<Evaluation> evaluations;
  for (const int64_t batch : {1, 3, 8})
    evaluations.push_back(evaluate_rows(dataset, {.row_length = 64, .stride = 64, .batch_rows = batch}));
  for (const Evaluation& evaluation : evaluations) {
    EXPECT_EQ(evaluation.tokens, 10006);
    EXPECT_EQ(evaluation.left_out, 1);
    EXPECT_NEAR(evaluation.loss_sum, evaluations[0].loss_sum, 1e-10 * evaluations[0].loss_sum);
  }
}

TEST_F(Evaluate, EveryTokenIsScoredOnceForAnyStrideAndAUniformModelHasThePerplexityOfItsVocabulary) {
  for (const Parameter& parameter : run_.registry().parameters()) fill_zero(run_.bench().stream(), parameter.value);
  const Dataset dataset = write("one", {1000});
  for (const int64_t stride : {16, 32, 50, 64}) {
    std::map<int64_t, int> times_scored;
    const Evaluation evaluation = evaluate_rows(
        dataset, {.row_length = 64, .stride = stride, .batch_rows = 5}, [&](const Batch& batch, const Tensor&) {
          for (int64_t i = 0; i < static_cast<int64_t>(batch.targets.size()); ++i)
            if (batch.targets[i] != Batch::kNoTarget)
              ++times_scored[batch.row_begin[i / batch.row_length] + i % batch.row_length + 1];
        });
    EXPECT_NEAR(evaluation.perplexity(), 37.0, 37e-6);
    EXPECT_EQ(evaluation.tokens, 999);
    ASSERT_EQ(times_scored.size(), 999u);
    EXPECT_EQ(times_scored.begin()->first, 1);
    EXPECT_EQ(times_scored.rbegin()->first, 999);
    for (const auto& [token, times] : times_scored) EXPECT_EQ(times, 1) << token;
  }
}

TEST_F(Evaluate, ASmallerStrideGivesLongerContexts) {
  // The last token of a document of 100: with windows of 64 at stride 64 it sees 34 tokens, at stride 16 at least 48.
  const Dataset dataset = write("one", {100});
  const auto last_logprob = [&](int64_t stride, int64_t row_length) {
    double loss = 0.0;
    evaluate_rows(dataset, {.row_length = row_length, .stride = stride, .batch_rows = 1},
                  [&](const Batch& batch, const Tensor& token_loss) {
                    for (int64_t i = 0; i < token_loss.numel(); ++i)
                      if (batch.targets[i] != Batch::kNoTarget) loss = token_loss.data<double>()[i];
                  });
    return loss;
  };
  EXPECT_NE(last_logprob(64, 64), last_logprob(16, 64));
}

TEST_F(Evaluate, RowsAreNotLongerThanTheSet) {
  const Dataset dataset = write("one", {100});
  int64_t computed = 0;
  const Evaluation evaluation =
      evaluate_rows(dataset, {.row_length = 512, .stride = 512, .batch_rows = 2},
                    [&](const Batch&, const Tensor& token_loss) { computed += token_loss.numel(); });
  EXPECT_EQ(computed, 100);
  EXPECT_EQ(evaluation.tokens, 99);
  EXPECT_NEAR(evaluation.loss_sum, sum_over_documents(dataset, 1), 1e-10 * evaluation.loss_sum);
}

TEST_F(Evaluate, PartOfASetHasNoBitsPerByte) {
  const Dataset dataset = write("one", {1000});
  const Evaluation part = evaluate_rows(dataset, {.row_length = 64, .stride = 64, .batch_rows = 4, .max_rows = 3});
  EXPECT_EQ(part.tokens, 3 * 64);
  EXPECT_FALSE(part.bits_per_byte().has_value());
}

TEST_F(Evaluate, ScoresStandBesideTheirTokens) {
  const Dataset dataset = write("documents", {2, 64, 30, 5});
  const EvaluationOptions options = {.row_length = 16, .stride = 8, .batch_rows = 3};
  const std::string out = root_ / "scores.h5";
  const Evaluation evaluation =
      score_to_file(run_.bench().model(), run_.bench().context(), dataset, options, console_, out);
  const Hdf5File file = Hdf5File::open(out);
  const std::vector<float> logprob = file.read<float>("logprob");
  std::vector<int32_t> tokens(101);
  dataset.read(0, tokens);
  EXPECT_EQ(file.read<int32_t>("tokens"), tokens);
  ASSERT_EQ(logprob.size(), 101u);
  double sum = 0.0;
  for (size_t i = 0; i < logprob.size(); ++i) {
    EXPECT_EQ(std::isnan(logprob[i]), tokens[i] == dataset.vocabulary().bos) << i;
    if (!std::isnan(logprob[i])) sum -= static_cast<double>(logprob[i]);
  }
  EXPECT_EQ(evaluation.tokens, 97);
  EXPECT_NEAR(sum, evaluation.loss_sum, 1e-6 * sum);
  EXPECT_EQ(evaluate_rows(dataset, options).loss_sum, evaluation.loss_sum);
}

TEST(Evaluation, ShardsOfAnotherTokenizerAreNamed) {
  const std::string folder = PALIMPSEST_SOURCE_DIR "/tests/data/tokenizers/";
  const auto notice = [](const std::string& tokenizer, const Vocabulary& shards) {
    Config config;
    config.data.tokenizer = tokenizer;
    return tokenizer_notice(config, shards);
  };
  const Vocabulary bytes = vocabulary_of(*load_tokenizer("bytes"));
  const Vocabulary unigram = vocabulary_of(*load_tokenizer(folder + "unigram/tokenizer.json"));
  EXPECT_EQ(notice("bytes", bytes), "");
  EXPECT_EQ(notice(folder + "unigram/tokenizer.json", unigram), "");
  EXPECT_EQ(notice("bytes", unigram), "data.tokenizer is bytes, but the shards were made with tokenizer.json");
  // Another file of the same name.
  EXPECT_EQ(notice(folder + "t5/tokenizer.json", unigram), "data.tokenizer is " + folder +
                                                               "t5/tokenizer.json, but the shards were made with "
                                                               "another tokenizer.json");
  EXPECT_EQ(notice("nowhere/tokenizer.json", unigram), "");
  EXPECT_NE(notice("nowhere/a.model", unigram), "");
  // A file that was renamed is the same tokenizer.
  const TempDirectory root;
  support::write_file(root / "u.json", support::read_file(folder + "unigram/tokenizer.json"));
  EXPECT_EQ(notice(root / "u.json", unigram), "");
}

TEST(Evaluation, AddsLossesBeforeItDivides) {
  // 100 tokens of loss 1 and 4 of loss 3.
  const Evaluation evaluation = {.loss_sum = 100 * 1.0 + 4 * 3.0, .tokens = 104, .bytes = 260};
  EXPECT_DOUBLE_EQ(evaluation.mean_loss(), 112.0 / 104.0);
  EXPECT_DOUBLE_EQ(evaluation.perplexity(), std::exp(112.0 / 104.0));
  EXPECT_DOUBLE_EQ(evaluation.bits_per_byte().value(), 112.0 / std::log(2.0) / 260.0);
  const auto json = nlohmann::json::parse(to_json(evaluation).text());
  EXPECT_EQ(json.at("loss_sum"), 112.0);
  EXPECT_EQ(json.at("tokens"), 104);
  EXPECT_EQ(json.at("bytes"), 260);
}

}  // namespace
}  // namespace palimpsest
