#include "kernels/rotary.h"

#include <cmath>

#include "kernels/cpu/loops.h"

namespace palimpsest::cpu {

namespace {

enum class Turn { kForward, kBackward };

// Angles are computed in f64 whatever the type of x: at position 100000 an f32 angle is off by 1e-2.
template <class T>
void rotate(const Tensor& x, const Tensor& positions, const Tensor& inv_freq, const RotaryOptions& options, Turn turn) {
  constexpr int64_t kTokens = 16, kPairs = 64;  // of one range; of one table of sines
  const bool has_heads = x.num_dims() == 3;
  const int64_t H = has_heads ? x.dim(1) : 1, D = x.dim(-1), pairs = inv_freq.numel();
  const bool interleaved = options.pairs == RotaryPairs::kInterleaved;
  const int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : pairs;
  const double sign = turn == Turn::kForward ? 1.0 : -1.0;
  const Rows<T> rows(x);
  const int32_t* position = positions.data<int32_t>();
  const double* frequency = inv_freq.data<double>();
  parallel_ranges(x.dim(0), kTokens,
                  [=, amplitude = options.amplitude, offset = options.offset](int64_t begin, int64_t end) {
                    T cosine[kPairs], sine[kPairs];
                    for (int64_t n = begin; n < end; ++n)
                      for (int64_t first = 0; first < pairs; first += kPairs) {
                        const int64_t count = std::min(kPairs, pairs - first);
                        for (int64_t i = 0; i < count; ++i) {
                          const double angle = position[n] * frequency[first + i];
                          cosine[i] = static_cast<T>(amplitude * std::cos(angle));
                          sine[i] = static_cast<T>(sign * amplitude * std::sin(angle));
                        }
                        for (int64_t h = 0; h < H; ++h) {
                          T* head = rows[n] + h * D + offset + first * step;
#pragma omp simd
                          for (int64_t i = 0; i < count; ++i) {
                            const T a = head[i * step], b = head[i * step + partner];
                            head[i * step] = a * cosine[i] - b * sine[i];
                            head[i * step + partner] = b * cosine[i] + a * sine[i];
                          }
                        }
                      }
                  });
}

}  // namespace

void rotary_forward(Stream&, Tensor x, const Tensor& positions, const Tensor& inv_freq, const RotaryOptions& options) {
  with_real(x.dtype(), [&](auto zero) { rotate<decltype(zero)>(x, positions, inv_freq, options, Turn::kForward); });
}

void rotary_backward(Stream&, Tensor dx, const Tensor& positions, const Tensor& inv_freq,
                     const RotaryOptions& options) {
  with_real(dx.dtype(), [&](auto zero) { rotate<decltype(zero)>(dx, positions, inv_freq, options, Turn::kBackward); });
}

}  // namespace palimpsest::cpu
