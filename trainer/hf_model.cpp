#include "trainer/hf_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "kernels/check.h"

namespace palimpsest {

namespace {

using Json = nlohmann::json;

// Reads fields of one JSON object and remembers which were asked for.
class Fields {
 public:
  Fields(const Json& object, std::string file, std::string prefix)
      : object_(object), file_(std::move(file)), prefix_(std::move(prefix)) {}

  bool has(const char* key) {
    seen_.push_back(key);
    return object_.contains(key) && !object_.at(key).is_null();
  }
  // Fields that mean nothing for this model, whatever they say.
  void ignore(std::initializer_list<const char*> keys) { seen_.insert(seen_.end(), keys.begin(), keys.end()); }

  int64_t integer(const char* key) {
    if (!has(key)) fail_missing(key);
    if (!object_.at(key).is_number_integer()) unsupported(key, "must be an integer");
    const auto value = object_.at(key).get<int64_t>();
    // So that products of two sizes, and of a row's bytes, stay far from overflow.
    constexpr int64_t kLargest = int64_t{1} << 27;
    if (value < 0 || value > kLargest) unsupported(key, fmt::format("must be from 0 to {}", kLargest));
    return value;
  }
  int64_t integer(const char* key, int64_t otherwise) { return has(key) ? integer(key) : otherwise; }
  double number(const char* key) {
    if (!has(key)) fail_missing(key);
    if (!object_.at(key).is_number()) unsupported(key, "must be a number");
    return object_.at(key).get<double>();
  }
  double number(const char* key, double otherwise) { return has(key) ? number(key) : otherwise; }
  bool boolean(const char* key, bool otherwise) {
    if (!has(key)) return otherwise;
    if (!object_.at(key).is_boolean()) unsupported(key, "must be true or false");
    return object_.at(key).get<bool>();
  }
  std::string text(const char* key, const std::string& otherwise) {
    if (!has(key)) return otherwise;
    if (!object_.at(key).is_string()) unsupported(key, "must be a string");
    return object_.at(key).get<std::string>();
  }
  std::vector<std::string> texts(const char* key) {
    std::vector<std::string> values;
    if (!has(key)) return values;
    if (!object_.at(key).is_array()) unsupported(key, "must be a list");
    for (const Json& value : object_.at(key)) {
      if (!value.is_string()) unsupported(key, "must be a list of strings");
      values.push_back(value.get<std::string>());
    }
    return values;
  }
  std::vector<int64_t> integers(const char* key) {
    std::vector<int64_t> values;
    if (!has(key)) return values;
    if (!object_.at(key).is_array()) unsupported(key, "must be a list");
    for (const Json& value : object_.at(key)) {
      if (!value.is_number_integer()) unsupported(key, "must be a list of integers");
      values.push_back(value.get<int64_t>());
    }
    return values;
  }
  Fields section(const char* key) {
    if (!has(key) || !object_.at(key).is_object()) unsupported(key, "must be an object");
    return {object_.at(key), file_, prefix_ + key + "."};
  }

  [[noreturn]] void unsupported(const char* key, std::string_view why) const {
    std::string value = object_.contains(key) ? object_.at(key).dump() : "(absent)";
    if (value.size() > 100) value = value.substr(0, 100) + "...";
    throw_user_error(file_, ": ", prefix_, key, " = ", value, ": ", why);
  }
  void require(bool condition, const char* key, std::string_view why) const {
    if (!condition) unsupported(key, why);
  }

  // Refuses fields that nobody asked for and whose name says that they change the computation.
  void refuse_unknown_mathematics() const {
    constexpr std::array kSuspicious = {"gate", "bound", "scal", "bias", "norm", "rope", "lora", "window", "softcap"};
    for (const auto& [key, value] : object_.items()) {
      if (std::find(seen_.begin(), seen_.end(), key) != seen_.end()) continue;
      if (value.is_null() || value == false || value == 0) continue;
      for (const char* word : kSuspicious)
        if (key.find(word) != std::string::npos) unsupported(key.c_str(), "this field is not known here");
    }
  }

 private:
  [[noreturn]] void fail_missing(const char* key) const { throw_user_error(file_, ": ", prefix_, key, " is missing"); }

