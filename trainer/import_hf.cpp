#include "trainer/import_hf.h"

#include <span>

#include "data/file_ops.h"
#include "kernels/check.h"
#include "model/language_model.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_writer.h"
#include "trainer/hf_folder.h"

namespace palimpsest {

Config config_of(const HfModel& model, const std::string& directory) {
  Config config;
  config.run.dir = "runs/imported";
  config.model = model.config;
  config.data.tokenizer = directory + "/tokenizer.model";
  for (const char* name : {"tokenizer.model", "tokenizer.json", "tiktoken.model"}) {
    if (!path_exists(directory + "/" + name)) continue;
    config.data.tokenizer = directory + "/" + name;
    break;
  }
  return config;
}

std::vector<std::string> import_hf(const std::string& directory, const std::string& out, const std::string& program,
                                   const std::function<void(int64_t bytes)>& progress) {
  const std::string folder = out.substr(0, out.find_last_not_of('/') + 1);  // "out/" is "out"
  if (path_exists(folder)) throw_user_error(folder, ": already exists; import writes a new folder");
  const HfFolder source(directory);
  ParameterRegistry registry;
  const LanguageModel language_model(source.model.config, registry);
  const HfWeights weights(source.tensors, source.model, registry);

  const std::string yaml = to_yaml(config_of(source.model, directory));
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
  for (const std::string& name : weights.unknown())
    notices.push_back("tensor '" + name + "' has no meaning here; it is kept for export");
  return notices;
}

}  // namespace palimpsest
