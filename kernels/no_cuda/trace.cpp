#include "kernels/trace.h"

namespace palimpsest {

TraceRange::TraceRange(const char*) {}
TraceRange::~TraceRange() = default;  // NOLINT(performance-trivially-destructible): not so in builds with CUDA

void start_profiler() {}
void stop_profiler() {}

}  // namespace palimpsest
