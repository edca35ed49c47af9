// SwiGLU. Grid: x over packs of a row's columns, y over tokens.
#include "kernels/swiglu.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;

template <int kPack, class T>
__global__ void swiglu_fwd_kernel(int64_t N, int64_t F, Rows<T> h, Rows<T> gate_up) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  if (i >= F) return;
  for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
    float gate[kPack], up[kPack];
    load(gate_up[n] + i, gate);
    load(gate_up[n] + F + i, up);
#pragma unroll
    for (int c = 0; c < kPack; ++c) up[c] *= gate[c] * sigmoid(gate[c]);
    store(h[n] + i, up);
  }
}

template <int kPack, class T>
__global__ void swiglu_bwd_kernel(int64_t N, int64_t F, Rows<T> d_gate_up, Rows<T> h, Rows<T> dh, Rows<T> gate_up) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  if (i >= F) return;
  for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
    float gate[kPack], up[kPack], d[kPack], d_gate[kPack], d_up[kPack], product[kPack];
    load(gate_up[n] + i, gate);
    load(gate_up[n] + F + i, up);
    load(dh[n] + i, d);
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      const float open = sigmoid(gate[c]), silu = gate[c] * open;
      d_gate[c] = d[c] * up[c] * (open + silu * (1.0F - open));
      d_up[c] = d[c] * silu;
      product[c] = silu * up[c];
    }
    store(d_gate_up[n] + i, d_gate);
    store(d_gate_up[n] + F + i, d_up);
    if (h.data != nullptr) store(h[n] + i, product);
  }
}

}  // namespace

void swiglu_forward(Stream& stream, Tensor h, const Tensor& gate_up) {
  const int64_t N = h.dim(0), F = h.dim(1);
  with_float(h.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack({&h, &gate_up}, F, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      launch(stream, swiglu_fwd_kernel<kPack, T>,
             {.grid_x = ceil_div(F, kThreads * kPack), .grid_y = std::min(N, kMaxGridY), .threads = kThreads}, N, F,
             Rows<T>(h), Rows<T>(gate_up));
    });
  });
}

void swiglu_backward(Stream& stream, Tensor d_gate_up, Tensor h, const Tensor& dh, const Tensor& gate_up) {
  const int64_t N = dh.dim(0), F = dh.dim(1);
  with_float(dh.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack({&d_gate_up, &h, &dh, &gate_up}, F, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      launch(stream, swiglu_bwd_kernel<kPack, T>,
             {.grid_x = ceil_div(F, kThreads * kPack), .grid_y = std::min(N, kMaxGridY), .threads = kThreads}, N, F,
             Rows<T>(d_gate_up), Rows<T>(h), Rows<T>(dh), Rows<T>(gate_up));
    });
  });
}

}  // namespace palimpsest::cuda
