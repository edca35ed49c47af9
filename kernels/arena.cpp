#include "kernels/arena.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string>
#include <utility>

#include "kernels/device.h"

namespace palimpsest {

namespace {

// Planning addresses start here: never null, never mapped.
std::byte* const kPlanningBase = std::bit_cast<std::byte*>(uintptr_t{1} << 60);

constexpr int64_t kLargestRegion = int64_t{1} << 56;  // bytes; no machine has it, and sums of it do not overflow

[[noreturn]] void throw_out_of_memory(const std::string& region, const std::string& needs) {
  throw_user_error("out of memory: region '", region, "' needs ", needs,
                   "; a smaller micro_batch, sequence_length or model, or activation_checkpointing: full, needs less");
}

std::string mib(int64_t bytes) {
  return std::to_string(bytes >> 20) + " MiB";
}

// A host's memory is handed out before it is there, so nothing is known of it.
std::string what_is_free(Device device) {
  return device == Device::kCpu ? "" : " on the GPU, which has " + mib(gpu_properties().free_bytes) + " free";
}

// Bytes of a tensor; kLargestRegion where that many would not do.
int64_t bytes_of(DType dtype, const Shape& shape) {
  int64_t bytes = size_of(dtype);
  bool fits = true;
  for (int i = 0; i < shape.num_dims(); ++i)
    fits = fits && !__builtin_mul_overflow(bytes, shape[i], &bytes) && bytes < kLargestRegion;
  return fits ? bytes : kLargestRegion;
}

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
  if (base_ == nullptr) throw_out_of_memory(name_, mib(capacity_) + what_is_free(device));
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
  const int64_t bytes = round_up(bytes_of(dtype, shape));
  if (planning_ && used_ + bytes >= kLargestRegion) throw_out_of_memory(name_, "more than 2^56 bytes");
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
