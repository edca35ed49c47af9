#include "trainer/generation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/files.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace palimpsest {
namespace {

using support::OwnedBatch;
using support::OwnedTensor;

OwnedTensor logits_of(const std::vector<double>& values) {
  OwnedTensor tensor(DType::kF32, {static_cast<int64_t>(values.size())});
  support::set_values(tensor, values);
  return tensor;
}

// How often each token is drawn.
std::vector<double> frequencies(const Tensor& logits, const SamplingOptions& options, int draws = 20000) {
  std::vector<double> counts(static_cast<size_t>(logits.numel()));
  for (int i = 0; i < draws; ++i) counts[sample_token(logits, options, static_cast<uint64_t>(i))] += 1.0;
  for (double& count : counts) count /= draws;
  return counts;
}

TEST(SampleToken, FollowsTheSoftmax) {
  const OwnedTensor logits = logits_of({std::log(0.5), std::log(0.2), std::log(0.3)});
  const auto plain = frequencies(logits, {});
  EXPECT_NEAR(plain[0], 0.5, 0.015);
  EXPECT_NEAR(plain[1], 0.2, 0.015);
  EXPECT_NEAR(plain[2], 0.3, 0.015);
  // Half the temperature squares the odds.
  const auto cold = frequencies(logits, {.temperature = 0.5});
  EXPECT_NEAR(cold[0], 0.25 / 0.38, 0.015);
  EXPECT_NEAR(cold[1], 0.04 / 0.38, 0.015);
}

TEST(SampleToken, CutsTheUnlikely) {
  const OwnedTensor logits = logits_of({std::log(0.5), std::log(0.15), std::log(0.3), std::log(0.05)});
  const auto top_2 = frequencies(logits, {.top_k = 2});
  EXPECT_NEAR(top_2[0], 0.5 / 0.8, 0.015);
  EXPECT_EQ(top_2[1] + top_2[3], 0.0);
  const auto nucleus = frequencies(logits, {.top_p = 0.9});  // 0.5 + 0.3 + 0.15 first reach 0.9
  EXPECT_NEAR(nucleus[1], 0.15 / 0.95, 0.015);
  EXPECT_EQ(nucleus[3], 0.0);
  const auto both = frequencies(logits, {.top_k = 2, .top_p = 0.6});  // 0.625 of the two reaches 0.6 alone
  EXPECT_EQ(both[0], 1.0);
  EXPECT_EQ(frequencies(logits, {.top_p = 1e-9}, 100)[0], 1.0);
}

TEST(SampleToken, TemperatureZeroTakesTheMostLikely) {
  const OwnedTensor logits = logits_of({1.0, 3.0, 3.0, 2.0});
  EXPECT_EQ(frequencies(logits, {.temperature = 0.0}, 100)[1], 1.0);
}

TEST(SampleToken, IsAFunctionOfSeedAndIndex) {
  const OwnedTensor logits = logits_of(std::vector<double>(50, 0.0));
  std::vector<int32_t> first, again, other;
  for (uint64_t i = 0; i < 30; ++i) {
    first.push_back(sample_token(logits, {.seed = 1}, i));
    again.push_back(sample_token(logits, {.seed = 1}, i));
    other.push_back(sample_token(logits, {.seed = 2}, i));
  }
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
}

TEST(SampleToken, RefusesWhatMakesNoSense) {
  const OwnedTensor bad = logits_of({1.0, std::numeric_limits<double>::quiet_NaN()});
  EXPECT_NE(support::user_error_of([&] { sample_token(bad, {}, 0); }).find("not finite"), std::string::npos);
  for (const SamplingOptions& options :
       {SamplingOptions{.temperature = -1.0}, {.top_k = -1}, {.top_p = 0.0}, {.top_p = 1.5}})
    EXPECT_NE(support::user_error_of([&] { validate(options); }).find("must be"), std::string::npos);
}

// A tiny hybrid of every mixer with memory for one request.
class Generate : public testing::Test {
 protected:
  Generate() : config_(support::tiny_config()), bench_(config_) {}

  std::vector<int32_t> run(const GenerationRequest& request) {
    bench_.allocate(ParameterUse::kInference,
                    rehearse_generation(bench_.model(), bench_.registry(), bench_.device(), bench_.dtype(), request));
    // Larger than a new model's, so that the most likely token is not a matter of rounding.
    bench_.registry().initialize(1, 0.3);
    std::vector<int32_t> streamed;
    const std::vector<int32_t> text =
        generate(bench_.model(), bench_.context(), request, [&](int32_t token) { streamed.push_back(token); });
    EXPECT_EQ(streamed, text);
    return text;
  }

  Config config_;
  Workbench bench_;
};

TEST_F(Generate, TakesTheTokensThatTheParallelFormFindsMostLikely) {
  GenerationRequest request = {.max_tokens = 40, .num_ids = 37, .sampling = {.temperature = 0.0}};
  request.prompt = support::random_documents({300}, 37, 1)[0];  // longer than a piece of the prompt
  const std::vector<int32_t> text = run(request);
  ASSERT_EQ(text.size(), 40u);
  // Teacher forcing: the whole text at once.
  std::vector<int32_t> tokens = request.prompt;
  tokens.insert(tokens.end(), text.begin(), text.end());
  support::TinyRun parallel(config_, static_cast<int64_t>(tokens.size()));
  parallel.registry().initialize(1, 0.3);
  const OwnedBatch batch({tokens});
  OwnedTensor logits(DType::kF64, {static_cast<int64_t>(tokens.size()), 37});
  Context context = parallel.bench().context();
  parallel.bench().model().forward_logits(context, batch.input(), logits);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto row = static_cast<int64_t>(request.prompt.size() + i) - 1;
    EXPECT_EQ(text[i], sample_token(logits.tensor().rows(row, 1).view({37}), request.sampling, 0)) << i;
  }
}

TEST_F(Generate, StopsAtTheStopTokenAndWithinTheTokenizersIds) {
  GenerationRequest request = {.prompt = {3}, .max_tokens = 200, .num_ids = 5};
  for (const int32_t token : run(request)) EXPECT_LT(token, 5);
  request.stop = run(request).at(7);
  const std::vector<int32_t> stopped = run(request);
  EXPECT_LE(stopped.size(), 7u);
  for (const int32_t token : stopped) EXPECT_NE(token, *request.stop);
}

TEST_F(Generate, NoNewTokensAreNone) {
  EXPECT_TRUE(run({.prompt = {3}, .max_tokens = 0, .num_ids = 37}).empty());
}

}  // namespace
}  // namespace palimpsest
