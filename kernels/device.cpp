#include "kernels/device.h"

namespace palimpsest {

HostCopy::HostCopy(const Tensor& original) : original_(original), tensor_(original) {
  check_contiguous("original", original);
  if (original.device() == Device::kCpu) return;
  memory_.resize(static_cast<size_t>(original.bytes()));
  tensor_ = Tensor(memory_.data(), original.dtype(), original.shape());
}

}  // namespace palimpsest
