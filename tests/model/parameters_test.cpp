// The exact parameters of each layer type, by name and shape, and how they start.
#include "model/parameters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "model/language_model.h"
#include "tests/support/tiny_run.h"

namespace palimpsest {
namespace {

using ShapesByName = std::map<std::string, std::string>;

// Parameters of the one layer of such a model, without their prefix.
ShapesByName layer_of(const std::string& kind) {
  ParameterRegistry registry;
  const LanguageModel model(support::tiny_config(Precision::kF32, {kind}).model, registry);
  const std::string prefix = "model.layers.0.";
  ShapesByName shapes;
  for (const Parameter& parameter : registry.parameters())
    if (parameter.spec.name.starts_with(prefix) && parameter.spec.name.find("mlp.") == std::string::npos &&
        parameter.spec.name != prefix + "input_layernorm.weight" &&
        parameter.spec.name != prefix + "post_attention_layernorm.weight")
      shapes[parameter.spec.name.substr(prefix.size())] = parameter.spec.shape.str();
  return shapes;
}

TEST(Parameters, OfAModelOutsideItsMixers) {
  ParameterRegistry registry;
  const LanguageModel model(support::tiny_config(Precision::kF32, {"kda"}).model, registry);
  ShapesByName shapes;
  for (const Parameter& parameter : registry.parameters())
    if (parameter.spec.name.find("self_attn") == std::string::npos)
      shapes[parameter.spec.name] = parameter.spec.shape.str();
  EXPECT_EQ(shapes, (ShapesByName{{"model.embed_tokens.weight", "[37, 20]"},
                                  {"model.layers.0.input_layernorm.weight", "[20]"},
                                  {"model.layers.0.post_attention_layernorm.weight", "[20]"},
                                  {"model.layers.0.mlp.gate_proj.weight", "[28, 20]"},
                                  {"model.layers.0.mlp.up_proj.weight", "[28, 20]"},
                                  {"model.layers.0.mlp.down_proj.weight", "[20, 28]"},
                                  {"model.norm.weight", "[20]"},
                                  {"lm_head.weight", "[37, 20]"}}));
}

TEST(Parameters, OfAKdaLayer) {
  EXPECT_EQ(layer_of("kda"), (ShapesByName{{"self_attn.q_proj.weight", "[16, 20]"},
                                           {"self_attn.k_proj.weight", "[16, 20]"},
                                           {"self_attn.v_proj.weight", "[16, 20]"},
                                           {"self_attn.q_conv1d.weight", "[16, 1, 4]"},
                                           {"self_attn.k_conv1d.weight", "[16, 1, 4]"},
                                           {"self_attn.v_conv1d.weight", "[16, 1, 4]"},
                                           {"self_attn.f_a_proj.weight", "[8, 20]"},
                                           {"self_attn.f_b_proj.weight", "[16, 8]"},
                                           {"self_attn.g_a_proj.weight", "[8, 20]"},
                                           {"self_attn.g_b_proj.weight", "[16, 8]"},
                                           {"self_attn.b_proj.weight", "[2, 20]"},
                                           {"self_attn.A_log", "[2]"},
                                           {"self_attn.dt_bias", "[16]"},
                                           {"self_attn.o_norm.weight", "[8]"},
                                           {"self_attn.o_proj.weight", "[20, 16]"}}));
}

TEST(Parameters, OfAGatedDeltaNetLayer) {
  EXPECT_EQ(layer_of("gdn"), (ShapesByName{{"linear_attn.q_proj.weight", "[6, 20]"},
                                           {"linear_attn.k_proj.weight", "[6, 20]"},
                                           {"linear_attn.v_proj.weight", "[30, 20]"},
                                           {"linear_attn.z_proj.weight", "[30, 20]"},
                                           {"linear_attn.b_proj.weight", "[3, 20]"},
                                           {"linear_attn.a_proj.weight", "[3, 20]"},
                                           {"linear_attn.q_conv1d.weight", "[6, 1, 3]"},
                                           {"linear_attn.k_conv1d.weight", "[6, 1, 3]"},
                                           {"linear_attn.v_conv1d.weight", "[30, 1, 3]"},
                                           {"linear_attn.A_log", "[3]"},
                                           {"linear_attn.dt_bias", "[3]"},
                                           {"linear_attn.norm.weight", "[10]"},
                                           {"linear_attn.out_proj.weight", "[20, 30]"}}));
}

TEST(Parameters, OfARetnetLayer) {
  EXPECT_EQ(layer_of("retnet"), (ShapesByName{{"retention.q_proj.weight", "[18, 20]"},
                                              {"retention.k_proj.weight", "[18, 20]"},
                                              {"retention.v_proj.weight", "[30, 20]"},
                                              {"retention.g_proj.weight", "[30, 20]"},
                                              {"retention.g_norm.weight", "[10]"},
                                              {"retention.o_proj.weight", "[20, 30]"}}));
}

TEST(Parameters, OfAnMlaLayer) {
  EXPECT_EQ(layer_of("mla"), (ShapesByName{{"self_attn.q_a_proj.weight", "[9, 20]"},
                                           {"self_attn.q_a_layernorm.weight", "[9]"},
                                           {"self_attn.q_b_proj.weight", "[27, 9]"},
                                           {"self_attn.kv_a_proj_with_mqa.weight", "[11, 20]"},
                                           {"self_attn.kv_a_layernorm.weight", "[7]"},
                                           {"self_attn.kv_b_proj.weight", "[33, 7]"},
                                           {"self_attn.o_proj.weight", "[20, 18]"}}));
}

TEST(Parameters, OfASoftmaxAttentionLayer) {
  EXPECT_EQ(layer_of("attention"), (ShapesByName{{"self_attn.q_proj.weight", "[24, 20]"},
                                                 {"self_attn.k_proj.weight", "[12, 20]"},
                                                 {"self_attn.v_proj.weight", "[12, 20]"},
                                                 {"self_attn.g_proj.weight", "[24, 20]"},
                                                 {"self_attn.q_norm.weight", "[6]"},
                                                 {"self_attn.k_norm.weight", "[6]"},
                                                 {"self_attn.o_proj.weight", "[20, 24]"}}));
}

TEST(InitialValues, OfDecayParametersAreFiniteAndNoHeadIsDead) {
  for (const Init init : {Init::kLogUniform1To16, Init::kLogUniform0To16, Init::kDtBias}) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      for (int64_t head = 0; head < 100000; ++head) {
        const double value =
            initial_value({.name = "layer.parameter", .shape = {100000}, .init = init}, seed, head, 0.02);
        ASSERT_TRUE(std::isfinite(value)) << head;
        const bool is_log_decay = init != Init::kDtBias;
        ASSERT_TRUE(!is_log_decay || static_cast<float>(std::exp(value)) >= 0.01f) << head;
      }
    }
  }
}

TEST(InitialValues, DependOnSeedNameAndIndexAlone) {
  const ParameterSpec a = {.name = "a", .shape = {7}}, b = {.name = "b", .shape = {7}};
  EXPECT_EQ(initial_value(a, 1, 3, 0.02), initial_value(a, 1, 3, 0.02));
  EXPECT_NE(initial_value(a, 1, 3, 0.02), initial_value(a, 2, 3, 0.02));
  EXPECT_NE(initial_value(a, 1, 3, 0.02), initial_value(b, 1, 3, 0.02));
  EXPECT_NE(initial_value(a, 1, 3, 0.02), initial_value(a, 1, 4, 0.02));
}

}  // namespace
}  // namespace palimpsest
