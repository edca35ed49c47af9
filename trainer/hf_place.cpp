// Where parameters lie in the files of each public family.
#include <optional>
#include <string_view>

#include "trainer/hf_model.h"

namespace palimpsest {

namespace {

// Row ranges of one part of Qwen3-Next's packed projections: the public rows go in blocks, one a key head.
std::vector<RowRange> blocked_rows(int64_t num_blocks, int64_t block_rows, int64_t offset, int64_t count) {
  std::vector<RowRange> rows;
  for (int64_t block = 0; block < num_blocks; ++block) rows.push_back({block * block_rows + offset, count});
  return rows;
}

// Places of Gated DeltaNet and gated attention parameters of Qwen3-Next; the field stays empty for all others.
std::optional<HfPlace> qwen_packed_place(const ModelConfig& config, const std::string& prefix,
                                         const std::string& leaf) {
  const GdnConfig& gdn = config.gdn;
  const int64_t D = config.hidden_size, H = gdn.num_heads, HV = gdn.num_value_heads.value_or(H), r = HV / H;
  const int64_t K = gdn.head_dim, V = gdn.value_head_dim.value_or(K);
  // in_proj_qkvz: per key head q K, k K, v r*V, z r*V rows. in_proj_ba: per key head b r, a r rows.
  const int64_t qkvz_block = 2 * K + 2 * r * V;
  const auto qkvz = [&](int64_t offset, int64_t count) {
    return HfPlace{.names = {prefix + "in_proj_qkvz.weight"},
                   .shape = {H * qkvz_block, D},
                   .rows = blocked_rows(H, qkvz_block, offset, count)};
  };
  const auto ba = [&](int64_t offset) {
    return HfPlace{
        .names = {prefix + "in_proj_ba.weight"}, .shape = {2 * HV, D}, .rows = blocked_rows(H, 2 * r, offset, r)};
  };
  const auto conv = [&](int64_t start, int64_t count) {
    return HfPlace{
        .names = {prefix + "conv1d.weight"}, .shape = {2 * H * K + HV * V, 1, gdn.conv_size}, .rows = {{start, count}}};
  };
  if (leaf == "q_proj.weight") return qkvz(0, K);
  if (leaf == "k_proj.weight") return qkvz(K, K);
  if (leaf == "v_proj.weight") return qkvz(2 * K, r * V);
  if (leaf == "z_proj.weight") return qkvz(2 * K + r * V, r * V);
  if (leaf == "b_proj.weight") return ba(0);
  if (leaf == "a_proj.weight") return ba(r);
  if (leaf == "q_conv1d.weight") return conv(0, H * K);
  if (leaf == "k_conv1d.weight") return conv(H * K, H * K);
  if (leaf == "v_conv1d.weight") return conv(2 * H * K, HV * V);
  return std::nullopt;
}

// The rest of `name` behind `marker`, when it is there.
std::optional<std::string> after(const std::string& name, const std::string& marker) {
  const size_t at = name.find(marker);
  if (at == std::string::npos) return std::nullopt;
  return name.substr(at + marker.size());
}

void replace_in(std::string& name, std::string_view part, std::string_view by) {
  const size_t at = name.find(part);
  if (at != std::string::npos) name.replace(at, part.size(), by);
}

// Layers with experts: block_sparse_moe.*, an expert's matrices being w1 (gate), w2 (down), w3 (up). Dense ones: mlp.*,
// or block_sparse_moe.* where the public library wrote them.
std::vector<std::string> kimi_feed_forward_names(const std::string& name) {
  std::string sparse = name;
  replace_in(sparse, ".mlp.", ".block_sparse_moe.");
  const std::string leaf = *after(name, ".mlp.");
  if (leaf.starts_with("experts.")) {
    replace_in(sparse, "gate_proj", "w1");
    replace_in(sparse, "down_proj", "w2");
    replace_in(sparse, "up_proj", "w3");
  }
  const bool dense = leaf.find('.') == leaf.rfind('.') && leaf.find("_proj.") != std::string::npos;
  if (dense) return {name, sparse};
  return {sparse};
}

}  // namespace

HfPlace hf_place(const HfModel& model, const ParameterSpec& parameter) {
  const std::string& name = parameter.name;
  const int64_t num_rows = parameter.shape[0];
  if (model.family == HfFamily::kQwen3Next) {
    if (const auto leaf = after(name, "linear_attn."))
      if (auto place = qwen_packed_place(model.config, name.substr(0, name.size() - leaf->size()), *leaf))
        return *place;
    // The query projection holds, per head, the query's rows and then the gate's.
    const auto leaf = after(name, "self_attn.");
    if (leaf == "q_proj.weight" || leaf == "g_proj.weight") {
      const int64_t H = model.config.attention.num_heads, d = model.config.attention.head_dim;
      return {.names = {name.substr(0, name.size() - leaf->size()) + "q_proj.weight"},
              .shape = {2 * H * d, model.config.hidden_size},
              .rows = blocked_rows(H, 2 * d, leaf == "g_proj.weight" ? d : 0, d)};
    }
  }
  HfPlace place{.names = {name}, .shape = parameter.shape, .rows = {{0, num_rows}}};
  if (model.config.tie_embeddings && name == "model.embed_tokens.weight") place.names.emplace_back("lm_head.weight");
  if (model.family == HfFamily::kQwen3Next) replace_in(place.names[0], ".shared_experts.", ".shared_expert.");
  if (model.family == HfFamily::kKimiLinear) {
    if (name.ends_with(".A_log"))
      place = {.names = {name}, .shape = {1, 1, num_rows, 1}, .any_shape = true, .rows = {{0, 1}}};
    if (after(name, ".mlp.")) place.names = kimi_feed_forward_names(name);
  }
  return place;
}

}  // namespace palimpsest
