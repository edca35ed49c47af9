// Weights of a public model, wherever they are wanted: in a registry, or piece by piece on the way into a checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "model/parameters.h"
#include "trainer/checkpoint_block.h"
#include "trainer/hf_model.h"

namespace palimpsest {

// Elements [first, first + out.size()) of a parameter, in its own order, from the public tensor that it lies in.
// `where` stands in messages.
void read_hf_elements(const SafeTensor& tensor, const HfPlace& place, int64_t first, std::span<float> out,
                      const std::string& where);

// Names for a message: "a, b and 7 more".
std::string list_text(const std::vector<std::string>& names);

class HfWeights {
 public:
  // Finds every parameter of the registry in the folder, which must outlive this. Throws a UserError that names a
  // missing or wrongly shaped tensor, or one that the config has no place for though it is of a kind that the model
  // has (an expert too many) or adds to what one of its tensors does (a bias).
  HfWeights(const SafetensorsFolder& folder, const HfModel& model, const ParameterRegistry& registry);

  // Elements of a parameter. Nothing of the file stays in memory.
  void read(const std::string& parameter, int64_t first, std::span<float> out) const;
  // Fills a block "model/<parameter>", f32 or f64, in host memory or on a GPU.
  void read(const CheckpointBlock& block) const;

  // Tensors without a meaning here, such as those of a next-token head: kept for the way back.
  const std::vector<std::string>& unknown() const { return unknown_; }
  // What a user should know of them: a line on those inside the model's layers, one on the others.
  std::vector<std::string> notices() const;

 private:
  struct Source {
    const SafeTensor* tensor;
    HfPlace place;
    std::string where;
  };
  const Source& source_of(const std::string& parameter) const;

  const SafetensorsFolder& folder_;
  std::map<std::string, Source> sources_;  // by parameter
  std::vector<std::string> unknown_;
  int64_t num_layers_;
};

}  // namespace palimpsest
