// `palimpsest export hf CHECKPOINT DIR`: a checkpoint as a folder of the public library.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace palimpsest {

struct ExportOptions {
  bool drop_unknown = false;               // leave out tensors without a meaning here
  int64_t shard_bytes = int64_t{5} << 30;  // most bytes of one file, for models that were born here
};

// Writes the folder `out`, which must not exist, from a checkpoint or the newest one of a run. An imported model comes
// back with its config.json, its files and every tensor in the name, place, dtype and shape that it came with; one that
// was born here in the names of the family that computes the same, in f32. Weights go piece by piece from the
// checkpoint into the files. `progress` is told the bytes written. Returns notices, a line each. Throws a UserError
// where no public family has the model; nothing half-written stays.
std::vector<std::string> export_hf(const std::string& checkpoint, const std::string& out, const ExportOptions& options,
                                   const std::function<void(int64_t bytes)>& progress = {});

}  // namespace palimpsest
