// SwiGLU. Grid: x over packs of a row's columns, y over groups of kTokens tokens, all of which a thread loads before it
// computes.
#include "kernels/swiglu.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 128, kTokens = 2;
constexpr int64_t kMaxGridY = 65535;

template <int kPack, class T>
__global__ void swiglu_fwd_kernel(int64_t N, int64_t F, Rows<T> h, Rows<T> gate_up) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  if (i >= F) return;
  for (int64_t first = blockIdx.y * int64_t{kTokens}; first < N; first += gridDim.y * int64_t{kTokens}) {
    float gate[kTokens][kPack], up[kTokens][kPack];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int64_t n = min(first + t, N - 1);
      load(gate_up[n] + i, gate[t]);
      load(gate_up[n] + F + i, up[t]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (first + t >= N) break;
#pragma unroll
      for (int c = 0; c < kPack; ++c) up[t][c] *= gate[t][c] * sigmoid_for<T>(gate[t][c]);
      store(h[first + t] + i, up[t]);
    }
  }
}

template <int kPack, class T>
__global__ void swiglu_bwd_kernel(int64_t N, int64_t F, Rows<T> d_gate_up, Rows<T> h, Rows<T> dh, Rows<T> gate_up) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  if (i >= F) return;
  for (int64_t first = blockIdx.y * int64_t{kTokens}; first < N; first += gridDim.y * int64_t{kTokens}) {
    float gate[kTokens][kPack], up[kTokens][kPack], d[kTokens][kPack];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int64_t n = min(first + t, N - 1);
      load(gate_up[n] + i, gate[t]);
      load(gate_up[n] + F + i, up[t]);
      load(dh[n] + i, d[t]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int64_t n = first + t;
      if (n >= N) break;
      float d_gate[kPack], d_up[kPack], product[kPack];
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        const float open = sigmoid_for<T>(gate[t][c]), silu = gate[t][c] * open;
        d_gate[c] = d[t][c] * up[t][c] * (open + silu * (1.0F - open));
        d_up[c] = d[t][c] * silu;
        product[c] = silu * up[t][c];
      }
      store(d_gate_up[n] + i, d_gate);
      store(d_gate_up[n] + F + i, d_up);
      if (h.data != nullptr) store(h[n] + i, product);
    }
  }
}

int64_t grid_over(int64_t num_tokens) {
  return std::min(ceil_div(num_tokens, kTokens), kMaxGridY);
}

}  // namespace

void swiglu_forward(Stream& stream, Tensor h, const Tensor& gate_up) {
  const int64_t N = h.dim(0), F = h.dim(1);
  with_float(h.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack<kWidestPack<T>>({&h, &gate_up}, F, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      launch(stream, swiglu_fwd_kernel<kPack, T>,
             {.grid_x = ceil_div(F, kThreads * kPack), .grid_y = grid_over(N), .threads = kThreads}, N, F, Rows<T>(h),
             Rows<T>(gate_up));
    });
  });
}

void swiglu_backward(Stream& stream, Tensor d_gate_up, Tensor h, const Tensor& dh, const Tensor& gate_up) {
  const int64_t N = dh.dim(0), F = dh.dim(1);
  with_float(dh.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack<kWidestPack<T>>({&d_gate_up, &h, &dh, &gate_up}, F, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      launch(stream, swiglu_bwd_kernel<kPack, T>,
             {.grid_x = ceil_div(F, kThreads * kPack), .grid_y = grid_over(N), .threads = kThreads}, N, F,
             Rows<T>(d_gate_up), Rows<T>(h), Rows<T>(dh), Rows<T>(gate_up));
    });
  });
}

}  // namespace palimpsest::cuda