  const Json& object_;
  std::string file_, prefix_;
  std::vector<std::string> seen_;
};

void read_common(Fields& fields, ModelConfig& config) {
  config.vocab_size = fields.integer("vocab_size");
  config.hidden_size = fields.integer("hidden_size");
  config.num_layers = fields.integer("num_hidden_layers");
  config.mlp.intermediate_size = fields.integer("intermediate_size");
  config.moe = {};
  config.norm_eps = fields.number("rms_norm_eps");
  config.initializer_range = fields.number("initializer_range", 0.02);
  config.tie_embeddings = fields.boolean("tie_word_embeddings", false);
  fields.require(fields.text("hidden_act", "silu") == "silu", "hidden_act", "only silu is supported");
  fields.require(!fields.boolean("attention_bias", false), "attention_bias", "biases are not supported");
  fields.require(!fields.boolean("mlp_bias", false), "mlp_bias", "biases are not supported");
  fields.require(fields.number("attention_dropout", 0.0) == 0.0, "attention_dropout", "dropout is not supported");
  fields.require(!fields.has("quantization_config"), "quantization_config",
                 "quantized weights are not supported; store them as bf16, f16 or f32");
  fields.require(config.num_layers > 0, "num_hidden_layers", "must be positive");
}

// What the files say of rotary embeddings, in fields of their own or inside rope_parameters or rope_scaling. Every kind
// of scaling but default, yarn and llama3 is refused by name.
struct HfRope {
  double theta = 10000.0;
  std::optional<double> partial_factor;
  RopeScalingConfig scaling;
};

void read_rope_scaling(Fields& rope, RopeScalingConfig& scaling, int64_t max_positions) {
  const std::string kind = rope.text("rope_type", rope.text("type", "default"));
  if (kind == "default") return;
  const char* key = rope.has("rope_type") ? "rope_type" : "type";
  rope.require(kind == "yarn" || kind == "llama3", key, "supported are default, yarn and llama3");
  scaling.kind = kind == "yarn" ? RopeScalingKind::kYarn : RopeScalingKind::kLlama3;
  const bool has_length = rope.has("original_max_position_embeddings");
  if (!has_length && max_positions == 0) rope.unsupported("original_max_position_embeddings", "is missing");
  scaling.original_max_positions = has_length ? rope.integer("original_max_position_embeddings") : max_positions;
  const auto length = static_cast<double>(scaling.original_max_positions);
  scaling.factor = rope.number("factor", static_cast<double>(max_positions) / length);
  if (scaling.kind == RopeScalingKind::kYarn) {
    scaling.beta_fast = rope.number("beta_fast", 32.0);
    scaling.beta_slow = rope.number("beta_slow", 1.0);
    scaling.truncate = rope.boolean("truncate", true);
    if (rope.has("attention_factor")) scaling.attention_factor = rope.number("attention_factor");
    scaling.mscale = rope.number("mscale", 0.0);
    scaling.mscale_all_dim = rope.number("mscale_all_dim", 0.0);
  } else {
    scaling.low_freq_factor = rope.number("low_freq_factor");
    scaling.high_freq_factor = rope.number("high_freq_factor");
  }
}

std::optional<double> read_partial_factor(Fields& fields, std::optional<double> otherwise) {
  constexpr const char* kKey = "partial_rotary_factor";
  if (!fields.has(kKey)) return otherwise;
  const double factor = fields.number(kKey);
  fields.require(factor > 0 && factor <= 1, kKey, "must be above 0 and at most 1");
  return factor;
}

HfRope read_rope(Fields& fields) {
  HfRope result;
  const int64_t max_positions = fields.integer("max_position_embeddings", 0);
  result.theta = fields.number("rope_theta", 10000.0);
  result.partial_factor = read_partial_factor(fields, std::nullopt);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (!fields.has(key)) continue;
    Fields rope = fields.section(key);
    result.theta = rope.number("rope_theta", result.theta);
    result.partial_factor = read_partial_factor(rope, result.partial_factor);
    read_rope_scaling(rope, result.scaling, max_positions);
    rope.refuse_unknown_mathematics();
  }
  return result;
}

// In other families the public library rotates whole heads, whatever partial_rotary_factor says, or cannot run.
void refuse_partial_rotation(const Fields& fields, const HfRope& rope) {
  fields.require(rope.partial_factor.value_or(1.0) == 1.0, "partial_rotary_factor", "must be 1 in this family");
}

int64_t read_conv_size(Fields& fields, const char* key) {
  const int64_t size = fields.integer(key, 4);
  fields.require(size >= 1 && size <= 4, key, "must be from 1 to 4");
  return size;
}

// layer_types: entry i is layer i from 0.
std::vector<std::string> read_layer_types(Fields& fields, const ModelConfig& config, const char* linear) {
  std::vector<std::string> layers = fields.texts("layer_types");
  fields.require(static_cast<int64_t>(layers.size()) == config.num_layers, "layer_types",
                 fmt::format("must have num_hidden_layers = {} entries", config.num_layers));
  for (std::string& layer : layers) {
    if (layer == "linear_attention") {
      layer = linear;
    } else {
      fields.require(layer == "full_attention", "layer_types", "entries are linear_attention or full_attention");
      layer = std::string(linear) == "kda" ? "mla" : "attention";
    }
  }
  return layers;
}

void read_mla(Fields& fields, MlaConfig& mla) {
  mla.num_heads = fields.integer("num_attention_heads");
  const int64_t kv_heads = fields.integer("num_key_value_heads", mla.num_heads);
  fields.require(kv_heads == mla.num_heads, "num_key_value_heads", "must equal num_attention_heads");
  if (fields.has("q_lora_rank")) mla.q_lora_rank = fields.integer("q_lora_rank");
  mla.kv_lora_rank = fields.integer("kv_lora_rank");
  mla.qk_nope_head_dim = fields.integer("qk_nope_head_dim");
  mla.qk_rope_head_dim = fields.integer("qk_rope_head_dim");
  mla.v_head_dim = fields.integer("v_head_dim");
}

// Kimi's first spelling: both lists in linear_attn_config count from 1.
std::vector<std::string> read_kimi_layer_lists(Fields& linear, int64_t num_layers) {
  std::vector<std::string> layers(static_cast<size_t>(num_layers));
  const auto place = [&](const char* key, const char* kind) {
    for (int64_t entry : linear.integers(key)) {
      linear.require(entry >= 1 && entry <= num_layers, key, "entries count from 1 to num_hidden_layers");
      std::string& layer = layers[static_cast<size_t>(entry - 1)];
      linear.require(layer.empty(), key, fmt::format("layer {} is named twice", entry));
      layer = kind;
    }
  };
  place("kda_layers", "kda");
  place("full_attn_layers", "mla");
  for (int64_t i = 0; i < num_layers; ++i)
    linear.require(!layers[static_cast<size_t>(i)].empty(), "kda_layers",
                   fmt::format("layer {} is in neither kda_layers nor full_attn_layers", i + 1));
  return layers;
}

// Sizes and choice of experts, in the spelling that Kimi Linear and DeepSeek-V3 share. Which layers are dense is the
// caller's; experts in no layer leave the config without any.
void read_experts(Fields& fields, MoeConfig& moe, int64_t num_layers, const std::vector<int64_t>& dense_layers) {
  const auto is_dense = [&](int64_t i) {
    return std::find(dense_layers.begin(), dense_layers.end(), i) != dense_layers.end();
  };
  bool any = false;
  for (int64_t i = 0; i < num_layers; ++i) any = any || !is_dense(i);
  if (!any) moe.num_experts = 0;
  if (moe.num_experts == 0) return;
  moe.dense_layers = dense_layers;
  moe.intermediate_size = fields.integer("moe_intermediate_size");
}

std::vector<int64_t> first_layers(int64_t count, int64_t num_layers) {
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < std::min(count, num_layers); ++i) layers.push_back(i);
  return layers;
}

