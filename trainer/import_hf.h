// `palimpsest import hf DIR OUT`: a public model becomes a checkpoint that train, eval, score and generate take as
// from=OUT, and that `export hf` turns back.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace palimpsest {

// Reads DIR/config.json and its safetensors and writes the checkpoint folder OUT, which must not exist, with a
// config.yaml beside the tensors whose model section describes the model, and what export needs (trainer/hf_folder.h),
// the tokenizer among it.
// Weights go piece by piece from the mapped files into the checkpoint: the model need not fit into memory. `program` is
// the version that writes; `progress` is told the bytes written. Returns notices, a line each. Throws a UserError that
// names file and field or tensor; nothing half-written stays.
std::vector<std::string> import_hf(const std::string& directory, const std::string& out, const std::string& program,
                                   const std::function<void(int64_t bytes)>& progress = {});

}  // namespace palimpsest
