// The folder of a public model, and what of it is kept beside a checkpoint so that it can be written back: the folder
// "hf" with config.json as it was, the header of every safetensors file (names, dtypes, shapes, order), the index, the
// tensors without a meaning here, and every other file (tokenizer, licence).
#pragma once

#include <optional>
#include <string>

#include "data/safetensors.h"
#include "trainer/hf_model.h"
#include "trainer/hf_weights.h"

namespace palimpsest {

inline constexpr const char* kKeptFolder = "hf";
inline constexpr const char* kUnknownTensors = "unknown.safetensors";
inline constexpr const char* kHeaderSuffix = ".header";

// Whether this is a public model's folder: config.json and safetensors.
bool is_hf_folder(const std::string& path);

// A public model's folder, opened: config read, headers checked. Where the config ties the head but the files hold one
// with values of its own, the files are right, as in the public library; its Kimi Linear never ties a head that is
// there.
struct HfFolder {
  explicit HfFolder(const std::string& directory);
  HfModel model;
  SafetensorsFolder tensors;
};

// Writes the folder `to` with what is kept of the public model `from`.
void keep_hf_files(const HfFolder& from, const std::vector<std::string>& unknown, const std::string& to);
// Copies such a folder, from beside one checkpoint or run to another's.
void copy_kept_files(const std::string& from, const std::string& to);
// Where it stands for a checkpoint's folder: inside it, or in its run's. None for models that were born here.
std::optional<std::string> find_kept_files(const std::string& checkpoint);

}  // namespace palimpsest
