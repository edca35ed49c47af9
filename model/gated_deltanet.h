// Gated DeltaNet (arXiv 2412.06464; in Qwen3-Next): one decay a head, a full-rank output gate with SiLU. The chain of
// ops is in delta_mixer.h.
#pragma once

#include <memory>
#include <string>

#include "model/config.h"
#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Declares <prefix>linear_attn.{q,k,v,a,z,b}_proj, {q,k,v}_conv1d, A_log, dt_bias, norm, out_proj.
std::unique_ptr<TokenMixer> make_gated_deltanet(const ModelConfig& config, const std::string& prefix,
                                                ParameterRegistry& registry);

}  // namespace palimpsest
