#include "model/retnet.h"

#include <cmath>

#include "model/delta_mixer.h"

namespace palimpsest {

std::unique_ptr<TokenMixer> make_retnet(const ModelConfig& config, const std::string& prefix,
                                        ParameterRegistry& registry) {
  const RetnetConfig& retnet = config.retnet;
  const int64_t D = config.hidden_size, H = retnet.num_heads;
  const int64_t K = retnet.head_dim, V = retnet.value_head_dim.value_or(K);
  const TensorShare& share = registry.tensor_share();
  const std::string p = prefix + "retention.";

  DeltaMixerParts parts;
  parts.num_heads = parts.num_value_heads = share.units(H, "model.retnet.num_heads");
  parts.key_size = K;
  parts.value_size = V;
  parts.options = {.decay = Decay::kScalar,
                   .delta_rule = DeltaRule::kOff,
                   .gate = Gate::kFixed,
                   .first_value_head = share.rank * parts.num_value_heads,
                   .l2norm_qk = false,
                   .scale = 1.0 / std::sqrt(static_cast<double>(K))};
  parts.gate_activation = GateActivation::kSilu;
  parts.norm_eps = config.norm_eps;
  parts.gate_rows = parts.num_value_heads * V;
  parts.in_proj = &registry.declare_stack({{.name = p + "q_proj.weight", .shape = {H * K, D}, .units = H},
                                           {.name = p + "k_proj.weight", .shape = {H * K, D}, .units = H},
                                           {.name = p + "v_proj.weight", .shape = {H * V, D}, .units = H},
                                           {.name = p + "g_proj.weight", .shape = {H * V, D}, .units = H}});
  parts.o_norm = &registry.declare(norm_weight(p + "g_norm.weight", V, TensorSplit::kPartialOverHeads));
  parts.o_proj =
      &registry.declare({.name = p + "o_proj.weight", .shape = {D, H * V}, .split = TensorSplit::kColumns, .units = H});
  return std::make_unique<DeltaMixer>(parts);
}

}  // namespace palimpsest
