// What `palimpsest inspect CHECKPOINT` prints.
#pragma once

#include <string>
#include <vector>

namespace palimpsest {

struct CheckpointReport {
  std::string text;  // where the run stood, layout, config, every tensor with its norms, result of the verification
  std::vector<std::string> damage;  // a line each; empty when every checksum of the checkpoint matches
};
// Reads the whole checkpoint. Throws a UserError when its manifest or one of its files is missing or of another size.
CheckpointReport inspect_checkpoint(const std::string& folder);

}  // namespace palimpsest
