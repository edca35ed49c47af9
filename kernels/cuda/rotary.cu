// Rotary embedding. One block a token: its threads take the pairs of a head, and every head in turn.
//
// Angles are computed in f64 whatever the type of x: at position 100000 an f32 angle is off by 1e-2.
#include "kernels/rotary.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int64_t kMaxPairs = 256;

struct Frequencies {
  double values[kMaxPairs];
};

struct Turn {
  int64_t H, D, pairs, offset, step, partner;  // elements between pairs, and inside one
  double amplitude, sign;
};

template <class T>
__global__ void rotary_kernel(Turn turn, Rows<T> x, const int32_t* positions,
                              const __grid_constant__ Frequencies inv_freq) {
  const int64_t n = blockIdx.x;
  for (int64_t i = threadIdx.x; i < turn.pairs; i += blockDim.x) {
    double sine = 0, cosine = 0;
    sincos(positions[n] * inv_freq.values[i], &sine, &cosine);
    const auto s = static_cast<float>(turn.sign * turn.amplitude * sine),
               c = static_cast<float>(turn.amplitude * cosine);
    for (int64_t h = 0; h < turn.H; ++h) {
      T* pair = x[n] + h * turn.D + turn.offset + i * turn.step;
      const float a = to_f32(pair[0]), b = to_f32(pair[turn.partner]);
      pair[0] = from_f32<T>(a * c - b * s);
      pair[turn.partner] = from_f32<T>(b * c + a * s);
    }
  }
}

void rotate(const Stream& stream, const Tensor& x, const Tensor& positions, const Tensor& inv_freq,
            const RotaryOptions& options, double sign) {
  const int64_t pairs = inv_freq.numel();
  CHECK(pairs <= kMaxPairs, "rotary on cuda: ", pairs, " pairs; at most ", kMaxPairs, " are supported");
  Frequencies frequencies = {};
  std::copy_n(inv_freq.data<double>(), pairs, frequencies.values);
  const bool interleaved = options.pairs == RotaryPairs::kInterleaved;
  const Turn turn = {.H = x.num_dims() == 3 ? x.dim(1) : 1,
                     .D = x.dim(-1),
                     .pairs = pairs,
                     .offset = options.offset,
                     .step = interleaved ? 2 : 1,
                     .partner = interleaved ? 1 : pairs,
                     .amplitude = options.amplitude,
                     .sign = sign};
  with_float(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int threads = static_cast<int>(std::clamp<int64_t>(ceil_div(pairs, kWarp) * kWarp, kWarp, 256));
    launch(stream, rotary_kernel<T>, {.grid_x = x.dim(0), .threads = threads}, turn, Rows<T>(x),
           positions.data<int32_t>(), frequencies);
  });
}

}  // namespace

void rotary_forward(Stream& stream, Tensor x, const Tensor& positions, const Tensor& inv_freq,
                    const RotaryOptions& options) {
  rotate(stream, x, positions, inv_freq, options, 1.0);
}

void rotary_backward(Stream& stream, Tensor dx, const Tensor& positions, const Tensor& inv_freq,
                     const RotaryOptions& options) {
  rotate(stream, dx, positions, inv_freq, options, -1.0);
}

}  // namespace palimpsest::cuda
