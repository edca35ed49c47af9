// The shapes of published models: the counts that follow from them, and the ready config of the first.
#include <gtest/gtest.h>

#include <algorithm>

#include "model/language_model.h"
#include "trainer/config.h"
#include "trainer/hf_model.h"

namespace palimpsest {
namespace {

constexpr const char* kKimiLinear48b = R"({"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"],
  "hidden_size": 2304, "num_hidden_layers": 27, "vocab_size": 163840, "tie_word_embeddings": false,
  "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "intermediate_size": 9216,
  "hidden_act": "silu", "rms_norm_eps": 1e-5, "initializer_range": 0.02, "q_lora_rank": null, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": true, "num_experts": 256,
  "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
  "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": true,
  "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
  "model_max_length": 1048576, "rope_theta": 10000.0, "rope_scaling": null, "use_grouped_topk": true,
  "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]}})";

constexpr const char* kQwen3Next80b = R"({"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
  "vocab_size": 151936, "tie_word_embeddings": false, "full_attention_interval": 4, "num_attention_heads": 16,
  "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "linear_num_key_heads": 16,
  "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
  "rms_norm_eps": 1e-6, "rope_theta": 10000000, "rope_scaling": null, "max_position_embeddings": 262144,
  "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
  "norm_topk_prob": true, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1, "mlp_only_layers": [],
  "intermediate_size": 5120, "attention_bias": false, "hidden_act": "silu"})";

int64_t count_of(const ModelConfig& config) {
  ParameterRegistry registry;
  const LanguageModel model(config, registry);
  return registry.num_elements();
}

TEST(PublishedSizes, OfKimiLinear48b) {
  const ModelConfig model = read_hf_config(kKimiLinear48b, "config.json").config;
  EXPECT_EQ(count_of(model), 49122681728);
}

TEST(PublishedSizes, OfQwen3Next80b) {
  EXPECT_EQ(count_of(read_hf_config(kQwen3Next80b, "config.json").config), 79674391296);
}

TEST(PublishedSizes, TheReadyConfigIsKimiLinear48b) {
  const Config ready = load_config(std::string(PALIMPSEST_SOURCE_DIR) + "/configs/kimi_linear_48b.yaml");
  EXPECT_EQ(count_of(ready.model), 49122681728);
  Config published = ready;
  published.model = read_hf_config(kKimiLinear48b, "config.json").config;
  for (const ConfigDifference& difference : differences(ready, published))
    EXPECT_FALSE(decides_computation(difference.key))
        << difference.key << ": " << difference.before << ", published " << difference.after;
}

TEST(PublishedSizes, TheTableHasALineForAllExpertsOfALayer) {
  ParameterRegistry registry;
  const LanguageModel model(read_hf_config(kKimiLinear48b, "config.json").config, registry);
  const std::string table = parameter_table(registry);
  EXPECT_NE(table.find("model.layers.1.mlp.experts.*.up_proj.weight"), std::string::npos);
  EXPECT_NE(table.find("256 x [1024, 2304]"), std::string::npos);
  EXPECT_NE(table.find("603979776"), std::string::npos);
  EXPECT_NE(table.find("49122681728"), std::string::npos);
  EXPECT_LT(std::count(table.begin(), table.end(), '\n'), 800);
}

}  // namespace
}  // namespace palimpsest