// A dense model may still carry num_experts; which layers are dense decides.
void read_kimi_experts(Fields& fields, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  const int64_t L = config.num_layers;
  std::vector<int64_t> dense;
  if (fields.has("mlp_layer_types")) {
    const std::vector<std::string> kinds = fields.texts("mlp_layer_types");
    fields.require(static_cast<int64_t>(kinds.size()) == L, "mlp_layer_types",
                   fmt::format("must have num_hidden_layers = {} entries", L));
    for (int64_t i = 0; i < L; ++i) {
      const std::string& kind = kinds[static_cast<size_t>(i)];
      fields.require(kind == "dense" || kind == "sparse", "mlp_layer_types", "entries are dense or sparse");
      if (kind == "dense") dense.push_back(i);
    }
  } else {
    const int64_t first = fields.integer("first_k_dense_replace", 1), step = fields.integer("moe_layer_freq", 1);
    fields.require(step > 0, "moe_layer_freq", "must be positive");
    for (int64_t i = 0; i < L; ++i)
      if (i < first || i % step != 0) dense.push_back(i);
  }
  moe.num_experts = fields.integer("num_experts", 0);
  read_experts(fields, moe, L, dense);
  // Fields of the experts that a dense model may carry.
  fields.ignore({"first_k_dense_replace", "moe_renormalize", "routed_scaling_factor"});
  if (moe.num_experts == 0) return;
  moe.experts_per_token = fields.integer("num_experts_per_token");
  moe.shared_intermediate_size = fields.integer("num_shared_experts", 0) * moe.intermediate_size;
  moe.num_groups = fields.integer("num_expert_group", 1);
  moe.top_groups = fields.integer("topk_group", 1);
  moe.renormalize = fields.boolean("moe_renormalize", true);
  moe.routed_scaling_factor = fields.number("routed_scaling_factor", 2.446);
  fields.require(fields.text("moe_router_activation_func", "sigmoid") == "sigmoid", "moe_router_activation_func",
                 "only sigmoid is supported in this family");
  moe.router = RouterScore::kSigmoid;
}

