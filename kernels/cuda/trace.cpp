// NVTX is headers alone: it looks for a profiler when the first range begins.
#include "kernels/trace.h"

#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>

#include "kernels/cuda/check.h"

namespace palimpsest {

TraceRange::TraceRange(const char* name) {
  nvtxRangePushA(name);
}

TraceRange::~TraceRange() {
  nvtxRangePop();
}

void start_profiler() {
  CUDA_CHECK(cudaProfilerStart());
}

void stop_profiler() {
  CUDA_CHECK(cudaDeviceSynchronize());  // what the last step queued is watched to its end
  CUDA_CHECK(cudaProfilerStop());
}

}  // namespace palimpsest
