// config.json of a public family for a model that was born here.
#pragma once

#include <string>

#include "trainer/config.h"
#include "trainer/hf_model.h"

namespace palimpsest {

// The family whose public implementation computes what this model computes. Throws a UserError that names the field
// which no family has.
HfFamily hf_family_of(const ModelConfig& config);

// Weights are written as f32.
std::string hf_config_json(const HfModel& model, int64_t max_positions);

}  // namespace palimpsest
