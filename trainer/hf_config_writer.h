// config.json of a public family for a model that was born here.
#pragma once

#include <optional>
#include <string>

#include "trainer/config.h"
#include "trainer/hf_model.h"

namespace palimpsest {

// The family whose public implementation computes what this model computes. Throws a UserError that names the field
// which no family has.
HfFamily hf_family_of(const ModelConfig& config);

// Ids that begin and end a document.
struct HfMarks {
  int64_t bos = 0, eos = 0;
};

// Weights are written as f32. Without marks the file says that there are none.
std::string hf_config_json(const HfModel& model, int64_t max_positions, const std::optional<HfMarks>& marks);

}  // namespace palimpsest
