#include "model/kda.h"

#include <cmath>
#include <utility>
#include <vector>

#include "model/delta_mixer.h"

namespace palimpsest {

std::unique_ptr<TokenMixer> make_kda(const ModelConfig& config, const std::string& prefix,
                                     ParameterRegistry& registry) {
  const KdaConfig& kda = config.kda;
  const int64_t D = config.hidden_size, H = kda.num_heads, HV = kda.num_value_heads.value_or(H);
  const int64_t K = kda.head_dim, V = kda.head_dim;
  const int64_t R = kda.head_dim;  // rank of the decay and of the output gate
  const TensorShare& share = registry.tensor_share();
  const std::string p = prefix + "self_attn.";

  DeltaMixerParts parts;
  parts.num_heads = share.shared_units(H, "model.kda.num_heads");
  parts.num_value_heads = share.units(HV, "model.kda.num_value_heads");
  parts.key_size = K;
  parts.value_size = V;
  parts.options = {.decay = Decay::kVector,
                   .gate = kda.gate_lower_bound ? Gate::kBounded : Gate::kSoftplus,
                   .gate_lower_bound = kda.gate_lower_bound.value_or(-5.0),
                   .beta_scale = kda.negative_eigenvalues ? 2.0 : 1.0,
                   .scale = 1.0 / std::sqrt(static_cast<double>(K))};
  parts.gate_activation = GateActivation::kSigmoid;
  parts.norm_eps = config.norm_eps;

  parts.decay_rows = R;
  parts.gate_rows = kda.full_rank_gate ? parts.num_value_heads * V : R;
  parts.beta_rows = parts.num_value_heads;
  std::vector<ParameterSpec> projections = {
      {.name = p + "q_proj.weight", .shape = {H * K, D}, .units = H},
      {.name = p + "k_proj.weight", .shape = {H * K, D}, .units = H},
      {.name = p + "v_proj.weight", .shape = {HV * V, D}, .units = HV},
      {.name = p + "f_a_proj.weight", .shape = {R, D}, .split = TensorSplit::kPartialOverHeads}};
  if (kda.full_rank_gate) {
    projections.push_back({.name = p + "g_proj.weight", .shape = {HV * V, D}, .units = HV});
  } else {
    projections.push_back({.name = p + "g_a_proj.weight", .shape = {R, D}, .split = TensorSplit::kPartialOverHeads});
  }
  projections.push_back({.name = p + "b_proj.weight", .shape = {HV, D}, .units = HV});
  parts.in_proj = &registry.declare_stack(std::move(projections));

  parts.conv = &declare_convolutions(registry, p, {H, HV, K, V}, kda.conv_size);
  parts.decay_b = &registry.declare({.name = p + "f_b_proj.weight", .shape = {HV * K, R}, .units = HV});
  if (!kda.full_rank_gate)
    parts.gate_b = &registry.declare({.name = p + "g_b_proj.weight", .shape = {HV * V, R}, .units = HV});
  parts.A_log = &registry.declare(
      decay_parameter(p + "A_log", HV, HV, kda.gate_lower_bound ? Init::kZeros : Init::kLogUniform1To16));
  parts.dt_bias = &registry.declare(decay_parameter(p + "dt_bias", HV * K, HV, Init::kDtBias));
  parts.o_norm = &registry.declare(norm_weight(p + "o_norm.weight", V, TensorSplit::kPartialOverHeads));
  parts.o_proj = &registry.declare(
      {.name = p + "o_proj.weight", .shape = {D, HV * V}, .split = TensorSplit::kColumns, .units = HV});
  return std::make_unique<DeltaMixer>(parts);
}

}  // namespace palimpsest
