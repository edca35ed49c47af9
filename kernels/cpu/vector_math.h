// exp, sigmoid, softplus for loops over many elements, and sums whose order never changes.
//
// The f32 functions are branch-free polynomials, accurate to about 2 units in the last place, so that a loop under
// `#pragma omp simd` is vectorised whatever the library. Infinities give their limits, NaN gives NaN. The f64
// functions are the library's.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace palimpsest::cpu {

// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2.
[[gnu::always_inline]] inline float vector_exp(float x) {
  constexpr float kZeroBelow = -104.0f, kInfinityAbove = 89.0f;
  x = x < kZeroBelow ? kZeroBelow : x;
  x = x > kInfinityAbove ? kInfinityAbove : x;
  constexpr float kRound = 0x1.8p23f;                   // adding it leaves the rounded integer in the low mantissa bits
  constexpr float kLn2Leading = 0x1.62e4p-1f;           // 15 bits: times n it is exact
  constexpr float kLn2Trailing = 1.4286068203094e-06f;  // ln 2 less those
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2Leading) - n * kLn2Trailing;
  // (e^r - 1 - r) / r^2, interpolated at Chebyshev nodes: relative error of e^r 1.1e-8.
  float p = 1.3926183587713694e-3f;
  p = p * r + 8.363179052722578e-3f;
  p = p * r + 4.1666554617204574e-2f;
  p = p * r + 1.6666576989698775e-1f;
  p = p * r + 0.5f;
  p = (p * r) * r + r + 1.0f;
  // 2^n as two factors, since n from -150 to 128 passes the range of one exponent at both ends.
  const auto exponent = static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
  const int32_t half = exponent >> 1;
  const auto rest = static_cast<uint32_t>(exponent) - static_cast<uint32_t>(half);
  const float scale0 = std::bit_cast<float>((static_cast<uint32_t>(half) + 127u) << 23);
  const float scale1 = std::bit_cast<float>((rest + 127u) << 23);
  return p * scale0 * scale1;
}
[[gnu::always_inline]] inline double vector_exp(double x) {
  return std::exp(x);
}

// 1 / (1 + e^-x)
template <class T>
[[gnu::always_inline]] inline T vector_sigmoid(T x) {
  return T(1) / (T(1) + vector_exp(-x));
}

// log(1 + e^x) = max(x, 0) + log1p(u) with u = e^-|x|, and log1p(u) = 2 atanh(s), s = u / (2 + u) <= 1/3.
[[gnu::always_inline]] inline float vector_softplus(float x) {
  const float u = vector_exp(-std::fabs(x));
  const float s = u / (2.0f + u);
  const float z = s * s;
  // (atanh(s) / s - 1) / s^2, interpolated at Chebyshev nodes: relative error of atanh 1.6e-8.
  float p = 1.3425749011418575e-1f;
  p = p * z + 1.411830990265524e-1f;
  p = p * z + 2.0003780322455603e-1f;
  p = p * z + 3.3333320168349617e-1f;
  return (x > 0.0f ? x : 0.0f) + 2.0f * (s + s * (z * p));
}
[[gnu::always_inline]] inline double vector_softplus(double x) {
  return (x > 0.0 ? x : 0.0) + std::log1p(std::exp(-std::fabs(x)));
}

// sum of term(i) over i = 0 .. n-1. The elements go to a fixed number of lanes that are added as a tree, so that the
// result depends neither on the alignment of the data nor on the width of the machine's vectors.
template <class T, class Term>
[[gnu::always_inline]] inline T lane_sum(int64_t n, Term term) {
  constexpr int kLanes = 128 / sizeof(T);
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i + lane < n; ++lane) lanes[lane] += term(i + lane);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

}  // namespace palimpsest::cpu
