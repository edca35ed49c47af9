// Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): one decay per key channel from a low-rank projection, a sigmoid
// output gate, likewise of low rank. The chain of ops is in delta_mixer.h.
#pragma once

#include <memory>
#include <string>

#include "model/config.h"
#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Declares <prefix>self_attn.*, names and shapes as in the public Kimi Linear checkpoints.
std::unique_ptr<TokenMixer> make_kda(const ModelConfig& config, const std::string& prefix, ParameterRegistry& registry);

}  // namespace palimpsest
