// Which GPU each rank takes: the one of its number among the ranks of its host, of those that the process may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/gpu_links.h"

namespace palimpsest {

struct GpuPlace {
  std::string host;
  std::string gpu;      // its address on the host's bus
  int64_t visible = 0;  // GPUs that the rank may use
};

// Throws a UserError when two ranks would share a GPU, which NCCL refuses: names the host, its ranks and its GPUs.
void check_one_gpu_each(const std::vector<GpuPlace>& ranks);

// Makes this rank's GPU the current one, and returns its address on the bus. Every rank of `world` calls it; throws on
// all of them when a rank has no GPU or, unless they may share them, not one for itself.
std::string take_gpu(Communicator& world, int64_t local_rank, const GpuLinks& links);

}  // namespace palimpsest
