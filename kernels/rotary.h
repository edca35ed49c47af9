// Rotary position embedding (Su et al., 2021): rotates pairs (a, b) of a head by the angle phi = position *
// inv_freq[i]:
//   (a, b) <- (a cos phi - b sin phi, b cos phi + a sin phi) * amplitude
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

enum class RotaryPairs : uint8_t { kInterleaved, kHalfSplit };  // pairs (2i, 2i+1), or (i, i + dr/2)

struct RotaryOptions {
  int64_t offset = 0;  // first rotated element of a head; dr = 2 * inv_freq.numel() elements are rotated
  RotaryPairs pairs = RotaryPairs::kHalfSplit;
  double amplitude = 1.0;  // YaRN's attention factor; 1 otherwise
};

// In place on x [N, H, D] or [N, D] (rows may be spaced). positions [N] i32 count from each document's start;
// inv_freq [dr/2] f64 in host memory, whatever the device.
PALIMPSEST_OP(rotary_forward, Stream& stream, Tensor x, const Tensor& positions, const Tensor& inv_freq,
              const RotaryOptions& options);
// In place on dx: the transposed rotation.
PALIMPSEST_OP(rotary_backward, Stream& stream, Tensor dx, const Tensor& positions, const Tensor& inv_freq,
              const RotaryOptions& options);

}  // namespace palimpsest
