#include "trainer/hf_config_writer.h"

#include <algorithm>
#include <vector>

#include "kernels/check.h"
#include "trainer/json_object.h"

namespace palimpsest {

namespace {

// What one family asks of a field; the first unmet one is the answer to "why not this family".
class Wishes {
 public:
  Wishes& need(bool met, std::string_view field, std::string_view wanted) {
    if (!met && unmet_.empty()) unmet_ = std::string("model.") + std::string(field) + " must be " + std::string(wanted);
    return *this;
  }
  const std::string& unmet() const { return unmet_; }

 private:
  std::string unmet_;
};

bool only(const ModelConfig& config, std::initializer_list<std::string_view> kinds) {
  return std::all_of(config.layers.begin(), config.layers.end(), [&](const std::string& layer) {
    return std::find(kinds.begin(), kinds.end(), layer) != kinds.end();
  });
}

bool uses(const ModelConfig& config, std::string_view kind) {
  return std::find(config.layers.begin(), config.layers.end(), kind) != config.layers.end();
}

void need_sigmoid_experts(Wishes& wishes, const MoeConfig& moe) {
  if (moe.num_experts == 0) return;
  wishes.need(moe.router == RouterScore::kSigmoid, "moe.router", "sigmoid")
      .need(!moe.shared_gate, "moe.shared_gate", "false")
      .need(moe.shared_intermediate_size % moe.intermediate_size == 0, "moe.shared_intermediate_size",
            "a multiple of intermediate_size");
}

Wishes wishes_of(HfFamily family, const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const AttentionConfig& attention = config.attention;
  Wishes wishes;
  switch (family) {
    case HfFamily::kKimiLinear: {
      const KdaConfig& kda = config.kda;
      wishes.need(config.norm == NormWeight::kPlain, "norm", "plain")
          .need(!kda.gate_lower_bound, "kda.gate_lower_bound", "null")
          .need(!kda.full_rank_gate, "kda.full_rank_gate", "false")
          .need(!kda.negative_eigenvalues, "kda.negative_eigenvalues", "false")
          .need(kda.num_value_heads.value_or(kda.num_heads) == kda.num_heads, "kda.num_value_heads", "num_heads");
      if (uses(config, "mla")) wishes.need(config.mla.rope == RopeKind::kNone, "mla.rope", "none");
      need_sigmoid_experts(wishes, moe);
      break;
    }
    case HfFamily::kDeepseekV3:
      wishes.need(config.norm == NormWeight::kPlain, "norm", "plain")
          .need(config.mla.rope != RopeKind::kNone, "mla.rope", "interleaved or half_split");
      for (size_t i = 0; i < moe.dense_layers.size(); ++i)
        wishes.need(moe.num_experts == 0 || moe.dense_layers[i] == static_cast<int64_t>(i), "moe.dense_layers",
                    "the first layers");
      need_sigmoid_experts(wishes, moe);
      break;
    case HfFamily::kQwen3Next:
      wishes.need(config.norm == NormWeight::kOneCentred, "norm", "one_centred")
          .need(!config.gdn.negative_eigenvalues, "gdn.negative_eigenvalues", "false");
      if (uses(config, "attention"))
        wishes.need(attention.output_gate, "attention.output_gate", "true")
            .need(attention.qk_norm, "attention.qk_norm", "true")
            .need(attention.rope == RopeKind::kHalfSplit, "attention.rope", "half_split");
      if (moe.num_experts > 0)
        wishes.need(moe.router == RouterScore::kSoftmax, "moe.router", "softmax")
            .need(moe.shared_gate, "moe.shared_gate", "true")
            .need(moe.num_groups == 1, "moe.num_groups", "1")
            .need(moe.routed_scaling_factor == 1.0, "moe.routed_scaling_factor", "1");
      break;
    case HfFamily::kLlama:
      wishes.need(config.norm == NormWeight::kPlain, "norm", "plain")
          .need(!attention.output_gate, "attention.output_gate", "false")
          .need(!attention.qk_norm, "attention.qk_norm", "false")
          .need(attention.rope == RopeKind::kHalfSplit, "attention.rope", "half_split")
          .need(attention.rope_dim.value_or(attention.head_dim) == attention.head_dim, "attention.rope_dim", "null")
          .need(moe.num_experts == 0, "moe.num_experts", "0");
      break;
  }
  return wishes;
}

std::vector<std::string> layer_types(const ModelConfig& config, std::string_view linear) {
  std::vector<std::string> types;
  for (int64_t i = 0; i < config.num_layers; ++i)
    types.emplace_back(config.layer_kind(i) == linear ? "linear_attention" : "full_attention");
  return types;
}

std::vector<int64_t> layers_of(const ModelConfig& config, std::string_view kind) {  // from 1
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < config.num_layers; ++i)
    if (config.layer_kind(i) == kind) layers.push_back(i + 1);
  return layers;
}

void add_rope(JsonObject& json, double theta, const RopeScalingConfig& scaling, double partial) {
  JsonObject rope;
  rope.add_real("rope_theta", theta);
  rope.add("rope_type", EnumNames<RopeScalingKind>::values[static_cast<size_t>(scaling.kind)]);
  if (partial != 1.0) rope.add_real("partial_rotary_factor", partial);
  if (scaling.kind != RopeScalingKind::kDefault) {
    rope.add_real("factor", scaling.factor);
    rope.add("original_max_position_embeddings", scaling.original_max_positions);
  }
  if (scaling.kind == RopeScalingKind::kYarn) {
    rope.add_real("beta_fast", scaling.beta_fast);
    rope.add_real("beta_slow", scaling.beta_slow);
    rope.add_flag("truncate", scaling.truncate);
    if (scaling.attention_factor) rope.add_real("attention_factor", *scaling.attention_factor);
    if (scaling.mscale != 0.0) rope.add_real("mscale", scaling.mscale);
    if (scaling.mscale_all_dim != 0.0) rope.add_real("mscale_all_dim", scaling.mscale_all_dim);
  } else if (scaling.kind == RopeScalingKind::kLlama3) {
    rope.add_real("low_freq_factor", scaling.low_freq_factor);
    rope.add_real("high_freq_factor", scaling.high_freq_factor);
  }
  json.add("rope_parameters", rope);
}

void add_mla(JsonObject& json, const MlaConfig& mla) {
  json.add("num_attention_heads", mla.num_heads);
  json.add("num_key_value_heads", mla.num_heads);
  if (mla.q_lora_rank) {
    json.add("q_lora_rank", *mla.q_lora_rank);
  } else {
    json.add_null("q_lora_rank");
  }
  json.add("kv_lora_rank", mla.kv_lora_rank);
  json.add("qk_nope_head_dim", mla.qk_nope_head_dim);
  json.add("qk_rope_head_dim", mla.qk_rope_head_dim);
  json.add("v_head_dim", mla.v_head_dim);
}

void add_attention(JsonObject& json, const AttentionConfig& attention) {
  json.add("num_attention_heads", attention.num_heads);
  json.add("num_key_value_heads", attention.num_kv_heads.value_or(attention.num_heads));
  json.add("head_dim", attention.head_dim);
  add_rope(
      json, attention.rope_theta, attention.rope_scaling,
      static_cast<double>(attention.rope_dim.value_or(attention.head_dim)) / static_cast<double>(attention.head_dim));
}

void add_kimi(JsonObject& json, const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  add_mla(json, config.mla);
  json.add_flag("mla_use_nope", true);
  JsonObject linear;
  linear.add("num_heads", config.kda.num_heads);
  linear.add("head_dim", config.kda.head_dim);
  linear.add("short_conv_kernel_size", config.kda.conv_size);
  linear.add_list("kda_layers", layers_of(config, "kda"));
  linear.add_list("full_attn_layers", layers_of(config, "mla"));
  json.add("linear_attn_config", linear);
  std::vector<std::string> kinds;
  for (int64_t i = 0; i < config.num_layers; ++i) kinds.emplace_back(config.has_experts(i) ? "sparse" : "dense");
  json.add_list("mlp_layer_types", kinds);
  if (moe.num_experts == 0) return;
  json.add("num_experts", moe.num_experts);
  json.add("num_experts_per_token", moe.experts_per_token);
  json.add("num_shared_experts", moe.shared_intermediate_size / moe.intermediate_size);
  json.add("moe_intermediate_size", moe.intermediate_size);
  json.add("num_expert_group", moe.num_groups);
  json.add("topk_group", moe.top_groups);
  json.add_flag("moe_renormalize", moe.renormalize);
  json.add("moe_router_activation_func", "sigmoid");
  json.add_real("routed_scaling_factor", moe.routed_scaling_factor);
}

void add_deepseek(JsonObject& json, const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  add_mla(json, config.mla);
  json.add("head_dim", config.mla.qk_rope_head_dim);
  json.add_flag("rope_interleave", config.mla.rope == RopeKind::kInterleaved);
  add_rope(json, config.mla.rope_theta, config.mla.rope_scaling, 1.0);
  const auto dense = static_cast<int64_t>(moe.dense_layers.size());
  json.add("first_k_dense_replace", moe.num_experts > 0 ? dense : config.num_layers);
  if (moe.num_experts == 0) return;
  json.add("n_routed_experts", moe.num_experts);
  json.add("num_experts_per_tok", moe.experts_per_token);
  json.add("n_shared_experts", moe.shared_intermediate_size / moe.intermediate_size);
  json.add("moe_intermediate_size", moe.intermediate_size);
  json.add("n_group", moe.num_groups);
  json.add("topk_group", moe.top_groups);
  json.add_flag("norm_topk_prob", moe.renormalize);
  json.add_real("routed_scaling_factor", moe.routed_scaling_factor);
}

void add_qwen3_next(JsonObject& json, const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const GdnConfig& gdn = config.gdn;
  add_attention(json, config.attention);
  json.add_list("layer_types", layer_types(config, "gdn"));
  json.add("linear_num_key_heads", gdn.num_heads);
  json.add("linear_num_value_heads", gdn.num_value_heads.value_or(gdn.num_heads));
  json.add("linear_key_head_dim", gdn.head_dim);
  json.add("linear_value_head_dim", gdn.value_head_dim.value_or(gdn.head_dim));
  json.add("linear_conv_kernel_dim", gdn.conv_size);
  json.add("num_experts", moe.num_experts);
  json.add("decoder_sparse_step", int64_t{1});
  json.add_list("mlp_only_layers", moe.num_experts > 0 ? moe.dense_layers : std::vector<int64_t>());
  if (moe.num_experts == 0) return;
  json.add("num_experts_per_tok", moe.experts_per_token);
  json.add("moe_intermediate_size", moe.intermediate_size);
  json.add("shared_expert_intermediate_size", moe.shared_intermediate_size);
  json.add_flag("norm_topk_prob", moe.renormalize);
  json.add_real("router_aux_loss_coef", moe.router_aux_loss_coef);
  json.add_flag("output_router_logits", moe.router_aux_loss_coef > 0);
}

}  // namespace