void read_kimi(Fields& fields, ModelConfig& config) {
  read_mla(fields, config.mla);
  fields.require(fields.boolean("mla_use_nope", true), "mla_use_nope", "Kimi Linear's MLA has no positions");
  fields.ignore({"rope_theta", "rope_scaling", "rope_parameters"});  // no layer rotates
  if (fields.has("linear_attn_config")) {
    Fields linear = fields.section("linear_attn_config");
    config.kda.num_heads = linear.integer("num_heads");
    config.kda.head_dim = linear.integer("head_dim");
    config.kda.conv_size = read_conv_size(linear, "short_conv_kernel_size");
    config.layers = read_kimi_layer_lists(linear, config.num_layers);
    linear.refuse_unknown_mathematics();
  } else {
    config.kda.num_heads = fields.integer("linear_num_heads");
    config.kda.head_dim = fields.integer("linear_head_dim");
    config.kda.conv_size = read_conv_size(fields, "linear_conv_kernel_dim");
    config.layers = read_layer_types(fields, config, "kda");
  }
  read_kimi_experts(fields, config);
}

void read_deepseek(Fields& fields, ModelConfig& config) {
  read_mla(fields, config.mla);
  config.layers = {"mla"};
  const HfRope rope = read_rope(fields);
  refuse_partial_rotation(fields, rope);
  config.mla.rope_theta = rope.theta;
  config.mla.rope_scaling = rope.scaling;
  config.mla.rope = fields.boolean("rope_interleave", true) ? RopeKind::kInterleaved : RopeKind::kHalfSplit;
  MoeConfig& moe = config.moe;
  moe.num_experts = fields.integer("n_routed_experts", 0);
  read_experts(fields, moe, config.num_layers,
               first_layers(fields.integer("first_k_dense_replace", 3), config.num_layers));
  fields.ignore({"norm_topk_prob", "routed_scaling_factor"});
  if (moe.num_experts == 0) return;
  moe.experts_per_token = fields.integer("num_experts_per_tok");
  moe.shared_intermediate_size = fields.integer("n_shared_experts", 0) * moe.intermediate_size;
  moe.num_groups = fields.integer("n_group", 8);
  moe.top_groups = fields.integer("topk_group", 4);
  moe.renormalize = fields.boolean("norm_topk_prob", true);
  moe.routed_scaling_factor = fields.number("routed_scaling_factor", 2.5);
  fields.require(fields.integer("moe_layer_freq", 1) == 1, "moe_layer_freq", "must be 1");
  fields.require(fields.text("scoring_func", "sigmoid") == "sigmoid", "scoring_func", "only sigmoid is supported");
  fields.require(fields.text("topk_method", "noaux_tc") == "noaux_tc", "topk_method", "only noaux_tc is supported");
  moe.router = RouterScore::kSigmoid;
}

HfRope read_attention(Fields& fields, ModelConfig& config) {
  config.attention.num_heads = fields.integer("num_attention_heads");
  config.attention.num_kv_heads = fields.integer("num_key_value_heads", config.attention.num_heads);
  fields.require(config.attention.num_heads > 0, "num_attention_heads", "must be positive");
  config.attention.head_dim = fields.integer("head_dim", config.hidden_size / config.attention.num_heads);
  const HfRope rope = read_rope(fields);
  config.attention.rope = RopeKind::kHalfSplit;
  config.attention.rope_theta = rope.theta;
  config.attention.rope_scaling = rope.scaling;
  return rope;
}

