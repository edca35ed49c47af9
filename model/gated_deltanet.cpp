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
  const auto taps = [&](const char* name, int64_t heads, int64_t size) {
    return ParameterSpec{
        .name = p + name, .shape = {heads * size, 1, gdn.conv_size}, .in_product = InProduct::kNo, .units = heads};
  };
  parts.conv = &registry.declare_stack(
      {taps("q_conv1d.weight", H, K), taps("k_conv1d.weight", H, K), taps("v_conv1d.weight", HV, V)});
  parts.A_log = &registry.declare({.name = p + "A_log",
                                   .shape = {HV},
                                   .init = Init::kLogUniform0To16,
                                   .decay = WeightDecay::kNo,
                                   .in_product = InProduct::kNo,
                                   .units = HV});
  parts.dt_bias = &registry.declare({.name = p + "dt_bias",
                                     .shape = {HV},
                                     .init = Init::kDtBias,
                                     .decay = WeightDecay::kNo,
                                     .in_product = InProduct::kNo,
                                     .units = HV});
  parts.o_norm = &registry.declare({.name = p + "norm.weight",
                                    .shape = {V},
                                    .init = Init::kOnes,
                                    .decay = WeightDecay::kNo,
                                    .split = TensorSplit::kPartialOverHeads,
                                    .in_product = InProduct::kNo});
  parts.o_proj = &registry.declare(
      {.name = p + "out_proj.weight", .shape = {D, HV * V}, .split = TensorSplit::kColumns, .units = HV});
  return std::make_unique<DeltaMixer>(parts);
}

}  // namespace palimpsest
