// How the ranks' GPUs are used and linked, where the environment says something of it: for tests, so that a layout can
// be tried on fewer GPUs than it has ranks, and every way in which they talk with small models.
#pragma once

#include <cstdint>

namespace palimpsest {

struct GpuLinks {
  bool share_gpus = false;  // ranks may share a GPU, which is slow. PALIMPSEST_SHARE_GPUS=1
  // Of a collective within a host, from which it goes as copies: smaller ones are sooner there by NCCL's kernels.
  // PALIMPSEST_LEAST_COPIED_BYTES
  int64_t least_copied_bytes = int64_t{512} << 10;
};

// As the environment says; throws a UserError where it makes no sense.
GpuLinks gpu_links();

}  // namespace palimpsest
