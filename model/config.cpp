#include "model/config.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/delta_rule.h"
#include "model/mixers.h"

namespace palimpsest {

namespace {

// Far above any model, and so small that products of three sizes do not overflow.
constexpr int64_t kLargestSize = int64_t{1} << 20;
constexpr int64_t kMostHeads = int64_t{1} << 16;
constexpr int64_t kMostExperts = int64_t{1} << 16;
constexpr int64_t kMostLayers = int64_t{1} << 12;

void require_size(const char* field, int64_t value, int64_t most = kLargestSize) {
  if (value < 1) throw_user_error("model.", field, " is ", value, ", must be at least 1");
  if (value > most) throw_user_error("model.", field, " is ", value, ", must be at most ", most);
}

void require_heads(const char* field, int64_t value) {
  require_size(field, value, kMostHeads);
}

void require_multiple(const char* field, int64_t value, const char* of, int64_t divisor) {
  if (value % divisor != 0)
    throw_user_error("model.", field, " is ", value, ", must be a multiple of ", of, " = ", divisor);
}

void require_conv_size(const char* field, int64_t value) {
  if (value < 1 || value > 4) throw_user_error("model.", field, " is ", value, ", must be from 1 to 4");
}

void require_even(const char* field, int64_t value) {
  require_size(field, std::max<int64_t>(value, 1));
  if (value < 2 || value % 2 != 0) throw_user_error("model.", field, " is ", value, ", must be even and at least 2");
}

void validate_kda(const KdaConfig& kda) {
  require_heads("kda.num_heads", kda.num_heads);
  require_size("kda.head_dim", kda.head_dim, kMaxKeySize);
  if (kda.num_value_heads) {
    require_heads("kda.num_value_heads", *kda.num_value_heads);
    require_multiple("kda.num_value_heads", *kda.num_value_heads, "num_heads", kda.num_heads);
  }
  require_conv_size("kda.conv_size", kda.conv_size);
  if (kda.gate_lower_bound && !(*kda.gate_lower_bound < 0))
    throw_user_error("model.kda.gate_lower_bound is ", *kda.gate_lower_bound, ", must be negative, or null");
}

void validate_gdn(const GdnConfig& gdn) {
  require_heads("gdn.num_heads", gdn.num_heads);
  require_size("gdn.head_dim", gdn.head_dim, kMaxKeySize);
  if (gdn.num_value_heads) {
    require_heads("gdn.num_value_heads", *gdn.num_value_heads);
    require_multiple("gdn.num_value_heads", *gdn.num_value_heads, "num_heads", gdn.num_heads);
  }
  if (gdn.value_head_dim) require_size("gdn.value_head_dim", *gdn.value_head_dim);
  require_conv_size("gdn.conv_size", gdn.conv_size);
}

void validate_retnet(const RetnetConfig& retnet) {
  require_heads("retnet.num_heads", retnet.num_heads);
  require_size("retnet.head_dim", retnet.head_dim, kMaxKeySize);
  if (retnet.value_head_dim) require_size("retnet.value_head_dim", *retnet.value_head_dim);
}

void validate_rope_scaling(const char* mixer, const RopeScalingConfig& scaling) {
  if (scaling.kind == RopeScalingKind::kDefault) return;
  const auto fail = [&](const char* field, double value, const char* wanted) {
    throw_user_error("model.", mixer, ".rope_scaling.", field, " is ", value, ", must be ", wanted);
  };
  if (!(scaling.factor >= 1)) fail("factor", scaling.factor, "at least 1");
  if (scaling.original_max_positions < 1)
    fail("original_max_positions", static_cast<double>(scaling.original_max_positions), "at least 1");
  if (scaling.kind == RopeScalingKind::kYarn) {
    if (!(scaling.beta_slow > 0)) fail("beta_slow", scaling.beta_slow, "above 0");
    if (!(scaling.beta_fast >= scaling.beta_slow)) fail("beta_fast", scaling.beta_fast, "at least beta_slow");
    if (scaling.attention_factor && !(*scaling.attention_factor > 0))
      fail("attention_factor", *scaling.attention_factor, "above 0, or null");
    if (!(scaling.mscale >= 0)) fail("mscale", scaling.mscale, "at least 0");
    if (!(scaling.mscale_all_dim >= 0)) fail("mscale_all_dim", scaling.mscale_all_dim, "at least 0");
  } else {
    if (!(scaling.low_freq_factor > 0)) fail("low_freq_factor", scaling.low_freq_factor, "above 0");
    if (!(scaling.high_freq_factor > scaling.low_freq_factor))
      fail("high_freq_factor", scaling.high_freq_factor, "above low_freq_factor");
  }
}

void validate_mla(const MlaConfig& mla) {
  require_heads("mla.num_heads", mla.num_heads);
  if (mla.q_lora_rank) require_size("mla.q_lora_rank", *mla.q_lora_rank);
  require_size("mla.kv_lora_rank", mla.kv_lora_rank);
  require_size("mla.qk_nope_head_dim", mla.qk_nope_head_dim);
  require_even("mla.qk_rope_head_dim", mla.qk_rope_head_dim);
  require_size("mla.v_head_dim", mla.v_head_dim);
  if (!(mla.rope_theta > 0)) throw_user_error("model.mla.rope_theta is ", mla.rope_theta, ", must be positive");
  validate_rope_scaling("mla", mla.rope_scaling);
}

void validate_attention(const AttentionConfig& attention) {
  require_heads("attention.num_heads", attention.num_heads);
  require_size("attention.head_dim", attention.head_dim);
  if (attention.num_kv_heads) {
    require_heads("attention.num_kv_heads", *attention.num_kv_heads);
    require_multiple("attention.num_heads", attention.num_heads, "num_kv_heads", *attention.num_kv_heads);
  }
  if (attention.rope == RopeKind::kNone) return;
  const int64_t rope_dim = attention.rope_dim.value_or(attention.head_dim);
  require_even("attention.rope_dim", rope_dim);
  if (rope_dim > attention.head_dim)
    throw_user_error("model.attention.rope_dim is ", rope_dim, ", must be at most head_dim = ", attention.head_dim);
  if (!(attention.rope_theta > 0))
    throw_user_error("model.attention.rope_theta is ", attention.rope_theta, ", must be positive");
  validate_rope_scaling("attention", attention.rope_scaling);
}

void validate_moe(const MoeConfig& moe, int64_t num_layers) {
  require_size("moe.num_experts", moe.num_experts, kMostExperts);
  require_size("moe.experts_per_token", moe.experts_per_token);
  require_size("moe.intermediate_size", moe.intermediate_size);
  for (const int64_t layer : moe.dense_layers)
    if (layer < 0 || layer >= num_layers)
      throw_user_error("model.moe.dense_layers has ", layer, ", must be from 0 to num_layers - 1 = ", num_layers - 1);
  if (moe.shared_intermediate_size < 0)
    throw_user_error("model.moe.shared_intermediate_size is ", moe.shared_intermediate_size, ", must be at least 0");
  if (moe.shared_intermediate_size > 0) require_size("moe.shared_intermediate_size", moe.shared_intermediate_size);
  if (moe.shared_gate && moe.shared_intermediate_size == 0)
    throw_user_error("model.moe.shared_gate is true, must be false without a shared expert (shared_intermediate_size)");
  require_size("moe.num_groups", moe.num_groups);
  require_multiple("moe.num_experts", moe.num_experts, "num_groups", moe.num_groups);
  const int64_t group = moe.num_experts / moe.num_groups;
  if (moe.num_groups > 1 && group < 2)
    throw_user_error("model.moe.num_groups is ", moe.num_groups, ", must leave at least 2 experts a group");
  if (moe.top_groups < 1 || moe.top_groups > moe.num_groups)
    throw_user_error("model.moe.top_groups is ", moe.top_groups, ", must be from 1 to num_groups = ", moe.num_groups);
  if (moe.experts_per_token > moe.top_groups * group)
    throw_user_error("model.moe.experts_per_token is ", moe.experts_per_token, ", must be at most ",
                     moe.top_groups * group, ", the experts of top_groups groups");
  if (moe.router_bias_update_speed && moe.router != RouterScore::kSigmoid)
    throw_user_error("model.moe.router_bias_update_speed is set, must be null with router: softmax, which has no bias");
  if (moe.router_bias_update_speed && !(*moe.router_bias_update_speed > 0))
    throw_user_error("model.moe.router_bias_update_speed is ", *moe.router_bias_update_speed,
                     ", must be above 0, or null");
  if (!(moe.router_aux_loss_coef >= 0))
    throw_user_error("model.moe.router_aux_loss_coef is ", moe.router_aux_loss_coef, ", must be at least 0");
  if (moe.router_aux_loss_coef > 0 && moe.router != RouterScore::kSoftmax)
    throw_user_error("model.moe.router_aux_loss_coef is ", moe.router_aux_loss_coef,
                     ", must be 0 with router: sigmoid, whose balance comes from router_bias_update_speed");
}

}  // namespace

bool ModelConfig::has_experts(int64_t i) const {
  return moe.num_experts > 0 &&
         std::find(moe.dense_layers.begin(), moe.dense_layers.end(), i) == moe.dense_layers.end();
}

void validate(const ModelConfig& config) {
  require_size("vocab_size", config.vocab_size, INT32_MAX);
  require_size("hidden_size", config.hidden_size);
  require_size("num_layers", config.num_layers, kMostLayers);
  require_size("mlp.intermediate_size", config.mlp.intermediate_size);
  if (config.layers.empty()) throw_user_error("model.layers is empty, must name at least one token mixer");
  if (!(config.norm_eps > 0)) throw_user_error("model.norm_eps is ", config.norm_eps, ", must be positive");
  if (!(config.initializer_range > 0))
    throw_user_error("model.initializer_range is ", config.initializer_range, ", must be positive");
  const auto uses = [&](const char* kind) {
    return std::find(config.layers.begin(), config.layers.end(), kind) != config.layers.end();
  };
  if (config.moe.num_experts != 0) validate_moe(config.moe, config.num_layers);
  if (uses("kda")) validate_kda(config.kda);
  if (uses("gdn")) validate_gdn(config.gdn);
  if (uses("retnet")) validate_retnet(config.retnet);
  if (uses("mla")) validate_mla(config.mla);
  if (uses("attention")) validate_attention(config.attention);
  for (const std::string& kind : config.layers) check_mixer_kind(kind);
}

}  // namespace palimpsest
