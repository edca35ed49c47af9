// Rotary frequencies of a layer: inv_freq[i] = theta^(-2i / dr), i < dr / 2.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/rotary.h"
#include "model/config.h"

namespace palimpsest {

class Rope {
 public:
  // rotates elements [offset, offset + rope_dim) of a head; kNone does nothing.
  Rope(RopeKind kind, int64_t offset, int64_t rope_dim, double theta);

  // In place on x [N, H, D] or [N, D].
  void forward(Stream& stream, Tensor x, const Tensor& positions) const;
  void backward(Stream& stream, Tensor dx, const Tensor& positions) const;

 private:
  Tensor frequencies() const;

  RopeKind kind_;
  RotaryOptions options_;
  mutable std::vector<double> inv_freq_;  // [dr / 2]; ops only read it
};

}  // namespace palimpsest
