// NVTX is headers alone: it looks for a profiler when the first range begins.
#include "kernels/trace.h"

#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>

#include "kernels/cuda/check.h"

namespace palimpsest {

namespace detail {

void begin_trace_range(const char* name) {
  nvtxRangePushA(name);
}

void end_trace_range() {
  nvtxRangePop();
}

}  // namespace detail

void start_profiler() {
  CUDA_CHECK(cudaProfilerStart());
}

void stop_profiler() {
  CUDA_CHECK(cudaDeviceSynchronize());  // what the last step queued is watched to its end
  CUDA_CHECK(cudaProfilerStop());
}

}  // namespace palimpsest
