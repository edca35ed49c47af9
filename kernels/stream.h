// Stream: where ops run. It is the first argument of every op and carries the device, the region from which ops take
// their workspace, and whether this is a rehearsal.
#pragma once

#include <memory>

#include "kernels/arena.h"
#include "kernels/tensor.h"

namespace palimpsest {

namespace cuda {

class Engine;  // what a stream on a GPU owns, see kernels/cuda/engine.h
Engine* make_engine();
void destroy_engine(Engine* engine) noexcept;

}  // namespace cuda

class Stream {
 public:
  // A stream that executes, or, when scratch is a planning arena, one on which ops check their arguments, count their
  // workspace and do nothing else. On a GPU work is queued, and kernels/device.h waits for it.
  Stream(Device device, Arena& scratch);

  Device device() const { return device_; }
  Arena& scratch() const { return scratch_; }
  bool is_planning() const { return scratch_.is_planning(); }
  cuda::Engine& engine() const;  // of a stream that executes on a GPU

 private:
  struct EngineDeleter {
    void operator()(cuda::Engine* engine) const noexcept { cuda::destroy_engine(engine); }
  };

  Device device_;
  Arena& scratch_;
  std::unique_ptr<cuda::Engine, EngineDeleter> engine_;
};

}  // namespace palimpsest

// Declares an op: the public function, which checks its arguments once, and its two backends of the same signature.
#define PALIMPSEST_OP(name, ...) \
  void name(__VA_ARGS__);        \
  namespace cpu {                \
  void name(__VA_ARGS__);        \
  }                              \
  namespace cuda {               \
  void name(__VA_ARGS__);        \
  }                              \
  static_assert(true, "an op declaration ends with a semicolon")

#ifdef PALIMPSEST_WITH_CUDA
#define PALIMPSEST_ON_CUDA(call) cuda::call
#else
#define PALIMPSEST_ON_CUDA(call) CHECK(false, "this build has no cuda backend")
#endif

// Runs `call` on the backend of the stream. When the stream is planning, the CPU's backend is not called; the CUDA
// backend always is: it sizes its own workspace from stream.scratch() and launches nothing.
#define PALIMPSEST_DISPATCH(stream, call)                   \
  do {                                                      \
    if ((stream).device() == ::palimpsest::Device::kCuda) { \
      PALIMPSEST_ON_CUDA(call);                             \
    } else if (!(stream).is_planning()) {                   \
      cpu::call;                                            \
    }                                                       \
  } while (false)

// The same for ops whose CPU backend sizes its own workspace too and stops there when the stream is planning.
#define PALIMPSEST_DISPATCH_ALWAYS(stream, call)            \
  do {                                                      \
    if ((stream).device() == ::palimpsest::Device::kCuda) { \
      PALIMPSEST_ON_CUDA(call);                             \
    } else {                                                \
      cpu::call;                                            \
    }                                                       \
  } while (false)