HfFamily hf_family_of(const ModelConfig& config) {
  HfFamily family = HfFamily::kKimiLinear;
  if (uses(config, "kda") && only(config, {"kda", "mla"})) {
    family = HfFamily::kKimiLinear;
  } else if (only(config, {"mla"})) {
    family = config.mla.rope == RopeKind::kNone ? HfFamily::kKimiLinear : HfFamily::kDeepseekV3;
  } else if (uses(config, "gdn") && only(config, {"gdn", "attention"})) {
    family = HfFamily::kQwen3Next;
  } else if (only(config, {"attention"})) {
    family = config.attention.output_gate ? HfFamily::kQwen3Next : HfFamily::kLlama;
  } else {
    throw_user_error(
        "model.layers: no public family has this mix; there are kda with mla, mla, gdn with attention, attention");
  }
  const std::string unmet = wishes_of(family, config).unmet();
  if (!unmet.empty()) throw_user_error(unmet, " for a model of the family ", name_of(family));
  return family;
}

std::string hf_config_json(const HfModel& model, int64_t max_positions, const std::optional<HfMarks>& marks) {
  const ModelConfig& config = model.config;
  constexpr const char* kArchitectures[] = {"KimiLinearForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM",
                                            "LlamaForCausalLM"};
  JsonObject json;
  json.add_list("architectures", std::vector<std::string>{kArchitectures[static_cast<size_t>(model.family)]});
  json.add("model_type", name_of(model.family));
  json.add("dtype", "float32");
  json.add("vocab_size", config.vocab_size);
  json.add("hidden_size", config.hidden_size);
  json.add("num_hidden_layers", config.num_layers);
  json.add("intermediate_size", config.mlp.intermediate_size);
  json.add_real("rms_norm_eps", config.norm_eps);
  json.add_real("initializer_range", config.initializer_range);
  // Left out, these would be the ids of the family's own tokenizer.
  if (marks) {
    json.add("bos_token_id", marks->bos);
    json.add("eos_token_id", marks->eos);
  } else {
    json.add_null("bos_token_id");
    json.add_null("eos_token_id");
  }
  json.add_null("pad_token_id");
  json.add_flag("tie_word_embeddings", config.tie_embeddings && model.family != HfFamily::kKimiLinear);
  json.add("hidden_act", "silu");
  json.add(model.family == HfFamily::kKimiLinear ? "model_max_length" : "max_position_embeddings", max_positions);
  switch (model.family) {
    case HfFamily::kKimiLinear:
      add_kimi(json, config);
      break;
    case HfFamily::kDeepseekV3:
      add_deepseek(json, config);
      break;
    case HfFamily::kQwen3Next:
      add_qwen3_next(json, config);
      break;
    case HfFamily::kLlama:
      add_attention(json, config.attention);
      break;
  }
  return json.text() + "\n";
}

}  // namespace palimpsest
