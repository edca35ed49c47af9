// What a model is, as plain structs. Each struct lists its fields once, in visit(): name, member, one line of help. The
// YAML reader, the resolved config, `train --explain` and the comparison on resume all walk these lists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/rms_norm.h"
#include "kernels/router.h"

namespace palimpsest {

// The names of an enum's values in configs, in order of the values: specialise for each enum that a config field has.
template <class E>
struct EnumNames;

enum class RopeKind : uint8_t { kNone, kInterleaved, kHalfSplit };
template <>
struct EnumNames<RopeKind> {
  static constexpr const char* values[] = {"none", "interleaved", "half_split"};
};

enum class RopeScalingKind : uint8_t { kDefault, kYarn, kLlama3 };
template <>
struct EnumNames<RopeScalingKind> {
  static constexpr const char* values[] = {"default", "yarn", "llama3"};
};

template <>
struct EnumNames<NormWeight> {
  static constexpr const char* values[] = {"plain", "one_centred"};
};

template <>
struct EnumNames<RouterScore> {
  static constexpr const char* values[] = {"sigmoid", "softmax"};
};

struct KdaConfig {
  int64_t num_heads = 8;
  std::optional<int64_t> num_value_heads;
  int64_t head_dim = 128;
  int64_t conv_size = 4;
  std::optional<double> gate_lower_bound;
  bool full_rank_gate = false;
  bool negative_eigenvalues = false;

  template <class V>
  void visit(V& v) {
    v("num_heads", num_heads, "query and key heads");
    v("num_value_heads", num_value_heads, "value heads, a multiple of num_heads; null: num_heads");
    v("head_dim", head_dim, "key and value size of a head; also the rank of the two gates");
    v("conv_size", conv_size, "taps of the short convolution, 1 to 4");
    v("gate_lower_bound", gate_lower_bound, "bounded gate: log decay in (bound, 0), usually -5; null: softplus gate");
    v("full_rank_gate", full_rank_gate, "output gate by one full matrix in place of two low-rank ones");
    v("negative_eigenvalues", negative_eigenvalues, "beta in (0, 2) in place of (0, 1)");
  }
};

struct GdnConfig {
  int64_t num_heads = 8;
  std::optional<int64_t> num_value_heads;
  int64_t head_dim = 128;
  std::optional<int64_t> value_head_dim;
  int64_t conv_size = 4;
  bool negative_eigenvalues = false;

  template <class V>
  void visit(V& v) {
    v("num_heads", num_heads, "query and key heads");
    v("num_value_heads", num_value_heads, "value heads, a multiple of num_heads; null: num_heads");
    v("head_dim", head_dim, "key size of a head");
    v("value_head_dim", value_head_dim, "value size of a head; null: head_dim");
    v("conv_size", conv_size, "taps of the short convolution, 1 to 4");
    v("negative_eigenvalues", negative_eigenvalues, "beta in (0, 2) in place of (0, 1)");
  }
};

struct RetnetConfig {
  int64_t num_heads = 8;
  int64_t head_dim = 128;
  std::optional<int64_t> value_head_dim;

  template <class V>
  void visit(V& v) {
    v("num_heads", num_heads, "heads");
    v("head_dim", head_dim, "query and key size of a head");
    v("value_head_dim", value_head_dim, "value size of a head; null: head_dim");
  }
};

// How rotary angles are stretched to contexts longer than the model was first trained for. Formulae: model/rope.h.
struct RopeScalingConfig {
  RopeScalingKind kind = RopeScalingKind::kDefault;
  double factor = 1.0;
  int64_t original_max_positions = 4096;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;
  std::optional<double> attention_factor;
  double mscale = 0.0;
  double mscale_all_dim = 0.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;

  template <class V>
  void visit(V& v) {
    v("kind", kind, "default: none; yarn; llama3");
    v("factor", factor, "new context length over the old");
    v("original_max_positions", original_max_positions, "the old context length");
    v("beta_fast", beta_fast, "yarn: pairs that turn more often in the old context keep their angle");
    v("beta_slow", beta_slow, "yarn: pairs that turn less often are divided by factor");
    v("truncate", truncate, "yarn: round the border pairs to whole ones");
    v("attention_factor", attention_factor, "yarn: factor of rotated queries and keys; null: from factor and mscale");
    v("mscale", mscale, "yarn: numerator of that factor; 0: 0.1 ln(factor) + 1");
    v("mscale_all_dim", mscale_all_dim, "yarn: its denominator, and MLA's softmax factor; 0: neither");
    v("low_freq_factor", low_freq_factor,
      "llama3: pairs that turn less often in the old context are divided by factor");
    v("high_freq_factor", high_freq_factor, "llama3: pairs that turn more often keep their angle");
  }
};

struct MlaConfig {
  int64_t num_heads = 8;
  std::optional<int64_t> q_lora_rank;
  int64_t kv_lora_rank = 512;
  int64_t qk_nope_head_dim = 128;
  int64_t qk_rope_head_dim = 64;
  int64_t v_head_dim = 128;
  RopeKind rope = RopeKind::kNone;
  double rope_theta = 10000.0;
  RopeScalingConfig rope_scaling;

