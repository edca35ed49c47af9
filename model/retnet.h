// RetNet (arXiv 2307.08621), retention as a member of the delta-rule family: a fixed decay a head, no delta rule, an
// output gate with SiLU. Its rotary embedding is left out: the decays alone tell positions apart. The chain of ops is
// in delta_mixer.h.
#pragma once

#include <memory>
#include <string>

#include "model/config.h"
#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Declares <prefix>retention.{q,k,v,g,o}_proj and g_norm.
std::unique_ptr<TokenMixer> make_retnet(const ModelConfig& config, const std::string& prefix,
                                        ParameterRegistry& registry);

}  // namespace palimpsest
