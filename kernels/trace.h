// Named ranges on a profiler's timeline (NVTX), and the steps that it watches. Without a profiler a range is two calls
// that do nothing; in a build without CUDA all of this does nothing.
#pragma once

namespace palimpsest {

namespace detail {

void begin_trace_range(const char* name);
void end_trace_range();

}  // namespace detail

// From its construction to its destruction on this thread. The name is copied.
class TraceRange {
 public:
  explicit TraceRange(const char* name) { detail::begin_trace_range(name); }
  ~TraceRange() { detail::end_trace_range(); }
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
};

// For profilers that were told to wait for it (nsys profile --capture-range=cudaProfilerApi).
void start_profiler();
void stop_profiler();

}  // namespace palimpsest
