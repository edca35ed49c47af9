// The factory of token mixers: the one place that knows which kinds exist.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Their names, as they stand in model.layers.
std::vector<std::string> mixer_kinds();

// Throws a UserError that lists the kinds unless `kind` is one of them.
void check_mixer_kind(const std::string& kind);

// The mixer `kind` of the block with this name prefix ("model.layers.3."). Throws as check_mixer_kind does.
std::unique_ptr<TokenMixer> make_mixer(const std::string& kind, const ModelConfig& config, const std::string& prefix,
                                       ParameterRegistry& registry);

}  // namespace palimpsest
