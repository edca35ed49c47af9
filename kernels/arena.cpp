#include "kernels/arena.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <utility>

#include "kernels/device.h"

namespace palimpsest {

namespace {

// Planning addresses start here: never null, never mapped.
std::byte* const kPlanningBase = std::bit_cast<std::byte*>(uintptr_t{1} << 60);

int64_t round_up(int64_t bytes) {
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

}  // namespace

Arena::Arena(std::string name, Device device) : name_(std::move(name)), device_(device) {}

Arena Arena::planning(std::string name, Device device) {
  Arena arena(std::move(name), device);
  arena.base_ = kPlanningBase;
  arena.planning_ = true;
  return arena;
}

Arena::Arena(std::string name, Device device, int64_t capacity_bytes) : Arena(std::move(name), device) {
  capacity_ = round_up(capacity_bytes);
  if (capacity_ == 0) return;
  base_ =
      static_cast<std::byte*>(device == Device::kCpu ? std::aligned_alloc(kAlignment, static_cast<size_t>(capacity_))
                                                     : detail::allocate_on_gpu(capacity_));
  if (base_ == nullptr)
    throw_user_error("out of memory: region '", name_, "' needs ", capacity_ >> 20, " MiB",
                     device == Device::kCuda ? " on the GPU" : "",
                     "; a smaller micro_batch or sequence_length, or activation_checkpointing: full, needs less");
}

Arena::~Arena() {
  if (planning_ || base_ == nullptr) return;
  if (device_ == Device::kCpu)
    std::free(base_);
  else
    detail::free_on_gpu(base_);
}

Arena::Arena(Arena&& other) noexcept
    : name_(std::move(other.name_)),
      device_(other.device_),
      base_(std::exchange(other.base_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      used_(std::exchange(other.used_, 0)),
      peak_(other.peak_),
      planning_(other.planning_) {}

Tensor Arena::allocate(DType dtype, Shape shape) {
  const int64_t bytes = round_up(shape.numel() * size_of(dtype));
  CHECK(planning_ || used_ + bytes <= capacity_, "region '", name_, "' is full: ", bytes, " bytes requested, ",
        capacity_ - used_, " of ", capacity_, " free");
  Tensor tensor(base_ + used_, dtype, shape, device_);
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return tensor;
}

void Arena::release(int64_t mark) {
  CHECK(mark >= 0 && mark <= used_, "region '", name_, "': release to ", mark, " with ", used_, " used");
  used_ = mark;
}

}  // namespace palimpsest
