// Named ranges on a profiler's timeline (NVTX), and the steps that it watches. Without a profiler a range is two calls
// that do nothing; in a build without CUDA all of this does nothing.
#pragma once

namespace palimpsest {

// From its construction to its destruction on this thread. The name is copied.
class TraceRange {
 public:
  explicit TraceRange(const char* name);
  ~TraceRange();
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
};

// For profilers that were told to wait for it (nsys profile --capture-range=cudaProfilerApi).
void start_profiler();
void stop_profiler();

}  // namespace palimpsest
