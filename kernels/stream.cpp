#include "kernels/stream.h"

namespace palimpsest {

Stream::Stream(Device device, Arena& scratch) : device_(device), scratch_(scratch) {
  if (device == Device::kCuda && !is_planning()) engine_.reset(cuda::make_engine());
}

cuda::Engine& Stream::engine() const {
  CHECK(engine_ != nullptr, "the stream is planning or runs on the CPU");
  return *engine_;
}

}  // namespace palimpsest
