// What a public model's config and files may hold: fields, tensors too many, heads, tokenizers; what is refused.
#include <span>
#include <tuple>

#include "tests/trainer/hf_fixture.h"
#include "trainer/config.h"
#include "trainer/export_hf.h"
#include "trainer/hf_folder.h"
#include "trainer/import_hf.h"

namespace palimpsest {
namespace {

using hf_test::changed_config;
using hf_test::error_of;
using hf_test::expect_equal_tensors;
using hf_test::golden;
using support::read_file;
using support::TempDirectory;
using support::write_file;

// ---- config.json ----------------------------------------------------------------------------------------------------

TEST(HfConfig, AnyOtherRotaryScalingIsRefusedByName) {
  for (const char* kind : {"linear", "dynamic", "longrope", "proportional"}) {
    const std::string text =
        changed_config("llama_gqa", [&](auto& json) { json["rope_parameters"]["rope_type"] = kind; });
    const std::string error = error_of([&] { read_hf_config(text, "config.json"); });
    EXPECT_NE(error.find(std::string("rope_parameters.rope_type = \"") + kind + "\": supported are default, yarn"),
              std::string::npos)
        << error;
  }
  // The older spelling.
  const std::string text = changed_config("llama_gqa", [](auto& json) {
    json.erase("rope_parameters");
    json["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32}};
    json["rope_theta"] = 5000.0;
  });
  const AttentionConfig attention = read_hf_config(text, "config.json").config.attention;
  EXPECT_EQ(attention.rope_scaling.kind, RopeScalingKind::kYarn);
  EXPECT_EQ(attention.rope_scaling.factor, 4.0);
  EXPECT_EQ(attention.rope_scaling.original_max_positions, 32);
  EXPECT_EQ(attention.rope_theta, 5000.0);
}

TEST(HfConfig, ExpertsInBothSpellingsOfKimi) {
  const std::string first = changed_config("kimi_linear_moe", [](auto& json) {
    json.erase("mlp_layer_types");
    json["first_k_dense_replace"] = 1;
    json["moe_layer_freq"] = 1;
  });
  const MoeConfig a = read_hf_config(first, "config.json").config.moe,
                  b = read_hf_config(read_file(golden("kimi_linear_moe") + "/config.json"), "config.json").config.moe;
  EXPECT_EQ(a.dense_layers, b.dense_layers);
  EXPECT_EQ(a.num_experts, 8);
  EXPECT_EQ(b.shared_intermediate_size, 48);
  EXPECT_EQ(b.routed_scaling_factor, 2.446);
  EXPECT_EQ(read_hf_config(read_file(golden("kimi_linear_dense") + "/config.json"), "c").config.moe.num_experts, 0);
}

TEST(HfConfig, UnknownRoutersAreRefused) {
  const std::string softmax =
      changed_config("kimi_linear_moe", [](auto& json) { json["moe_router_activation_func"] = "softmax"; });
  EXPECT_NE(error_of([&] { read_hf_config(softmax, "config.json"); }).find("moe_router_activation_func"),
            std::string::npos);
  const std::string method = changed_config("deepseek_v3_moe", [](auto& json) { json["topk_method"] = "greedy"; });
  EXPECT_NE(error_of([&] { read_hf_config(method, "config.json"); }).find("topk_method"), std::string::npos);
}

TEST(HfConfig, AbsentFieldsHaveTheValuesOfThePublicLibrary) {
  const std::string qwen = changed_config("qwen3_next_dense", [](auto& json) {
    json.erase("partial_rotary_factor");
    json.erase("rope_parameters");
  });
  EXPECT_EQ(read_hf_config(qwen, "config.json").config.attention.rope_dim, 8);  // a quarter of 32
  const std::string kimi = changed_config("kimi_linear_moe", [](auto& json) {
    json.erase("mlp_layer_types");
    json.erase("routed_scaling_factor");
  });
  const MoeConfig moe = read_hf_config(kimi, "config.json").config.moe;
  EXPECT_EQ(moe.dense_layers, std::vector<int64_t>{0});
  EXPECT_EQ(moe.routed_scaling_factor, 2.446);
  const std::string deepseek = changed_config("deepseek_v3_moe", [](auto& json) {
    for (const char* key : {"n_group", "topk_group", "routed_scaling_factor"}) json.erase(key);
    json["n_routed_experts"] = 16;
  });
  const MoeConfig groups = read_hf_config(deepseek, "config.json").config.moe;
  EXPECT_EQ(groups.num_groups, 8);
  EXPECT_EQ(groups.top_groups, 4);
  EXPECT_EQ(groups.routed_scaling_factor, 2.5);
}

TEST(HfConfig, WhatCannotBeComputedIsRefusedByFile) {
  const std::tuple<const char*, const char*, nlohmann::json, const char*> kCases[] = {
      {"kimi_linear_dense", "linear_conv_kernel_dim", 6, "linear_conv_kernel_dim = 6: must be from 1 to 4"},
      {"kimi_linear_dense", "linear_head_dim", 512, "model.kda.head_dim is 512, must be at most 256"},
      {"llama_gqa", "quantization_config", {{"quant_method", "fp8"}}, "quantization_config = "},
      {"qwen3_next_dense",
       "rope_parameters",
       {{"partial_rotary_factor", 1e300}},
       "rope_parameters.partial_rotary_factor = 1e+300: must be above 0"},
      {"llama_gqa", "partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5: must be 1"},
      {"llama_gqa", "attention_bias", true, "attention_bias = true: biases are not supported"},
      {"mla_rope_dense", "num_key_value_heads", 1, "num_key_value_heads = 1: must equal num_attention_heads"}};
  for (const auto& [model, key, value, expected] : kCases) {
    const std::string text = changed_config(model, [&, key = key, value = value](auto& json) { json[key] = value; });
    const std::string error = error_of([&] { read_hf_config(text, "config.json"); });
    EXPECT_TRUE(error.starts_with(std::string("config.json: ") + expected)) << error;
  }
}

// ---- tensors and tokenizers -----------------------------------------------------------------------------------------

// A golden model with one tensor more, of three zeros unless its values are given.
void write_with_tensor(const std::string& name, const std::string& tensor, const std::string& directory,
                       std::span<const std::byte> values = {}, const std::vector<int64_t>& shape = {}) {
  create_directories(directory);
  write_file(directory + "/config.json", read_file(golden(name) + "/config.json"));
  const SafetensorsFile source(golden(name) + "/model.safetensors");
  std::vector<NamedSafeTensor> tensors;
  for (const auto& [key, value] : source.tensors()) tensors.push_back({key, value});
  const std::vector<std::byte> zeros(12);
  if (values.empty()) {
    tensors.push_back({tensor, {SafeDType::kF32, {3}, zeros}});
  } else {
    tensors.push_back({tensor, {SafeDType::kF32, shape, values}});
  }
  write_safetensors(directory + "/model.safetensors", tensors, {});
}

TEST(HfImport, ATensorThatAddsToTheModelOrStandsInTheWrongPlaceIsRefused) {
  const std::pair<const char*, const char*> kCases[] = {
      {"llama_gqa", "model.layers.1.self_attn.q_proj.bias"},
      {"llama_gqa", "model.layers.0.mlp.up_proj.lora_A.weight"},
      {"llama_gqa", "model.layers.0.mlp.up_proj.weight_scale_inv"},
      {"llama_gqa", "lm_head.bias"},
      {"kimi_linear_dense", "model.layers.3.self_attn.A_log"},                      // a layer of another kind
      {"kimi_linear_moe", "model.layers.1.block_sparse_moe.experts.8.w1.weight"},   // an expert too many
      {"kimi_linear_moe", "model.layers.0.block_sparse_moe.experts.0.w1.weight"}};  // experts in a dense layer
  for (const auto& [model, tensor] : kCases) {
    const TempDirectory root;
    write_with_tensor(model, tensor, root / "model");
    const std::string error = error_of([&] { import_hf(root / "model", root / "out", "test"); });
    EXPECT_NE(error.find(std::string("tensor '") + tensor + "' has no place in the model"), std::string::npos)
        << tensor << ": " << error;
    EXPECT_FALSE(path_exists(root / "out"));
  }
}

TEST(HfImport, AnyOtherTensorIsNamedKeptAndGivenBack) {
  for (const char* tensor : {"model.layers.1.foo.weight", "model.layers.1.self_attn.rotary_emb.inv_freq",
                             "model.layers.2.self_attn.q_proj.weight", "mtp.fc.weight", "model.vision.weight"}) {
    const TempDirectory root;
    write_with_tensor("llama_gqa", tensor, root / "model");
    const std::vector<std::string> notices = import_hf(root / "model", root / "out", "test");
    ASSERT_EQ(notices.size(), 2u) << tensor;  // and one on the missing tokenizer
    EXPECT_NE(notices[0].find(tensor), std::string::npos) << notices[0];
    const bool inside = std::string(tensor).starts_with("model.layers.1.");
    EXPECT_EQ(notices[0].starts_with("tensors in the model's layers"), inside) << notices[0];
    EXPECT_NE(error_of([&] { import_hf(root / "model", root / "out", "test"); }).find("already exists"),
              std::string::npos);
    export_hf(root / "out", root / "back", {});
    EXPECT_EQ(read_file((root / "back") + "/model.safetensors"), read_file((root / "model") + "/model.safetensors"));
    export_hf(root / "out", root / "dropped", {.drop_unknown = true});
    expect_equal_tensors(root / "dropped", golden("llama_gqa"));
  }
}

TEST(HfImport, PrefersTheTokenizerThatThePublicLibraryTakesAndKeepsIt) {
  const TempDirectory root;
  write_with_tensor("llama_gqa", "mtp.fc.weight", root / "model");
  for (const char* name : {"tokenizer.model", "tokenizer.json"}) {
    write_file((root / "model") + "/" + name, "{}");
    const std::string out = (root / "out_") + name;
    EXPECT_EQ(import_hf(root / "model", out, "test").size(), 1u);
    const Config config = load_config(out + "/config.yaml");
    EXPECT_EQ(config.data.tokenizer, out + "/hf/" + name);
    EXPECT_EQ(config.run.dir, std::string("runs/out_") + name);
    EXPECT_TRUE(path_exists(config.data.tokenizer));
  }
}

TEST(HfImport, AHeadWithValuesOfItsOwnIsOneWhateverTheConfigSays) {
  const SafetensorsFile llama(golden("llama_llama3") + "/model.safetensors");  // tied
  const SafeTensor& embedding = llama.tensors().at("model.embed_tokens.weight");
  const std::vector<std::byte> zeros(embedding.bytes.size());
  for (const bool own : {false, true}) {
    const TempDirectory root;
    write_with_tensor("llama_llama3", "lm_head.weight", root / "model", own ? zeros : embedding.bytes, embedding.shape);
    EXPECT_EQ(HfFolder(root / "model").model.config.tie_embeddings, !own);
    EXPECT_EQ(import_hf(root / "model", root / "out", "test").size(), 1u);
    export_hf(root / "out", root / "back", {});
    EXPECT_EQ(read_file((root / "back") + "/model.safetensors"), read_file((root / "model") + "/model.safetensors"));
  }
  // The public Kimi Linear never ties.
  const TempDirectory root;
  create_directories(root / "kimi");
  write_file((root / "kimi") + "/config.json",
             changed_config("kimi_linear_dense", [](auto& json) { json["tie_word_embeddings"] = true; }));
  write_file((root / "kimi") + "/model.safetensors", read_file(golden("kimi_linear_dense") + "/model.safetensors"));
  EXPECT_FALSE(HfFolder(root / "kimi").model.config.tie_embeddings);
}

TEST(HfImport, ATiedHeadMayBeWhatTheFilesHold) {
  const TempDirectory root;
  create_directories(root / "model");
  write_file((root / "model") + "/config.json", read_file(golden("llama_llama3") + "/config.json"));
  const SafetensorsFile source(golden("llama_llama3") + "/model.safetensors");
  std::vector<NamedSafeTensor> tensors;
  for (const auto& [name, tensor] : source.tensors())
    tensors.push_back({name == "model.embed_tokens.weight" ? "lm_head.weight" : name, tensor});
  write_safetensors((root / "model") + "/model.safetensors", tensors, {});
  import_hf(root / "model", root / "out", "test");
  export_hf(root / "out", root / "back", {});
  expect_equal_tensors(root / "back", root / "model");
}

}  // namespace
}  // namespace palimpsest
