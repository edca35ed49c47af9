// The factory of token mixers: the one place that knows which kinds exist.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Names that `model.layers` may hold.
std::vector<std::string> mixer_kinds();

// The mixer `kind` of the block with this name prefix ("model.layers.3."). Throws a UserError on an unknown kind.
std::unique_ptr<TokenMixer> make_mixer(const std::string& kind, const ModelConfig& config, const std::string& prefix,
                                       ParameterRegistry& registry);

}  // namespace palimpsest
