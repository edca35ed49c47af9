// The device layer of a build without CUDA: there is no GPU, so tensors lie in host memory alone.
#include "kernels/device.h"

#include <cstring>

namespace palimpsest {

namespace cuda {

class Engine {};

Engine* make_engine() {
  CHECK(false, "this build has no cuda backend");
}
void destroy_engine(Engine*) noexcept {}

}  // namespace cuda

int num_gpus() {
  return 0;
}

void use_gpu(int64_t) {
  throw_user_error("there is no GPU that this build can use: it was made without CUDA");
}

GpuProperties gpu_properties() {
  CHECK(false, "this build has no cuda backend");
}

std::string take_last_path(const Stream&) {
  return {};
}

void synchronize(const Stream&) {}

void transfer(const Stream& stream, const Tensor& to, const Tensor& from) {
  CHECK(to.dtype() == from.dtype() && to.numel() == from.numel(), "transfer of ", from.str(), " to ", to.str());
  check_contiguous("to", to);
  check_contiguous("from", from);
  if (to.numel() > 0 && !stream.is_planning()) std::memcpy(to.raw(), from.raw(), static_cast<size_t>(from.bytes()));
}

void copy_to_host(const Tensor& to, const Tensor& from) {
  CHECK(to.dtype() == from.dtype() && to.numel() == from.numel(), "copy of ", from.str(), " to ", to.str());
  std::memcpy(to.raw(), from.raw(), static_cast<size_t>(from.bytes()));
}

PinnedRange::PinnedRange(void* begin, int64_t) : begin_(begin) {}
PinnedRange::~PinnedRange() = default;

HostCopy& HostCopy::fetch() {
  return *this;
}
void HostCopy::store() const {}

namespace detail {

void* allocate_on_gpu(int64_t) {
  CHECK(false, "this build has no cuda backend");
}
void free_on_gpu(void*) noexcept {}

}  // namespace detail

}  // namespace palimpsest
