// The whole tiny hybrid: gradients, packing, decoding, checkpointing of activations, FLOPs.
#include "model/language_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "model/mixers.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace palimpsest {
namespace {

using support::gradients_of;
using support::is_bit_identical;
using support::is_close;
using support::OwnedBatch;
using support::OwnedTensor;
using support::random_documents;
using support::tiny_config;
using support::TinyRun;
using support::values_of;

using Tokens = std::vector<std::vector<int32_t>>;

constexpr int64_t kVocab = 37;

// Weights far enough from zero that every part of the model matters.
constexpr double kSpread = 0.3;

double loss_of(TinyRun& run, const OwnedBatch& batch, double z_loss = 0.0) {
  OwnedTensor loss(DType::kF64, {1}), z(DType::kF64, {1});
  support::fill(loss, 0.0);
  support::fill(z, 0.0);
  Context context = run.bench().context();
  run.bench().model().forward_backward(context, batch.input(), {.grad_scale = 1.0, .z_loss = z_loss}, loss, z);
  return values_of(loss)[0] + values_of(z)[0];
}

std::vector<double> logits_of(TinyRun& run, const OwnedBatch& batch) {
  OwnedTensor logits(run.bench().dtype(), {batch.input().tokens.dim(0), kVocab});
  Context context = run.bench().context();
  run.bench().model().forward_logits(context, batch.input(), logits);
  return values_of(logits);
}

// ---- gradients ------------------------------------------------------------------------------------------------------

void expect_gradients_match(const Config& config) {
  TinyRun run(config);
  run.registry().initialize(3, kSpread);
  const OwnedBatch batch(random_documents({11, 1, 18}, kVocab, 1));
  run.registry().zero_gradients(run.bench().stream());
  constexpr double kZLoss = 0.01, kStep = 2e-4;
  loss_of(run, batch, kZLoss);
  // The loss alone from here on: its gradients go to a place nobody reads.
  std::vector<OwnedTensor> gradients;
  for (const Parameter& parameter : run.registry().parameters()) {
    gradients.emplace_back(DType::kF64, parameter.grad.shape());
    support::set_values(gradients.back(), values_of(parameter.grad));
  }
  size_t i = 0;
  for (const Parameter& parameter : run.registry().parameters()) {
    EXPECT_TRUE(support::gradient_matches([&] { return loss_of(run, batch, kZLoss); }, parameter.value, gradients[i++],
                                          1e-6, 6, kStep))
        << parameter.spec.name;
  }
}

TEST(LanguageModelGradients, MatchCentralDifferences) {
  expect_gradients_match(tiny_config(Precision::kF64, mixer_kinds()));
}

TEST(LanguageModelGradients, MatchCentralDifferencesWithTheOtherOptions) {
  Config config = tiny_config();
  config.model.tie_embeddings = true;
  config.model.norm = NormWeight::kOneCentred;
  config.model.kda.gate_lower_bound.reset();
  config.model.kda.num_value_heads = 4;
  config.model.kda.full_rank_gate = true;
  config.model.kda.negative_eigenvalues = true;
  config.model.gdn.negative_eigenvalues = true;
  config.model.mla.rope = RopeKind::kNone;
  config.model.mla.q_lora_rank.reset();
  config.model.attention.output_gate = false;
  config.model.attention.qk_norm = false;
  config.model.attention.rope = RopeKind::kInterleaved;
  config.model.attention.rope_dim = 4;
  expect_gradients_match(config);
}

TEST(LanguageModelGradients, OfTiedEmbeddingsAreTheSumOfBothUses) {
  Config config = tiny_config();
  TinyRun separate(config);
  config.model.tie_embeddings = true;
  TinyRun tied(config);
  separate.registry().initialize(3, kSpread);
  tied.registry().initialize(3, kSpread);
  support::set_values(separate.parameter("lm_head.weight").value,
                      values_of(separate.parameter("model.embed_tokens.weight").value));
  const OwnedBatch batch(random_documents({30}, kVocab, 1));
  for (TinyRun* run : {&separate, &tied}) {
    run->registry().zero_gradients(run->bench().stream());
    loss_of(*run, batch);
  }
  std::vector<double> sum = values_of(separate.parameter("model.embed_tokens.weight").grad);
  const std::vector<double> head = values_of(separate.parameter("lm_head.weight").grad);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += head[i];
  EXPECT_TRUE(is_close(tied.parameter("model.embed_tokens.weight").grad, sum, 1e-12));
  EXPECT_EQ(tied.registry().find("lm_head.weight"), nullptr);
}

TEST(LanguageModelGradients, OfDecayParametersAreNotZeroAtTheStart) {
  TinyRun run(tiny_config(Precision::kF32));
  const OwnedBatch batch(random_documents({40}, kVocab, 1));
  run.registry().zero_gradients(run.bench().stream());
  loss_of(run, batch);
  for (const Parameter& parameter : run.registry().parameters()) {
    if (!parameter.spec.name.ends_with("A_log") && !parameter.spec.name.ends_with("dt_bias")) continue;
    for (const double value : values_of(parameter.grad)) EXPECT_NE(value, 0.0) << parameter.spec.name;
  }
}

TEST(ActivationCheckpointing, ChangesNoBit) {
  const OwnedBatch batch(random_documents({45, 22}, kVocab, 1));
  std::vector<std::vector<double>> gradients;
  for (const auto checkpointing :
       {ActivationCheckpointing::kNone, ActivationCheckpointing::kSelective, ActivationCheckpointing::kFull}) {
    Config config = tiny_config(Precision::kF32);
    config.train.activation_checkpointing = checkpointing;
    TinyRun run(config);
    run.step().begin(batch.num_targets());
    run.step().accumulate(batch.input());
    gradients.push_back(gradients_of(run.registry()));
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  EXPECT_EQ(gradients[0], gradients[2]);
}

// Backward reads a stream in f64 as it was rounded to f32, except where it computes a branch again. Neither is f32.
TEST(WideStream, BackwardReadsItRoundedOrAsItWas) {
  const OwnedBatch batch(random_documents({45, 22}, kVocab, 1));
  const auto gradients_with = [&](Precision precision, Precision residual, ActivationCheckpointing checkpointing) {
    Config config = tiny_config(precision, mixer_kinds());
    config.residual = residual;
    config.train.activation_checkpointing = checkpointing;
    TinyRun run(config);
    run.step().begin(batch.num_targets());
    run.step().accumulate(batch.input());
    return gradients_of(run.registry());
  };
  const auto exact = gradients_with(Precision::kF64, Precision::kF64, ActivationCheckpointing::kNone);
  const auto narrow = gradients_with(Precision::kF32, Precision::kF32, ActivationCheckpointing::kNone);
  for (const auto checkpointing :
       {ActivationCheckpointing::kNone, ActivationCheckpointing::kSelective, ActivationCheckpointing::kFull}) {
    const auto wide = gradients_with(Precision::kF32, Precision::kF64, checkpointing);
    EXPECT_LE(support::relative_error(wide, exact), 2e-6);
    EXPECT_NE(wide, narrow);
  }
}

// ---- packing --------------------------------------------------------------------------------------------------------

TEST(Packing, DocumentsDoNotSeeEachOther) {
  // Each document has ids of its own, so a row of the embedding's gradient is the input gradient of one document.
  Tokens documents = random_documents({37, 1, 64, 130}, 9, 1);
  for (size_t i = 0; i < documents.size(); ++i)
    for (int32_t& token : documents[i]) token += static_cast<int32_t>(9 * i);
  Tokens changed = documents;
  for (int32_t& token : changed[0]) token = (token + 4) % 9;
  TinyRun run(tiny_config(Precision::kF32, mixer_kinds()));
  const auto results_with = [&](const Tokens& tokens) {
    const OwnedBatch batch(tokens);
    run.registry().zero_gradients(run.bench().stream());
    loss_of(run, batch);
    return std::pair(logits_of(run, batch), values_of(run.parameter("model.embed_tokens.weight").grad));
  };
  const auto [logits, d_embedding] = results_with(documents);
  const auto [other_logits, other_d_embedding] = results_with(changed);
  const auto from = [](const std::vector<double>& values, int64_t begin) {
    return std::vector<double>(values.begin() + begin, values.end());
  };
  EXPECT_EQ(from(logits, 37 * kVocab), from(other_logits, 37 * kVocab));
  EXPECT_EQ(from(d_embedding, 9 * 20), from(other_d_embedding, 9 * 20));
  EXPECT_NE(logits, other_logits);
  EXPECT_NE(d_embedding, other_d_embedding);
}

TEST(Packing, EqualsSeparateRuns) {
  const Tokens documents = random_documents({5, 64, 70}, kVocab, 1);
  TinyRun run(tiny_config(Precision::kF64, mixer_kinds()));
  run.registry().initialize(3, kSpread);
  const OwnedBatch packed(documents);
  run.registry().zero_gradients(run.bench().stream());
  loss_of(run, packed);
  const std::vector<double> gradients = gradients_of(run.registry());
  std::vector<double> separate_logits;
  run.registry().zero_gradients(run.bench().stream());
  for (const std::vector<int32_t>& document : documents) {
    const OwnedBatch alone({document});
    loss_of(run, alone);
    const std::vector<double> logits = logits_of(run, alone);
    separate_logits.insert(separate_logits.end(), logits.begin(), logits.end());
  }
  EXPECT_TRUE(is_close(separate_logits, logits_of(run, packed), 1e-12));
  EXPECT_TRUE(is_close(gradients_of(run.registry()), gradients, 1e-12));
}

TEST(Packing, EmptyDocumentsMakeNoDifference) {
  const Tokens documents = random_documents({5, 65}, kVocab, 1);
  TinyRun run(tiny_config(Precision::kF64, mixer_kinds()));
  const OwnedBatch plain(documents), with_empty({{}, documents[0], {}, documents[1], {}});
  EXPECT_EQ(logits_of(run, plain), logits_of(run, with_empty));
}

TEST(Packing, ARowsResultDoesNotDependOnTheOthers) {
  const std::vector<int32_t> row = random_documents({67}, kVocab, 1)[0];
  TinyRun run(tiny_config(Precision::kF32, mixer_kinds()), 8 * 67);
  const std::vector<double> alone = logits_of(run, OwnedBatch({row}));
  const std::vector<double> eight = logits_of(run, OwnedBatch(Tokens(8, row)));
  for (size_t copy = 0; copy < 8; ++copy) {
    const auto begin = eight.begin() + static_cast<std::ptrdiff_t>(copy * alone.size());
    // A matrix library may choose another kernel for another number of rows.
    EXPECT_TRUE(is_close(std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(alone.size())), alone, 1e-5));
  }
}

TEST(FindingFaults, NamesTheFirstOutputThatIsNotFinite) {
  TinyRun run(tiny_config(Precision::kF32));
  const OwnedBatch batch(random_documents({20}, kVocab, 1));
  Context context = run.bench().context();
  const LanguageModel& model = run.bench().model();
  EXPECT_EQ(model.first_non_finite_output(context, batch.input()), "");
  support::set_value(run.parameter("model.layers.2.mlp.down_proj.weight").value, 0, 3e38);
  support::set_value(run.parameter("model.layers.2.post_attention_layernorm.weight").value, 0, 3e38);
  for (int64_t i = 0; i < 28 * 20; ++i)
    support::set_value(run.parameter("model.layers.2.mlp.up_proj.weight").value, i, 1e30);
  EXPECT_EQ(model.first_non_finite_output(context, batch.input()), "output of the feed-forward of model.layers.2");
}

// ---- decoding -------------------------------------------------------------------------------------------------------

class Decoding : public testing::TestWithParam<Precision> {};

TEST_P(Decoding, GivesTheLogitsOfTheParallelForm) {
  const double tolerance = GetParam() == Precision::kF64 ? 1e-11 : 2e-5;
  constexpr int64_t kTokens = 150;
  std::vector<std::vector<std::string>> models = {mixer_kinds()};
  for (const std::string& kind : mixer_kinds()) models.push_back({kind});
  for (const std::vector<std::string>& layers : models) {
    TinyRun run(tiny_config(GetParam(), layers));
    run.registry().initialize(3, kSpread);
    const OwnedBatch batch(random_documents({kTokens}, kVocab, 1));
    const std::vector<double> expected = logits_of(run, batch);

    Context context = run.bench().context();
    const LanguageModel& model = run.bench().model();
    Arena::Scope scope(context.activations);
    auto states = model.make_decode_states(context, kTokens);
    std::vector<double> got;
    int64_t taken = 0;
    // Pieces shorter and longer than a chunk and than the convolution's window, then token by token.
    for (const int64_t piece : {1, 2, 64, 1, 30}) {
      OwnedTensor logits(context.dtype, {piece, kVocab});
      model.extend(context, states, batch.input().tokens.rows(taken, piece), logits);
      const std::vector<double> values = values_of(logits);
      got.insert(got.end(), values.begin(), values.end());
      taken += piece;
    }
    for (; taken < kTokens; ++taken) {
      OwnedTensor logits(context.dtype, {1, kVocab});
      model.extend(context, states, batch.input().tokens.rows(taken, 1), logits);
      const std::vector<double> values = values_of(logits);
      got.insert(got.end(), values.begin(), values.end());
    }
    EXPECT_TRUE(is_close(got, expected, tolerance)) << layers.size() << " layers from " << layers[0];
  }
}
INSTANTIATE_TEST_SUITE_P(Precisions, Decoding, testing::Values(Precision::kF64, Precision::kF32));

TEST(DecodeState, OfRecurrentLayersDoesNotGrowWithTheText) {
  const auto bytes_of = [](const std::vector<std::string>& layers, int64_t max_tokens) {
    Workbench bench(tiny_config(Precision::kF32, layers));
    Regions regions = Regions::planning(Device::kCpu);
    bench.registry().bind(DType::kF32, ParameterUse::kInference, regions.parameters, regions.gradients,
                          regions.optimizer);
    Stream stream(Device::kCpu, regions.scratch);
    Context context{.stream = stream, .activations = regions.activations, .dtype = DType::kF32};
    bench.model().make_decode_states(context, max_tokens);
    return regions.activations.peak();
  };
  EXPECT_EQ(bytes_of({"kda", "gdn"}, 1000), bytes_of({"kda", "gdn"}, 10));
  // An MLA layer keeps its latent and the shared key: 7 + 4 numbers a token.
  EXPECT_NEAR(static_cast<double>(bytes_of({"mla"}, 2000) - bytes_of({"mla"}, 1000)), 1000 * 11 * 4, 1024);
}

// On a CPU: the latent is not expanded for one token.
TEST(DecodeState, OfLatentsIsReadAsItIsByOneToken) {
  Workbench bench(tiny_config(Precision::kF32, {"mla"}));
  Regions regions = Regions::planning(Device::kCpu);
  bench.registry().bind(DType::kF32, ParameterUse::kInference, regions.parameters, regions.gradients,
                        regions.optimizer);
  Stream stream(Device::kCpu, regions.scratch);
  Context context{.stream = stream, .activations = regions.activations, .dtype = DType::kF32};
  auto states = bench.model().make_decode_states(context, 200);
  const OwnedTensor token(DType::kI32, {1}), logits(DType::kF32, {1, kVocab});
  std::vector<int64_t> peaks;
  for (int i = 0; i < 200; ++i) {
    bench.model().extend(context, states, token, logits);
    peaks.push_back(regions.scratch.peak());
  }
  EXPECT_GT(peaks.front(), 0);
  EXPECT_EQ(peaks.back(), peaks.front());
}

// ---- FLOPs ----------------------------------------------------------------------------------------------------------

double flops_of(const std::vector<std::string>& layers, int64_t row_length) {
  ParameterRegistry registry;
  return LanguageModel(tiny_config(Precision::kF32, layers).model, registry).flops_per_token(row_length);
}

TEST(Flops, OfRecurrentModelsDoNotDependOnTheLength) {
  EXPECT_EQ(flops_of({"kda", "gdn"}, 2048), flops_of({"kda", "gdn"}, 8192));
}

TEST(Flops, EqualAHandCount) {
  const double D = 20, F = 28, V = 37, T = 512;
  const double mlp = 3 * D * F, head = V * D;
  // q, k, v of 16 columns; decay and gate through rank 8; beta; output.
  const double kda = D * (16 + 16 + 16 + 8 + 8 + 2) + 2 * 16 * 8 + 16 * D;
  EXPECT_DOUBLE_EQ(flops_of({"kda"}, 512), 6 * (kda + mlp + head) + 3 * 6 * 2 * 8 * 8);
  // q, k of 6, v and gate of 30 columns, beta and decay of 3; output.
  const double gdn = D * (6 + 6 + 30 + 30 + 3 + 3) + 30 * D;
  EXPECT_DOUBLE_EQ(flops_of({"gdn"}, 512), 6 * (gdn + mlp + head) + 3 * 6 * 3 * 6 * 10);
  // Query latent 9 and its expansion to 27, latent 7 and shared key 4, keys and values from the latent, output.
  const double mla = D * (9 + 7 + 4) + 27 * 9 + 33 * 7 + 18 * D;
  EXPECT_DOUBLE_EQ(flops_of({"mla"}, 512), 6 * (mla + mlp + head) + 3 * 2 * 3 * (9 + 6) * (T + 1) / 2);
}

TEST(Flops, AnAttentionLayerAddsItsPairs) {
  // 6 H (d_qk + d_v) attended, beside the weights.
  const auto of_mla = [](int64_t T) { return flops_of({"kda", "mla"}, T) - flops_of({"kda"}, T); };
  EXPECT_NEAR(of_mla(8192) - of_mla(2048), 6.0 * 3 * (9 + 6) * (8192 - 2048) / 2, 1e-6);
}

TEST(Flops, OfKindsAddUp) {
  ParameterRegistry registry;
  const LanguageModel model(tiny_config().model, registry);
  double sum = 0.0;
  int64_t mixers = 0;
  for (const LanguageModel::FlopsOfKind& kind : model.flops_by_kind(100)) {
    sum += kind.per_token;
    if (kind.kind != "mlp" && kind.kind != "head") mixers += kind.count;
  }
  EXPECT_DOUBLE_EQ(sum, model.flops_per_token(100));
  EXPECT_EQ(mixers, 4);
}

}  // namespace
}  // namespace palimpsest
