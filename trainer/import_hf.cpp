#include "trainer/import_hf.h"

#include "data/file_ops.h"
#include "data/safetensors.h"
#include "kernels/arena.h"
#include "kernels/check.h"
#include "model/language_model.h"
#include "trainer/checkpoint_writer.h"
#include "trainer/config.h"
#include "trainer/hf_model.h"
#include "trainer/hf_weights.h"

namespace palimpsest {

void import_hf(const std::string& directory, const std::string& out, const std::string& program) {
  if (path_exists(out)) throw_user_error(out, ": already exists; import writes a new folder");
  const std::string config_file = directory + "/config.json";
  const HfModel model = read_hf_config(read_whole_file(config_file), config_file);
  const SafetensorsFolder folder(directory);

  ParameterRegistry registry;
  const LanguageModel language_model(model.config, registry);
  Arena none = Arena::planning("none", Device::kCpu);
  Arena counted = Arena::planning("parameters", Device::kCpu);
  registry.bind(DType::kF32, ParameterUse::kInference, counted, none, none);
  Arena parameters("parameters", Device::kCpu, counted.peak());
  registry.bind(DType::kF32, ParameterUse::kInference, parameters, none, none);
  load_hf_weights(folder, model, registry);

  Config config;
  config.run.dir = "runs/imported";
  config.model = model.config;
  config.data.tokenizer = directory + "/tokenizer.model";
  const std::string yaml = to_yaml(config);
  CheckpointHeader header;
  header.config = yaml;
  header.program = program;
  write_checkpoint(out, header, owned_blocks(registry, CheckpointContent::kWeights));
  write_file_atomically(out + "/config.yaml", yaml);
}

}  // namespace palimpsest
