#include "model/rope.h"

#include <cmath>

namespace palimpsest {

Rope::Rope(RopeKind kind, int64_t offset, int64_t rope_dim, double theta) : kind_(kind) {
  if (kind == RopeKind::kNone) return;
  options_ = {.offset = offset,
              .pairs = kind == RopeKind::kInterleaved ? RotaryPairs::kInterleaved : RotaryPairs::kHalfSplit};
  for (int64_t i = 0; i < rope_dim / 2; ++i)
    inv_freq_.push_back(std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope_dim)));
}

Tensor Rope::frequencies() const {
  return Tensor(inv_freq_.data(), DType::kF64, {static_cast<int64_t>(inv_freq_.size())});
}

void Rope::forward(Stream& stream, Tensor x, const Tensor& positions) const {
  if (kind_ != RopeKind::kNone) rotary_forward(stream, x, positions, frequencies(), options_);
}

void Rope::backward(Stream& stream, Tensor dx, const Tensor& positions) const {
  if (kind_ != RopeKind::kNone) rotary_backward(stream, dx, positions, frequencies(), options_);
}

}  // namespace palimpsest
