#include "model/rope.h"

#include <algorithm>
#include <cmath>

namespace palimpsest {

namespace {

constexpr double kTwoPi = 6.283185307179586476925;

double mscale_of(double factor, double weight) {
  return factor <= 1.0 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

// Which pair turns so many times in the old context: a real number.
double pair_of_turns(double turns, int64_t rope_dim, double theta, const RopeScalingConfig& scaling) {
  const auto length = static_cast<double>(scaling.original_max_positions);
  return static_cast<double>(rope_dim) * std::log(length / (turns * kTwoPi)) / (2.0 * std::log(theta));
}

void scale_yarn(std::vector<double>& inv_freq, int64_t rope_dim, double theta, const RopeScalingConfig& scaling) {
  double low = pair_of_turns(scaling.beta_fast, rope_dim, theta, scaling);
  double high = pair_of_turns(scaling.beta_slow, rope_dim, theta, scaling);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rope_dim - 1));
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inv_freq[i] *= ramp / scaling.factor + (1.0 - ramp);
  }
}

void scale_llama3(std::vector<double>& inv_freq, const RopeScalingConfig& scaling) {
  for (double& frequency : inv_freq) {
    const double turns = static_cast<double>(scaling.original_max_positions) * frequency / kTwoPi;
    const double kept =
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);  // share that stays
    const double share = std::clamp(kept, 0.0, 1.0);
    frequency *= share + (1.0 - share) / scaling.factor;
  }
}

}  // namespace

std::vector<double> rope_frequencies(int64_t rope_dim, double theta, const RopeScalingConfig& scaling) {
  std::vector<double> inv_freq;
  for (int64_t i = 0; i < rope_dim / 2; ++i)
    inv_freq.push_back(std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope_dim)));
  if (scaling.kind == RopeScalingKind::kYarn) scale_yarn(inv_freq, rope_dim, theta, scaling);
  if (scaling.kind == RopeScalingKind::kLlama3) scale_llama3(inv_freq, scaling);
  return inv_freq;
}

double rope_attention_factor(const RopeScalingConfig& scaling) {
  if (scaling.kind != RopeScalingKind::kYarn) return 1.0;
  if (scaling.attention_factor) return *scaling.attention_factor;
  if (scaling.mscale != 0.0 && scaling.mscale_all_dim != 0.0)
    return mscale_of(scaling.factor, scaling.mscale) / mscale_of(scaling.factor, scaling.mscale_all_dim);
  return mscale_of(scaling.factor, 1.0);
}

double rope_softmax_factor(const RopeScalingConfig& scaling) {
  if (scaling.kind != RopeScalingKind::kYarn || scaling.mscale_all_dim == 0.0) return 1.0;
  const double mscale = mscale_of(scaling.factor, scaling.mscale_all_dim);
  return mscale * mscale;
}

Rope::Rope(RopeKind kind, int64_t offset, int64_t rope_dim, double theta, const RopeScalingConfig& scaling)
    : kind_(kind) {
  if (kind == RopeKind::kNone) return;
  options_ = {.offset = offset,
              .pairs = kind == RopeKind::kInterleaved ? RotaryPairs::kInterleaved : RotaryPairs::kHalfSplit,
              .amplitude = rope_attention_factor(scaling)};
  inv_freq_ = rope_frequencies(rope_dim, theta, scaling);
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
