// Rotary frequencies of a layer: inv_freq[i] = theta^(-2i / dr), i < dr / 2, and their scaling to longer contexts.
//   yarn (Peng et al., arXiv 2309.00071): pair i turns L inv_freq[i] / 2 pi times in the old context of L tokens. Pairs
//     of more than beta_fast turns stay, of fewer than beta_slow are divided by factor, a ramp over i lies between.
//     Rotated parts are multiplied by attention_factor: m(1), or m(mscale) / m(mscale_all_dim) where both are given, or
//     as set; m(s) = 0.1 s ln(factor) + 1. MLA multiplies its softmax scale by m(mscale_all_dim)^2.
//   llama3 (Llama 3.1): pairs of more than high_freq_factor turns stay, of fewer than low_freq_factor are divided by
//     factor, between the two a blend that is linear in the turns.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/rotary.h"
#include "model/config.h"

namespace palimpsest {

std::vector<double> rope_frequencies(int64_t rope_dim, double theta, const RopeScalingConfig& scaling);  // [dr / 2]
double rope_attention_factor(const RopeScalingConfig& scaling);
double rope_softmax_factor(const RopeScalingConfig& scaling);

class Rope {
 public:
  // rotates elements [offset, offset + rope_dim) of a head; kNone does nothing.
  Rope(RopeKind kind, int64_t offset, int64_t rope_dim, double theta, const RopeScalingConfig& scaling);

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