void read_llama(Fields& fields, ModelConfig& config) {
  refuse_partial_rotation(fields, read_attention(fields, config));
  config.layers = {"attention"};
}

void read_qwen3_next(Fields& fields, ModelConfig& config) {
  const double rotated = read_attention(fields, config).partial_factor.value_or(0.25);
  config.attention.rope_dim = static_cast<int64_t>(rotated * static_cast<double>(config.attention.head_dim));
  config.attention.output_gate = true;
  config.attention.qk_norm = true;
  config.norm = NormWeight::kOneCentred;
  config.gdn.num_heads = fields.integer("linear_num_key_heads");
  config.gdn.num_value_heads = fields.integer("linear_num_value_heads");
  config.gdn.head_dim = fields.integer("linear_key_head_dim");
  config.gdn.value_head_dim = fields.integer("linear_value_head_dim");
  config.gdn.conv_size = read_conv_size(fields, "linear_conv_kernel_dim");
  if (fields.has("layer_types")) {
    config.layers = read_layer_types(fields, config, "gdn");
  } else {
    const int64_t interval = fields.integer("full_attention_interval", 4);
    fields.require(interval > 0, "full_attention_interval", "must be positive");
    config.layers.clear();
    for (int64_t i = 0; i < config.num_layers; ++i)
      config.layers.emplace_back((i + 1) % interval == 0 ? "attention" : "gdn");
  }
  std::vector<int64_t> dense;
  const std::vector<int64_t> mlp_only = fields.integers("mlp_only_layers");
  const int64_t sparse_step = fields.integer("decoder_sparse_step", 1);
  fields.require(sparse_step > 0, "decoder_sparse_step", "must be positive");
  for (int64_t i = 0; i < config.num_layers; ++i)
    if ((i + 1) % sparse_step != 0 || std::find(mlp_only.begin(), mlp_only.end(), i) != mlp_only.end())
      dense.push_back(i);
  MoeConfig& moe = config.moe;
  moe.num_experts = fields.integer("num_experts", 0);
  read_experts(fields, moe, config.num_layers, dense);
  fields.ignore({"norm_topk_prob", "router_aux_loss_coef"});
  if (moe.num_experts == 0) return;
  moe.experts_per_token = fields.integer("num_experts_per_tok");
  moe.shared_intermediate_size = fields.integer("shared_expert_intermediate_size");
  moe.shared_gate = true;
  moe.renormalize = fields.boolean("norm_topk_prob", true);
  moe.router = RouterScore::kSoftmax;
  // The public library adds the balance term where the router's logits are asked for, as in its training.
  if (fields.boolean("output_router_logits", false))
    moe.router_aux_loss_coef = fields.number("router_aux_loss_coef", 0.001);
}

struct Family {
  HfFamily family;
  const char* name;  // model_type
  void (*read)(Fields& fields, ModelConfig& config);
};
constexpr Family kFamilies[] = {{HfFamily::kKimiLinear, "kimi_linear", read_kimi},
                                {HfFamily::kDeepseekV3, "deepseek_v3", read_deepseek},
                                {HfFamily::kQwen3Next, "qwen3_next", read_qwen3_next},
                                {HfFamily::kLlama, "llama", read_llama}};

const Family& family_named(const Fields& fields, const std::string& name) {
  std::string known;
  for (const Family& family : kFamilies) {
    if (name == family.name) return family;
    known.append(known.empty() ? "" : ", ").append(family.name);
  }
  fields.unsupported("model_type", "supported are " + known);
}

}  // namespace

const char* name_of(HfFamily family) {
  return std::find_if(std::begin(kFamilies), std::end(kFamilies), [&](const Family& it) { return it.family == family; })
      ->name;
}

HfModel read_hf_config(std::string_view json, const std::string& file) {
  Json object;
  try {
    object = Json::parse(json);
  } catch (const Json::exception& error) {
    throw_user_error(file, ": not valid JSON: ", error.what());
  }
  if (!object.is_object()) throw_user_error(file, ": must be a JSON object");
  Fields fields(object, file, "");
  HfModel model;
  const std::string type = fields.text("model_type", "");
  const Family& family = family_named(fields, type);
  model.family = family.family;
  read_common(fields, model.config);
  family.read(fields, model.config);
  fields.refuse_unknown_mathematics();
  try {
    validate(model.config);
  } catch (const UserError& error) {
    throw_user_error(file, ": ", error.what());
  }
  return model;
}

}  // namespace palimpsest
