// `palimpsest checkpoint merge IN OUT`: a checkpoint of any layout as that of one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace palimpsest {

// Writes the folder `out`, which must not exist, as one rank would have saved the same tensors. Every checksum of `in`
// is checked first. Memory holds a few pieces of at most 4 MiB, however large the checkpoint. `progress` is told the
// bytes of each piece that was written. Returns warnings, a line each. Throws a UserError, CheckpointDamage where `in`
// is damaged, and then leaves nothing at `out`.
std::vector<std::string> merge_checkpoint(const std::string& in, const std::string& out,
                                          const std::function<void(int64_t bytes)>& progress = {});

}  // namespace palimpsest
