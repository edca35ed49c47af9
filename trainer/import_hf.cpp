#include "trainer/import_hf.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>
#include <utility>

#include "data/file_ops.h"
#include "kernels/check.h"
#include "model/language_model.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_writer.h"
#include "trainer/config.h"
#include "trainer/hf_folder.h"

namespace palimpsest {

namespace {

// Of several that a folder may hold, the public library takes tokenizer.json, which knows the added tokens too.
constexpr std::array kTokenizers = {"tokenizer.json", "tokenizer.model", "tiktoken.model"};

}  // namespace

std::vector<std::string> import_hf(const std::string& directory, const std::string& out, const std::string& program,
                                   const std::function<void(int64_t bytes)>& progress) {
  const std::string folder = out.substr(0, out.find_last_not_of('/') + 1);  // "out/" is "out"
  if (path_exists(folder)) throw_user_error(folder, ": already exists; import writes a new folder");
  const HfFolder source(directory);
  ParameterRegistry registry;
  const LanguageModel language_model(source.model.config, registry);
  const HfWeights weights(source.tensors, source.model, registry);

  const auto* const tokenizer = std::find_if(kTokenizers.begin(), kTokenizers.end(),
                                             [&](const char* name) { return path_exists(directory + "/" + name); });
  Config config;
  config.run.dir = "runs/" + std::filesystem::path(folder).filename().string();
  config.model = source.model.config;
  config.data.tokenizer =
      folder + "/" + kKeptFolder + "/" + (tokenizer != kTokenizers.end() ? *tokenizer : kTokenizers[0]);
  const std::string yaml = to_yaml(config);
  CheckpointHeader header;
  header.config = yaml;
  header.program = program;
  std::vector<std::string> notices = write_checkpoint(folder, header, [&](RankFileWriter& file) {
    std::vector<float> buffer;
    for (const Parameter& parameter : registry.parameters()) {
      const ParameterSpec& spec = parameter.spec;
      int64_t next = 0;  // pieces come in the order of memory
      file.add("model/" + spec.name, spec.shape, whole_region(spec.shape), DType::kF32, [&](const Region& piece) {
        buffer.resize(static_cast<size_t>(piece.shape.numel()));
        weights.read(spec.name, next, buffer);
        next += piece.shape.numel();
        const auto bytes = std::as_bytes(std::span(buffer));
        if (progress) progress(static_cast<int64_t>(bytes.size()));
        return bytes;
      });
    }
    // Before the manifest makes it a checkpoint.
    const std::string partial = folder + std::string(kPartialSuffix);
    keep_hf_files(source, weights.unknown(), partial + "/" + kKeptFolder);
    write_file_atomically(partial + "/config.yaml", yaml);
  });
  for (std::string& notice : weights.notices()) notices.push_back(std::move(notice));
  if (tokenizer == kTokenizers.end())
    notices.push_back(directory +
                      " holds none of tokenizer.json, tokenizer.model and tiktoken.model: set data.tokenizer");
  return notices;
}

}  // namespace palimpsest
