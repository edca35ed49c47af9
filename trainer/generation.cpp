#include "trainer/generation.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/device.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

// Prompt tokens taken in at once: enough for efficient products, little enough to keep memory small.
constexpr int64_t kPromptPiece = 256;

std::vector<double> logits_over_temperature(const Tensor& logits_there, double temperature) {
  HostCopy copy(logits_there);
  const Tensor& logits = copy.fetch().tensor();
  std::vector<double> values(static_cast<size_t>(logits.numel()));
  for (size_t i = 0; i < values.size(); ++i) {
    if (logits.dtype() == DType::kF64)
      values[i] = logits.data<double>()[i];
    else if (logits.dtype() == DType::kF32)
      values[i] = logits.data<float>()[i];
    else
      values[i] = to_float(logits.data<BF16>()[i]);
  }
  for (const double value : values)
    if (!std::isfinite(value)) throw_user_error("the model's logits are not finite: its weights are of no use");
  if (temperature > 0)
    for (double& value : values) value /= temperature;
  return values;
}

// Weights exp(value - maximum) of the tokens in `order`, from the most likely down.
std::vector<double> weights_of(const std::vector<double>& values, const std::vector<int32_t>& order) {
  std::vector<double> weights;
  weights.reserve(order.size());
  for (const int32_t token : order) weights.push_back(std::exp(values[token] - values[order[0]]));
  return weights;
}

// How many of the leading weights first reach the share `top_p` of their sum.
size_t nucleus_size(const std::vector<double>& weights, double top_p) {
  const double wanted = top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
  double sum = 0.0;
  for (size_t i = 0; i < weights.size(); ++i) {
    sum += weights[i];
    if (sum >= wanted) return i + 1;
  }
  return weights.size();
}

// Decoding of one text on a context, real or planning.
class Decoder {
 public:
  Decoder(const LanguageModel& model, Context context, int64_t max_tokens)
      : model_(model),
        context_(context),
        states_(model.make_decode_states(context_, max_tokens)),
        tokens_(context_.activations.allocate(DType::kI32, {kPromptPiece})),
        logits_(context_.activations.allocate(context_.dtype, {1, model.config().vocab_size})) {}

  // The logits [V] after these tokens.
  Tensor take_in(const int32_t* tokens, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += kPromptPiece) {
      const Tensor piece = tokens_.rows(0, std::min(kPromptPiece, count - begin));
      std::vector<int32_t> ids(static_cast<size_t>(piece.numel()));
      if (!context_.stream.is_planning())
        for (size_t i = 0; i < ids.size(); ++i) ids[i] = tokens[begin + static_cast<int64_t>(i)];
      transfer(context_.stream, piece, Tensor(ids.data(), DType::kI32, piece.shape()));
      model_.extend(context_, states_, piece, logits_);
    }
    return logits_.view({logits_.numel()});
  }

 private:
  const LanguageModel& model_;
  Context context_;
  LanguageModel::DecodeStates states_;
  Tensor tokens_;  // [kPromptPiece] i32
  Tensor logits_;  // [1, V]
};

int64_t longest_text(const GenerationRequest& request) {
  return static_cast<int64_t>(request.prompt.size()) + request.max_tokens;
}

}  // namespace

void validate(const SamplingOptions& options) {
  if (!(options.temperature >= 0) || std::isinf(options.temperature))
    throw_user_error("--temperature is ", options.temperature, ", must be at least 0");
  if (options.top_k < 0) throw_user_error("--top-k is ", options.top_k, ", must be at least 0 (0: all tokens)");
  if (!(options.top_p > 0 && options.top_p <= 1))
    throw_user_error("--top-p is ", options.top_p, ", must be above 0 and at most 1");
}

int32_t sample_token(const Tensor& logits, const SamplingOptions& options, uint64_t index) {
  const std::vector<double> values = logits_over_temperature(logits, options.temperature);
  if (options.temperature == 0)
    return static_cast<int32_t>(std::max_element(values.begin(), values.end()) - values.begin());
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
  if (options.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(options.top_k)));
  std::vector<double> weights = weights_of(values, order);
  weights.resize(nucleus_size(weights, options.top_p));
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const double drawn = total * random_uniform(options.seed, hash_of("generate"), index);
  double sum = 0.0;
  for (size_t i = 0; i < weights.size(); ++i) {
    sum += weights[i];
    if (drawn < sum) return order[i];
  }
  return order[weights.size() - 1];
}

RegionBytes rehearse_generation(const LanguageModel& model, ParameterRegistry& registry, Device device,
                                const ActivationTypes& types, const GenerationRequest& request, const Mesh& mesh) {
  Regions regions = Regions::planning(device);
  registry.bind(parameter_dtype(types.dtype), ParameterUse::kInference, regions.parameters, regions.gradients,
                regions.optimizer);
  Stream stream(device, regions.scratch);
  const Context context{.stream = stream,
                        .activations = regions.activations,
                        .dtype = types.dtype,
                        .mesh = mesh,
                        .residual = types.residual};
  // As if the whole text were a prompt: its last piece meets the longest state with the most tokens at once. A mixer
  // may take a single token in by another way.
  for (const int64_t count : {longest_text(request), int64_t{1}}) {
    Arena::Scope scope(regions.activations);
    Decoder(model, context, longest_text(request)).take_in(nullptr, count);
  }
  return regions.peaks();
}

std::vector<int32_t> generate(const LanguageModel& model, Context context, const GenerationRequest& request,
                              const std::function<void(int32_t)>& on_token) {
  validate(request.sampling);
  CHECK(!request.prompt.empty(), "generation begins with at least one token");
  CHECK(request.num_ids >= 1 && request.num_ids <= model.config().vocab_size, request.num_ids, " ids of ",
        model.config().vocab_size);
  Arena::Scope scope(context.activations);
  Decoder decoder(model, context, longest_text(request));
  Tensor logits = decoder.take_in(request.prompt.data(), static_cast<int64_t>(request.prompt.size()));
  std::vector<int32_t> text;
  for (int64_t i = 0; i < request.max_tokens; ++i) {
    const int32_t token = sample_token(logits.rows(0, request.num_ids), request.sampling, static_cast<uint64_t>(i));
    if (token == request.stop) break;
    text.push_back(token);
    on_token(token);
    if (i + 1 < request.max_tokens) logits = decoder.take_in(&token, 1);
  }
  return text;
}

}  // namespace palimpsest
