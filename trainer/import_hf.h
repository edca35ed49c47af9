// `palimpsest import hf DIR OUT`: a public model becomes a checkpoint that train, eval, score and generate take as
// from=OUT.
#pragma once

#include <string>

namespace palimpsest {

// Reads DIR/config.json and its safetensors and writes the checkpoint folder OUT, which must not exist, with a
// config.yaml beside the tensors whose model section describes the model. `program` is the version that writes. Throws
// a UserError that names file and field or tensor; nothing half-written stays.
void import_hf(const std::string& directory, const std::string& out, const std::string& program);

}  // namespace palimpsest
