// Stream: where ops run. It is the first argument of every op and carries the device, the region from which ops take
// their workspace, and whether this is a rehearsal.
#pragma once

#include "kernels/arena.h"
#include "kernels/tensor.h"

namespace palimpsest {

class Stream {
 public:
  // A stream that executes, or, when scratch is a planning arena, one on which ops check their arguments, count their
  // workspace and do nothing else.
  Stream(Device device, Arena& scratch) : device_(device), scratch_(scratch) {}

  Device device() const { return device_; }
  Arena& scratch() const { return scratch_; }
  bool is_planning() const { return scratch_.is_planning(); }

 private:
  Device device_;
  Arena& scratch_;
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

// Runs `call` on the backend of the stream, or nothing when the stream is planning.
#define PALIMPSEST_DISPATCH(stream, call)                                  \
  do {                                                                     \
    if (!(stream).is_planning()) PALIMPSEST_DISPATCH_ALWAYS(stream, call); \
  } while (false)

// The same for backends that size their own workspace: they are called when the stream is planning too, take the
// workspace from stream.scratch() and stop there.
#define PALIMPSEST_DISPATCH_ALWAYS(stream, call)                                 \
  do {                                                                           \
    CHECK((stream).device() == ::palimpsest::Device::kCpu, "this build has no ", \
          ::palimpsest::name_of((stream).device()), " backend");                 \
    cpu::call;                                                                   \
  } while (false)
