// Text from a model by recurrent decoding: the prompt is taken in piece by piece, then every new token continues the
// state. Its size does not grow with the text for layers of the delta-rule family; an MLA layer keeps its latent,
// softmax attention its keys and values.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "model/language_model.h"
#include "trainer/memory_plan.h"

namespace palimpsest {

struct SamplingOptions {
  double temperature = 1.0;  // 0: the most likely token
  int64_t top_k = 0;         // the k most likely tokens alone; 0: all
  double top_p = 1.0;        // the most likely tokens whose probabilities first reach top_p alone
  uint64_t seed = 1;
};

// Throws a UserError that names the option that makes no sense.
void validate(const SamplingOptions& options);

// A token drawn from softmax(logits / temperature), cut by top_k, then by top_p. logits [V] f32, f64 or bf16, on any
// device. A pure function of its arguments: `index` numbers the draws of a text.
int32_t sample_token(const Tensor& logits, const SamplingOptions& options, uint64_t index);

struct GenerationRequest {
  std::vector<int32_t> prompt;  // at least one token
  int64_t max_tokens = 0;       // new ones
  std::optional<int32_t> stop;  // ends the text, and is not part of it
  int64_t num_ids = 0;          // ids that may be drawn: those below it, for a model with more rows than its tokenizer
  SamplingOptions sampling;
};

// Binds the registry for inference on planning arenas and rehearses the request. Bind again before use.
RegionBytes rehearse_generation(const LanguageModel& model, ParameterRegistry& registry, Device device,
                                const ActivationTypes& types, const GenerationRequest& request,
                                const Mesh& mesh = Mesh::single());

// The new tokens; each is given to on_token as soon as it is drawn.
std::vector<int32_t> generate(const LanguageModel& model, Context context, const GenerationRequest& request,
                              const std::function<void(int32_t)>& on_token);

}  // namespace palimpsest
