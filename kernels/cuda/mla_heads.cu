// Keys and values of MLA. A thread moves one pack of a token's heads, for a few tokens that it loads before it stores.
//
// Grid: x over packs, y over groups of kTokens tokens. Packs of a token, forward: those of its keys, then of its
// values; backward: those of dkv, then of dk_pe, which are sums over heads.
#include "kernels/mla_heads.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 64, kTokens = 4;
constexpr int64_t kMaxGridY = 65535;

struct HeadSizes {
  int H, nope, rope, value;  // heads; parts of a head

  __host__ __device__ int key() const { return nope + rope; }
  __host__ __device__ int both() const { return nope + value; }
};

// Copies a pack of the tokens from `first` on: from + n * from_stride to to + n * to_stride.
template <int kPack, class T>
__device__ inline void move_packs(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t first,
                                  int64_t N) {
  if constexpr (kPack == 1) {
    for (int64_t n = first; n < min(first + kTokens, N); ++n) to[n * to_stride] = from[n * from_stride];
  } else {
    Pack<kPack, T> packs[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) packs[t] = load_pack<kPack>(from + min(first + t, N - 1) * from_stride);
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      if (first + t < N) store_words(to + (first + t) * to_stride, packs[t].words);
  }
}

template <int kPack, class T>
__global__ void mla_fwd_kernel(HeadSizes s, int64_t N, Rows<T> k, Rows<T> v, Rows<T> kv, Rows<T> k_pe) {
  const int i = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kPack;
  const int num_key = s.H * s.key();
  if (i >= num_key + s.H * s.value) return;
  const bool of_key = i < num_key;
  const int j = of_key ? i : i - num_key, part = of_key ? s.key() : s.value;
  const int h = j / part, c = j % part;
  const bool shared = of_key && c >= s.nope;
  const Rows<T> to = of_key ? k : v, from = shared ? k_pe : kv;
  const int at = shared ? c - s.nope : h * s.both() + (of_key ? 0 : s.nope) + c;
  for (int64_t first = blockIdx.y * int64_t{kTokens}; first < N; first += gridDim.y * int64_t{kTokens})
    move_packs<kPack>(to.data + j, to.stride, from.data + at, from.stride, first, N);
}

template <int kPack, class T>
__global__ void mla_bwd_kernel(HeadSizes s, int64_t N, Rows<T> dkv, Rows<T> dk_pe, Rows<T> dk, Rows<T> dv) {
  const int i = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kPack;
  const int num_both = s.H * s.both();
  if (i >= num_both + s.rope) return;
  const int h = i / s.both(), c = i % s.both();
  for (int64_t first = blockIdx.y * int64_t{kTokens}; first < N; first += gridDim.y * int64_t{kTokens}) {
    if (i < num_both) {
      const Rows<T> from = c < s.nope ? dk : dv;
      const int at = c < s.nope ? h * s.key() + c : h * s.value + c - s.nope;
      move_packs<kPack>(dkv.data + i, dkv.stride, from.data + at, from.stride, first, N);
      continue;
    }
    for (int64_t n = first; n < min(first + kTokens, N); ++n) {
      float sum[kPack] = {};
#pragma unroll 4
      for (int head = 0; head < s.H; ++head) {
        float x[kPack];
        load(dk[n] + head * s.key() + s.nope + i - num_both, x);
#pragma unroll
        for (int e = 0; e < kPack; ++e) sum[e] += x[e];
      }
      store(dk_pe[n] + i - num_both, sum);
    }
  }
}

HeadSizes head_sizes(const Tensor& kv, const Tensor& k_pe, const Tensor& v) {
  return {static_cast<int>(kv.dim(1)), static_cast<int>(kv.dim(2) - v.dim(2)), static_cast<int>(k_pe.dim(1)),
          static_cast<int>(v.dim(2))};
}

// Calls body(std::integral_constant<int, pack>): 16 bytes where no pack crosses from one part of a head to the next.
template <class T, class Body>
void with_head_pack(const HeadSizes& s, std::initializer_list<const Tensor*> tensors, Body body) {
  constexpr int kPack = kWidestPack<T>;
  if (s.rope % kPack == 0 && s.value % kPack == 0 && moves_in_packs(tensors, s.nope, kPack))
    body(std::integral_constant<int, kPack>{});
  else
    body(std::integral_constant<int, 1>{});
}

LaunchShape grid_over(int64_t N, int64_t elements, int pack) {
  return {.grid_x = ceil_div(elements, int64_t{kThreads} * pack),
          .grid_y = std::min(ceil_div(N, kTokens), kMaxGridY),
          .threads = kThreads};
}

}  // namespace

void mla_keys_values_forward(Stream& stream, Tensor k, Tensor v, const Tensor& kv, const Tensor& k_pe) {
  const HeadSizes s = head_sizes(kv, k_pe, v);
  const int64_t N = kv.dim(0);
  with_float(kv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_head_pack<T>(s, {&k, &v, &kv, &k_pe}, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      launch(stream, mla_fwd_kernel<kPack, T>, grid_over(N, s.H * (s.key() + s.value), kPack), s, N, Rows<T>(k),
             Rows<T>(v), Rows<T>(kv), Rows<T>(k_pe));
    });
  });
}

void mla_keys_values_backward(Stream& stream, Tensor dkv, Tensor dk_pe, const Tensor& dk, const Tensor& dv) {
  const HeadSizes s = head_sizes(dkv, dk_pe, dv);
  const int64_t N = dk.dim(0);
  with_float(dk.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_head_pack<T>(s, {&dkv, &dk_pe, &dk, &dv}, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      launch(stream, mla_bwd_kernel<kPack, T>, grid_over(N, s.H * s.both() + s.rope, kPack), s, N, Rows<T>(dkv),
             Rows<T>(dk_pe), Rows<T>(dk), Rows<T>(dv));
    });
  });
}

}  // namespace palimpsest::cuda