  template <class V>
  void visit(V& v) {
    v("num_heads", num_heads, "heads");
    v("q_lora_rank", q_lora_rank, "rank of the query projection; null: full rank");
    v("kv_lora_rank", kv_lora_rank, "size of the latent that keys and values are expanded from");
    v("qk_nope_head_dim", qk_nope_head_dim, "key size of a head that comes from the latent");
    v("qk_rope_head_dim", qk_rope_head_dim, "key size shared by all heads, rotated when rope is on");
    v("v_head_dim", v_head_dim, "value size of a head");
    v("rope", rope, "rotary embedding: none, interleaved pairs (DeepSeek-V3 files) or half_split pairs");
    v("rope_theta", rope_theta, "base of the rotary angles");
    v("rope_scaling", rope_scaling, "rotary angles of longer contexts");
  }
};

struct AttentionConfig {
  int64_t num_heads = 8;
  std::optional<int64_t> num_kv_heads;
  int64_t head_dim = 128;
  RopeKind rope = RopeKind::kHalfSplit;
  std::optional<int64_t> rope_dim;
  double rope_theta = 10000.0;
  RopeScalingConfig rope_scaling;
  bool output_gate = false;
  bool qk_norm = false;

  template <class V>
  void visit(V& v) {
    v("num_heads", num_heads, "query heads");
    v("num_kv_heads", num_kv_heads, "key and value heads, a divisor of num_heads; null: num_heads");
    v("head_dim", head_dim, "size of a head");
    v("rope", rope, "rotary embedding: none, interleaved or half_split pairs");
    v("rope_dim", rope_dim, "rotated part of a head, even; null: head_dim");
    v("rope_theta", rope_theta, "base of the rotary angles");
    v("output_gate", output_gate, "multiply the heads by a sigmoid gate, as Qwen3-Next does");
    v("qk_norm", qk_norm, "RMSNorm of queries and keys per head");
    v("rope_scaling", rope_scaling, "rotary angles of longer contexts");
  }
};

struct MlpConfig {
  int64_t intermediate_size = 2816;

  template <class V>
  void visit(V& v) {
    v("intermediate_size", intermediate_size, "inner size of the SwiGLU feed-forward");
  }
};

struct MoeConfig {
  int64_t num_experts = 0;
  std::vector<int64_t> dense_layers;
  int64_t experts_per_token = 8;
  int64_t intermediate_size = 1024;
  int64_t shared_intermediate_size = 0;
  bool shared_gate = false;
  RouterScore router = RouterScore::kSigmoid;
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  bool renormalize = true;
  double routed_scaling_factor = 1.0;
  std::optional<double> router_bias_update_speed;
  double router_aux_loss_coef = 0.0;

  template <class V>
  void visit(V& v) {
    v("num_experts", num_experts, "experts of a layer, in place of mlp; 0: every layer has the mlp");
    v("dense_layers", dense_layers, "layers, from 0, that keep the mlp");
    v("experts_per_token", experts_per_token, "experts that each token is sent to");
    v("intermediate_size", intermediate_size, "inner size of an expert, a SwiGLU feed-forward");
    v("shared_intermediate_size", shared_intermediate_size, "inner size of the expert of every token; 0: none");
    v("shared_gate", shared_gate, "a sigmoid gate on the shared expert, as Qwen3-Next has it");
    v("router", router, "scores: sigmoid, with a selection bias (Kimi Linear, DeepSeek-V3), or softmax (Qwen3-Next)");
    v("num_groups", num_groups, "groups of experts, of which the best are taken first; a divisor of num_experts");
    v("top_groups", top_groups, "groups that a token chooses its experts from");
    v("renormalize", renormalize, "divide the chosen scores by their sum");
    v("routed_scaling_factor", routed_scaling_factor, "factor of the chosen scores");
    v("router_bias_update_speed", router_bias_update_speed,
      "step of the selection bias towards experts with few tokens, after each optimizer step; null: it stays");
    v("router_aux_loss_coef", router_aux_loss_coef, "weight of the balance term of the loss (softmax router); 0: none");
  }
};

struct ModelConfig {
  int64_t vocab_size = 32000;
  int64_t hidden_size = 1024;
  int64_t num_layers = 24;
  std::vector<std::string> layers = {"kda", "kda", "kda", "mla"};
  double norm_eps = 1e-5;
  NormWeight norm = NormWeight::kPlain;
  bool tie_embeddings = false;
  double initializer_range = 0.02;
  KdaConfig kda;
  GdnConfig gdn;
  RetnetConfig retnet;
  MlaConfig mla;
  AttentionConfig attention;
  MlpConfig mlp;
  MoeConfig moe;

  template <class V>
  void visit(V& v) {
    v("vocab_size", vocab_size, "rows of the embedding; every token id is below it");
    v("hidden_size", hidden_size, "width of the residual stream");
    v("num_layers", num_layers, "blocks, each a token mixer and a feed-forward");
    v("layers", layers, "token mixers, repeated over the depth: kda, gdn, retnet, mla, attention");
    v("norm_eps", norm_eps, "epsilon of every RMSNorm but MLA's latent norms (1e-6, as published)");
    v("norm", norm, "weight of block, final and q/k norms: plain (w) or one_centred (1 + w)");
    v("tie_embeddings", tie_embeddings, "the head uses the embedding's matrix");
    v("initializer_range", initializer_range, "standard deviation of the initial weights");
    v("kda", kda, "Kimi Delta Attention");
    v("gdn", gdn, "Gated DeltaNet");
    v("retnet", retnet, "RetNet");
    v("mla", mla, "multi-head latent attention");
    v("attention", attention, "softmax attention");
    v("mlp", mlp, "feed-forward");
    v("moe", moe, "feed-forward of routed experts");
  }

  // The mixer of block i.
  const std::string& layer_kind(int64_t i) const { return layers[static_cast<size_t>(i) % layers.size()]; }
  // Whether block i has routed experts.
  bool has_experts(int64_t i) const;
};

// Throws a UserError that names the field ("model.kda.head_dim is ..., must be ...") when the model cannot be built.
void validate(const ModelConfig& config);

}  // namespace palimpsest
