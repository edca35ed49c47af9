// Keys and values of MLA. One block a token.
#include "kernels/mla_heads.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 256;

struct HeadSizes {
  int H, nope, rope, value;  // heads; parts of a head
};

template <class T>
__global__ void mla_fwd_kernel(HeadSizes s, Rows<T> k, Rows<T> v, Rows<T> kv, Rows<T> k_pe) {
  const int64_t n = blockIdx.x;
  const int key = s.nope + s.rope, both = s.nope + s.value, first = static_cast<int>(threadIdx.x);
  for (int i = first; i < s.H * key; i += kThreads) {
    const int h = i / key, c = i % key;
    k[n][i] = c < s.nope ? kv[n][h * both + c] : k_pe[n][c - s.nope];
  }
  for (int i = first; i < s.H * s.value; i += kThreads) {
    const int h = i / s.value, c = i % s.value;
    v[n][i] = kv[n][h * both + s.nope + c];
  }
}

template <class T>
__global__ void mla_bwd_kernel(HeadSizes s, Rows<T> dkv, Rows<T> dk_pe, Rows<T> dk, Rows<T> dv) {
  const int64_t n = blockIdx.x;
  const int key = s.nope + s.rope, both = s.nope + s.value, first = static_cast<int>(threadIdx.x);
  for (int i = first; i < s.H * both; i += kThreads) {
    const int h = i / both, c = i % both;
    dkv[n][i] = c < s.nope ? dk[n][h * key + c] : dv[n][h * s.value + c - s.nope];
  }
  for (int c = first; c < s.rope; c += kThreads) {
    float sum = 0.0F;
    for (int h = 0; h < s.H; ++h) sum += to_f32(dk[n][h * key + s.nope + c]);
    dk_pe[n][c] = from_f32<T>(sum);
  }
}

HeadSizes head_sizes(const Tensor& kv, const Tensor& k_pe, const Tensor& v) {
  return {static_cast<int>(kv.dim(1)), static_cast<int>(kv.dim(2) - v.dim(2)), static_cast<int>(k_pe.dim(1)),
          static_cast<int>(v.dim(2))};
}

}  // namespace

void mla_keys_values_forward(Stream& stream, Tensor k, Tensor v, const Tensor& kv, const Tensor& k_pe) {
  const HeadSizes sizes = head_sizes(kv, k_pe, v);
  with_float(kv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch(stream, mla_fwd_kernel<T>, {.grid_x = kv.dim(0), .threads = kThreads}, sizes, Rows<T>(k), Rows<T>(v),
           Rows<T>(kv), Rows<T>(k_pe));
  });
}

void mla_keys_values_backward(Stream& stream, Tensor dkv, Tensor dk_pe, const Tensor& dk, const Tensor& dv) {
  const HeadSizes sizes = head_sizes(dkv, dk_pe, dv);
  with_float(dk.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch(stream, mla_bwd_kernel<T>, {.grid_x = dk.dim(0), .threads = kThreads}, sizes, Rows<T>(dkv), Rows<T>(dk_pe),
           Rows<T>(dk), Rows<T>(dv));
  });
}

}  // namespace palimpsest::cuda
