// Weights of a public model into the registry.
#pragma once

#include <span>
#include <string>

#include "data/safetensors.h"
#include "model/parameters.h"
#include "trainer/hf_model.h"

namespace palimpsest {

// Fills every parameter's value from the folder. Throws a UserError that names a missing, an extra or a wrongly shaped
// tensor.
void load_hf_weights(const SafetensorsFolder& folder, const HfModel& model, ParameterRegistry& registry);

// Elements of the public tensor that make up a parameter, in its own order, as f32. `where` stands in messages.
void gather_hf_rows(const SafeTensor& tensor, const HfPlace& place, std::span<float> out, const std::string& where);

}  // namespace palimpsest
