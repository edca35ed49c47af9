#include "model/gated_deltanet.h"

#include <cmath>

#include "model/delta_mixer.h"

namespace palimpsest {

std::unique_ptr<TokenMixer> make_gated_deltanet(const ModelConfig& config, const std::string& prefix,
                                                ParameterRegistry& registry) {
  const GdnConfig& gdn = config.gdn;
  const int64_t D = config.hidden_size, H = gdn.num_heads, HV = gdn.num_value_heads.value_or(H);
  const int64_t K = gdn.head_dim, V = gdn.value_head_dim.value_or(K);
  const TensorShare& share = registry.tensor_share();
  const std::string p = prefix + "linear_attn.";

  DeltaMixerParts parts;
  parts.num_heads = share.shared_units(H, "model.gdn.num_heads");
  parts.num_value_heads = share.units(HV, "model.gdn.num_value_heads");
  parts.key_size = K;
  parts.value_size = V;
  parts.options = {.decay = Decay::kScalar,
                   .gate = Gate::kSoftplus,
                   .beta_scale = gdn.negative_eigenvalues ? 2.0 : 1.0,
                   .scale = 1.0 / std::sqrt(static_cast<double>(K))};
  parts.gate_activation = GateActivation::kSilu;
  parts.norm_eps = config.norm_eps;

  parts.decay_rows = parts.num_value_heads;
  parts.gate_rows = parts.num_value_heads * V;
  parts.beta_rows = parts.num_value_heads;
  parts.in_proj = &registry.declare_stack({{.name = p + "q_proj.weight", .shape = {H * K, D}, .units = H},
                                           {.name = p + "k_proj.weight", .shape = {H * K, D}, .units = H},
                                           {.name = p + "v_proj.weight", .shape = {HV * V, D}, .units = HV},
                                           {.name = p + "a_proj.weight", .shape = {HV, D}, .units = HV},
                                           {.name = p + "z_proj.weight", .shape = {HV * V, D}, .units = HV},
                                           {.name = p + "b_proj.weight", .shape = {HV, D}, .units = HV}});
  parts.conv = &declare_convolutions(registry, p, {H, HV, K, V}, gdn.conv_size);
  parts.A_log = &registry.declare(decay_parameter(p + "A_log", HV, HV, Init::kLogUniform0To16));
  parts.dt_bias = &registry.declare(decay_parameter(p + "dt_bias", HV, HV, Init::kDtBias));
  parts.o_norm = &registry.declare(norm_weight(p + "norm.weight", V, TensorSplit::kPartialOverHeads));
  parts.o_proj = &registry.declare(
      {.name = p + "out_proj.weight", .shape = {D, HV * V}, .split = TensorSplit::kColumns, .units = HV});
  return std::make_unique<DeltaMixer>(parts);
}

}  // namespace palimpsest
