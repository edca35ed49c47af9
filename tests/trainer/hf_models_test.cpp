// Public models in and out: round trips, what is kept, models that were born here, memory, training from them.
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "data/shards.h"
#include "model/mixers.h"
#include "tests/support/moe_config.h"
#include "tests/support/program.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"
#include "tests/support/training.h"
#include "tests/trainer/hf_fixture.h"
#include "trainer/checkpoint_merge.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/checkpoint_writer.h"
#include "trainer/export_hf.h"
#include "trainer/hf_config_writer.h"
#include "trainer/hf_folder.h"
#include "trainer/import_hf.h"
#include "trainer/memory_plan.h"
#include "trainer/trainer.h"

namespace palimpsest {
namespace {

using hf_test::changed_config;
using hf_test::error_of;
using hf_test::expect_equal_tensors;
using hf_test::golden;
using support::read_file;
using support::TempDirectory;
using support::write_file;

// A golden model with its weights in another type, a next-token head, a tokenizer, in two files.
void write_published(const std::string& name, SafeDType dtype, const std::string& directory) {
  create_directories(directory);
  write_file(directory + "/config.json", read_file(golden(name) + "/config.json"));
  write_file(directory + "/tokenizer.model", "pieces");
  write_file(directory + "/generation_config.json", "{}");
  const SafetensorsFile source(golden(name) + "/model.safetensors");
  std::vector<std::vector<std::byte>> bytes;
  std::vector<NamedSafeTensor> files[2];
  nlohmann::json weight_map;
  const char* names[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
  size_t count = 0;
  for (const auto& [tensor_name, tensor] : source.tensors()) {
    std::vector<float> values(static_cast<size_t>(tensor.numel()));
    read_as_f32(tensor, 0, values, tensor_name);
    // As the published files: single numbers in f32, matrices narrow.
    const bool small = tensor_name.ends_with("A_log") || tensor_name.ends_with("dt_bias");
    const SafeDType stored = small ? SafeDType::kF32 : dtype;
    bytes.push_back(to_elements(values, stored));
    const size_t file = count++ % 2;
    files[file].push_back({tensor_name, {stored, tensor.shape, bytes.back()}});
    weight_map[tensor_name] = names[file];
  }
  bytes.push_back(to_elements(std::vector<float>{1.5f, -2.25f, 0.0f}, dtype));
  files[1].push_back({"mtp.fc.weight", {dtype, {3, 1}, bytes.back()}});
  weight_map["mtp.fc.weight"] = names[1];
  for (size_t file = 0; file < 2; ++file)
    write_safetensors(directory + "/" + names[file], files[file], {{"format", "pt"}});
  write_file(directory + "/model.safetensors.index.json",
             nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", weight_map}}.dump());
}

class HfRoundTrip : public testing::TestWithParam<std::string> {};

TEST_P(HfRoundTrip, GivesEveryFileBack) {
  const TempDirectory root;
  import_hf(golden(GetParam()), root / "checkpoint", "test");
  export_hf(root / "checkpoint", root / "out", {});
  for (const char* name : {"config.json", "model.safetensors"})
    EXPECT_EQ(read_file((root / "out") + "/" + name), read_file(golden(GetParam()) + "/" + name)) << name;
}

INSTANTIATE_TEST_SUITE_P(Models, HfRoundTrip,
                         testing::Values("kimi_linear_dense", "kimi_linear_moe", "deepseek_v3_moe", "deepseek_v3_tied",
                                         "qwen3_next_dense", "qwen3_next_moe", "llama_gqa", "llama_llama3"),
                         [](const auto& info) { return info.param; });

TEST(HfExport, KeepsTypesShardsOtherFilesAndTensorsWithoutAMeaning) {
  for (const SafeDType dtype : {SafeDType::kBF16, SafeDType::kF16}) {
    const TempDirectory root;
    write_published("qwen3_next_moe", dtype, root / "published");
    const std::vector<std::string> notices = import_hf(root / "published", root / "checkpoint", "test");
    ASSERT_EQ(notices.size(), 1u);
    EXPECT_NE(notices[0].find("mtp.fc.weight"), std::string::npos);
    export_hf(root / "checkpoint", root / "out", {});
    EXPECT_EQ(list_directory(root / "out"), list_directory(root / "published"));
    for (const std::string& name : list_directory(root / "published"))
      EXPECT_EQ(read_file((root / "out") + "/" + name), read_file((root / "published") + "/" + name)) << name;

    export_hf(root / "checkpoint", root / "dropped", {.drop_unknown = true});
    const SafetensorsFolder dropped(root / "dropped");
    EXPECT_EQ(dropped.find("mtp.fc.weight"), nullptr);
    EXPECT_EQ(dropped.names().size() + 1, SafetensorsFolder(root / "published").names().size());
  }
}

TEST(HfExport, OfAMergedCheckpointIsThatOfTheCheckpoint) {
  const TempDirectory root;
  import_hf(golden("llama_gqa"), root / "checkpoint", "test");
  merge_checkpoint(root / "checkpoint", root / "merged");
  export_hf(root / "merged", root / "out", {});
  EXPECT_EQ(read_file((root / "out") + "/model.safetensors"), read_file(golden("llama_gqa") + "/model.safetensors"));
}

TEST(HfExport, OfATrainedModelHasItsWeightsAndItsFiles) {
  const TempDirectory root;
  write_published("kimi_linear_moe", SafeDType::kBF16, root / "published");
  const HfModel model = read_hf_config(read_file(golden("kimi_linear_moe") + "/config.json"), "config.json");
  // Straight from the public folder, and from its import: the same run.
  import_hf(root / "published", root / "imported", "test");
  std::string losses[2];
  for (const int straight : {0, 1}) {
    Config config = support::tiny_run_config(root, straight ? "straight" : "run");
    config.model = model.config;
    config.from = straight ? root / "published" : root / "imported";
    config.train.steps = 2;
    config.data.eval.clear();
    // Ids of the model's vocabulary.
    {
      const std::string folder = (root / "shards257") + std::to_string(straight);
      ShardWriter writer(folder, {.size = 257, .tokenizer = "none", .tokenizer_hash = "0", .bos = 1, .eos = 2});
      for (int document = 0; document < 12; ++document) {
        writer.begin_document();
        std::vector<int32_t> ids;
        for (int32_t i = 0; i < 40; ++i) ids.push_back((7 * document + 3 * i) % 250 + 3);
        writer.append(ids);
        writer.end_document(40);
      }
      writer.finish();
      config.data.train = {{.path = folder}};
    }
    support::RecordedConsole console;
    train(config, Mesh::single(), "test", console);
    for (const nlohmann::json& line : support::results_of(config)) losses[straight] += line.dump() + "\n";
    EXPECT_NE(losses[straight].find("\"experts\":{\"1\":{"), std::string::npos) << losses[straight];
  }
  EXPECT_EQ(losses[0], losses[1]);
  for (const char* run : {"run", "straight"}) {
    const std::string out = (root / "out_of_") + run;
    export_hf(root / run, out, {});
    EXPECT_EQ(list_directory(out), list_directory(root / "published"));
    const SafetensorsFolder a(out), b(root / "published");
    ASSERT_EQ(a.names(), b.names());
    size_t changed = 0;
    for (const std::string& name : b.names()) {
      EXPECT_EQ(a.find(name)->dtype, b.find(name)->dtype) << name;
      EXPECT_EQ(a.find(name)->shape, b.find(name)->shape) << name;
      changed += !std::equal(a.find(name)->bytes.begin(), a.find(name)->bytes.end(), b.find(name)->bytes.begin());
    }
    EXPECT_GT(changed, b.names().size() / 2);
  }
  expect_equal_tensors(root / "out_of_run", root / "out_of_straight");
}

// ---- models that were born here -------------------------------------------------------------------------------------

Config born(const std::string& family) {
  Config config = support::tiny_config(Precision::kF32, {"kda", "mla"});
  config.model.mlp.intermediate_size = 24;
  config.data.tokenizer = "none.model";  // 37 ids are too few for bytes
  if (family == "kimi_linear") {
    config.model.kda.gate_lower_bound.reset();
    config.model.mla.rope = RopeKind::kNone;
    config.model.mla.q_lora_rank.reset();
    config.model.moe = support::sigmoid_moe();
    config.model.moe.shared_intermediate_size = 12;
  } else if (family == "deepseek_v3") {
    config.model.layers = {"mla"};
    config.model.mla.rope_scaling = {.kind = RopeScalingKind::kYarn, .factor = 4, .mscale = 1, .mscale_all_dim = 0.5};
    config.model.moe = support::sigmoid_moe();
    config.model.moe.shared_intermediate_size = 24;
  } else if (family == "qwen3_next") {
    config.model.layers = {"gdn", "attention"};
    config.model.norm = NormWeight::kOneCentred;
    config.model.attention.rope_dim = 4;
    config.model.moe = support::softmax_moe();
  } else {
    config.model.layers = {"attention"};
    config.model.attention.output_gate = config.model.attention.qk_norm = false;
    config.model.attention.rope_scaling = {.kind = RopeScalingKind::kLlama3, .factor = 4};
    config.model.tie_embeddings = true;
  }
  return config;
}

class BornHere : public testing::TestWithParam<std::string> {};

TEST_P(BornHere, GoesOutAsItsFamilyAndComesBackTheSame) {
  const TempDirectory root;
  const Config config = born(GetParam());
  support::TinyRun run(config, 8);
  CheckpointHeader header;
  header.config = to_yaml(config);
  write_checkpoint(root / "checkpoint", header, owned_blocks(run.registry(), CheckpointContent::kWeights));
  EXPECT_EQ(name_of(hf_family_of(config.model)), GetParam());
  export_hf(root / "checkpoint", root / "out", {.shard_bytes = 8000});
  EXPECT_TRUE(path_exists((root / "out") + "/model.safetensors.index.json"));

  // The public library checks types, and takes ids that are left out from the family's own tokenizer.
  const nlohmann::json json = nlohmann::json::parse(read_file((root / "out") + "/config.json"));
  for (const auto& [key, value] : json.items()) {
    const bool is_real = key.ends_with("_factor") || key.ends_with("_coef") || key.ends_with("_eps");
    EXPECT_TRUE(!is_real || value.is_number_float()) << key;
  }
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
    EXPECT_TRUE(json.contains(key) && json.at(key).is_null()) << key;

  const HfFolder folder(root / "out");
  if (const SafeTensor* decay =
          folder.tensors.find("model.layers.0.self_attn.A_log")) {  // of Kimi Linear, as published
    EXPECT_EQ(decay->shape, (std::vector<int64_t>{1, 1, config.model.kda.num_heads, 1}));
  }
  Config back = config;
  back.model = folder.model.config;
  for (const ConfigDifference& difference : differences(config, back)) {
    // Sections that no layer of the family uses stand at their defaults.
    const std::vector<std::string> mixers = mixer_kinds();
    const bool of_mixer = std::any_of(mixers.begin(), mixers.end(), [&](const std::string& kind) {
      return difference.key.starts_with("model." + kind + ".");
    });
    EXPECT_TRUE(of_mixer || !decides_computation(difference.key))
        << difference.key << ": " << difference.before << " became " << difference.after;
  }
  support::TinyRun again(back, 8);
  const HfWeights weights(folder.tensors, folder.model, again.registry());
  EXPECT_TRUE(weights.unknown().empty());
  for (const CheckpointBlock& block : wanted_blocks(again.registry(), CheckpointContent::kWeights)) weights.read(block);
  for (const Parameter& parameter : run.registry().parameters())
    EXPECT_TRUE(support::is_bit_identical(again.parameter(parameter.spec.name).value, parameter.value))
        << parameter.spec.name;
  // The same computation: logits of the two.
  const support::OwnedBatch batch(support::random_documents({8}, 37, 1));
  support::OwnedTensor a(DType::kF32, {8, 37}), b(DType::kF32, {8, 37});
  Context first = run.bench().context(), second = again.bench().context();
  run.bench().model().forward_logits(first, batch.input(), a);
  again.bench().model().forward_logits(second, batch.input(), b);
  EXPECT_TRUE(support::is_bit_identical(a, b));
}

INSTANTIATE_TEST_SUITE_P(Families, BornHere, testing::Values("kimi_linear", "deepseek_v3", "qwen3_next", "llama"),
                         [](const auto& info) { return info.param; });

TEST(HfExport, OfAModelThatNoFamilyHasNamesTheField) {
  Config config = born("kimi_linear");
  config.model.kda.gate_lower_bound = -5;
  EXPECT_NE(error_of([&] { hf_family_of(config.model); }).find("model.kda.gate_lower_bound must be null"),
            std::string::npos);
  config.model.layers = {"retnet"};
  EXPECT_NE(error_of([&] { hf_family_of(config.model); }).find("model.layers"), std::string::npos);
  config = born("qwen3_next");
  config.model.norm = NormWeight::kPlain;
  EXPECT_NE(error_of([&] { hf_family_of(config.model); }).find("model.norm must be one_centred"), std::string::npos);
}

TEST(HfExport, ATiedHeadOfKimiLinearGoesOutAsATensorOfItsOwn) {
  const TempDirectory root;
  Config config = born("kimi_linear");
  config.model.tie_embeddings = true;
  support::TinyRun run(config, 8);
  CheckpointHeader header;
  header.config = to_yaml(config);
  write_checkpoint(root / "checkpoint", header, owned_blocks(run.registry(), CheckpointContent::kWeights));
  export_hf(root / "checkpoint", root / "out", {});
  const HfFolder folder(root / "out");
  EXPECT_FALSE(folder.model.config.tie_embeddings);
  const SafeTensor &head = *folder.tensors.find("lm_head.weight"),
                   &embedding = *folder.tensors.find("model.embed_tokens.weight");
  EXPECT_TRUE(std::equal(head.bytes.begin(), head.bytes.end(), embedding.bytes.begin(), embedding.bytes.end()));
}

TEST(HfExport, OfACheckpointThatIsAnotherModelThanWasImportedIsRefused) {
  const TempDirectory root;
  import_hf(golden("llama_gqa"), root / "checkpoint", "test");
  const std::string config = (root / "checkpoint") + "/hf/config.json";
  write_file(config, changed_config("llama_gqa", [](auto& json) { json["rope_parameters"]["rope_theta"] = 7.0; }));
  const std::string error = error_of([&] { export_hf(root / "checkpoint", root / "out", {}); });
  EXPECT_NE(error.find("model.attention.rope_theta"), std::string::npos) << error;
  EXPECT_FALSE(path_exists(root / "out"));
  EXPECT_FALSE(path_exists(root / "out.partial"));
}

// ---- memory ---------------------------------------------------------------------------------------------------------

TEST(HfImport, AndExportNeedLittleMemoryBesideTheModel) {
  if (support::kSanitized) GTEST_SKIP() << "a sanitizer has memory of its own";
  const TempDirectory root;
  create_directories(root / "model");
  write_file((root / "model") + "/config.json", changed_config("llama_gqa", [](auto& json) {
               json["vocab_size"] = 100000;
               json["hidden_size"] = 256;
               json["num_hidden_layers"] = 1;
             }));
  const HfModel model = read_hf_config(read_file((root / "model") + "/config.json"), "config.json");
  ParameterRegistry registry;
  const LanguageModel language_model(model.config, registry);
  std::vector<SafeEntry> entries;
  for (const Parameter& parameter : registry.parameters()) {
    SafeEntry entry{.name = parameter.spec.name, .dtype = SafeDType::kF32};
    for (int i = 0; i < parameter.spec.shape.num_dims(); ++i) entry.shape.push_back(parameter.spec.shape[i]);
    entries.push_back(entry);
  }
  // Some 200 MB, all zero, so the file takes no room on the disk.
  const std::string header = make_safetensors_header(entries, {});
  int64_t bytes = 0;
  for (const SafeEntry& entry : entries) bytes += entry.bytes;
  const std::string path = (root / "model") + "/model.safetensors";
  {
    std::ofstream file(path, std::ios::binary);
    const uint64_t size = header.size();
    file.write(reinterpret_cast<const char*>(&size), sizeof(size));
    file << header;
    file.seekp(static_cast<std::streamoff>(8 + header.size()) + bytes - 1);
    file.put('\0');
  }
  ASSERT_GT(bytes, int64_t{200} << 20 >> 1);
  const auto grown = [](const std::function<void()>& body) {
    std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts anew
    const int64_t before = current_resident_bytes();
    body();
    return peak_resident_bytes() - before;
  };
  constexpr int64_t kMost = int64_t{48} << 20;
  EXPECT_LT(grown([&] { import_hf(root / "model", root / "checkpoint", "test"); }), kMost);
  EXPECT_LT(grown([&] { export_hf(root / "checkpoint", root / "out", {}); }), kMost);
  EXPECT_EQ(file_size((root / "out") + "/model.safetensors"), file_size(path));
}

}  // namespace
}  // namespace palimpsest
