// Public models: what a Hugging Face config.json means here, and where each of our parameters lies in the public files.
// Block equations and names: the configurations published with Kimi Linear, Qwen3-Next, DeepSeek-V3 and Llama.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/parameters.h"

namespace palimpsest {

enum class HfFamily : uint8_t { kKimiLinear, kDeepseekV3, kQwen3Next, kLlama };

const char* name_of(HfFamily family);  // its model_type

struct HfModel {
  HfFamily family = HfFamily::kKimiLinear;
  ModelConfig config;
};

// Reads the text of a config.json; `file` stands in messages. Fields that are absent have the values that the public
// library gives them. A model that cannot be built is a UserError "file: field = value: why".
HfModel read_hf_config(std::string_view json, const std::string& file);

// Consecutive rows of a public tensor.
struct RowRange {
  int64_t start = 0, count = 0;
};

// Where a parameter lies in the public files.
struct HfPlace {
  std::vector<std::string> names;  // spellings of the tensor, the usual one first
  Shape shape;                     // of the public tensor; when any_shape, only the number of elements counts
  bool any_shape = false;
  std::vector<RowRange> rows;  // of dimension 0 of the public tensor, in the order of the parameter's own rows
};
HfPlace hf_place(const HfModel& model, const ParameterSpec& parameter);

}  // namespace palimpsest
