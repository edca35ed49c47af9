// Element types of the CUDA backends and how kernels read and write them. Arithmetic is f32 whatever the storage.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "kernels/tensor.h"

namespace palimpsest {

template <>
struct DTypeOf<__nv_bfloat16> {
  static constexpr DType value = DType::kBF16;
};

namespace cuda {

using bf16 = __nv_bfloat16;

__device__ inline float to_f32(float x) {
  return x;
}
__device__ inline float to_f32(bf16 x) {
  return __bfloat162float(x);
}
template <class T>
__device__ inline T from_f32(float x) {
  if constexpr (std::is_same_v<T, bf16>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

__device__ inline float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}

// 2^x.
__device__ inline float rough_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
constexpr float kLog2OfE = 1.4426950408889634F;

// For what is rounded to bf16: a relative error of some 1e-6 where |x| < 20, at a third of the instructions.
__device__ inline float rough_sigmoid(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0F + rough_exp2(x * -kLog2OfE)));
  return inverse;
}

// For a result of type T.
template <class T>
__device__ inline float sigmoid_for(float x) {
  return std::is_same_v<T, bf16> ? rough_sigmoid(x) : sigmoid(x);
}
// The same of an x of type T, with an error of 1e-6 or so where -20 < x < 0.
template <class T>
__device__ inline float exp_of(float x) {
  return std::is_same_v<T, bf16> ? rough_exp2(x * kLog2OfE) : expf(x);
}

// 4, 8 or 16 bytes of global memory in one access, 32 in two. Stores say so to the assembler: compilers cut a struct
// that is stored into an access for each of its members.
template <int kWords>
using Words = std::conditional_t<kWords == 4, uint4, std::conditional_t<kWords == 2, uint2, unsigned>>;

template <int kWords>
__device__ inline void load_words(const void* from, unsigned (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4 || kWords == 8);
  constexpr int kAtOnce = kWords < 4 ? kWords : 4;
#pragma unroll
  for (int i = 0; i < kWords; i += kAtOnce) {
    const Words<kAtOnce> all = static_cast<const Words<kAtOnce>*>(from)[i / kAtOnce];
    if constexpr (kWords == 1) {
      words[i] = all;
    } else {
      words[i] = all.x;
      words[i + 1] = all.y;
    }
    if constexpr (kWords >= 4) {
      words[i + 2] = all.z;
      words[i + 3] = all.w;
    }
  }
}

template <int kWords>
__device__ inline void store_words(void* to, const unsigned (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4 || kWords == 8);
  const size_t place = __cvta_generic_to_global(to);
  if constexpr (kWords == 1)
    asm volatile("st.global.b32 [%0], %1;" ::"l"(place), "r"(words[0]) : "memory");
  else if constexpr (kWords == 2)
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(place), "r"(words[0]), "r"(words[1]) : "memory");
  else
#pragma unroll
    for (int i = 0; i < kWords; i += 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(place + 4 * i), "r"(words[i]), "r"(words[i + 1]),
                   "r"(words[i + 2]), "r"(words[i + 3])
                   : "memory");
}

// Two neighbours in bf16, the first in the lower half; bf16 is the upper half of an f32.
__device__ inline unsigned pair_of(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return __bfloat16_as_ushort(pair.x) | static_cast<unsigned>(__bfloat16_as_ushort(pair.y)) << 16;
}
__device__ inline float first_of(unsigned pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float second_of(unsigned pair) {
  return __uint_as_float(pair & 0xffff0000U);
}

// kPack neighbours, moved in one access, or two of 16 bytes; the address is a multiple of their size. Pack: as they lie
// in memory.
template <int kPack, class T>
struct Pack {
  unsigned words[kPack * sizeof(T) / 4];

  __device__ void unpack(float (&x)[kPack]) const {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if constexpr (std::is_same_v<T, bf16>)
        x[i] = i % 2 == 0 ? first_of(words[i / 2]) : second_of(words[i / 2]);
      else
        x[i] = __uint_as_float(words[i]);
    }
  }
};

template <int kPack, class T>
__device__ inline Pack<kPack, T> load_pack(const T* from) {
  Pack<kPack, T> packed;
  load_words(from, packed.words);
  return packed;
}

template <int kPack, class T>
__device__ inline void load(const T* from, float (&x)[kPack]) {
  if constexpr (kPack == 1)
    x[0] = to_f32(*from);
  else
    load_pack<kPack>(from).unpack(x);
}

template <int kPack, class T>
__device__ inline void store(T* to, const float (&x)[kPack]) {
  if constexpr (kPack == 1) {
    *to = from_f32<T>(x[0]);
  } else {
    constexpr int kWords = kPack * sizeof(T) / 4;
    unsigned words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (std::is_same_v<T, bf16>)
        words[i] = pair_of(x[2 * i], x[2 * i + 1]);
      else
        words[i] = __float_as_uint(x[i]);
    }
    store_words(to, words);
  }
}

// The rows of a tensor, [0] to [dim(0) - 1].
template <class T>
struct Rows {
  Rows() = default;
  explicit Rows(const Tensor& tensor)
      : data(tensor.defined() ? tensor.data<T>() : nullptr), stride(tensor.row_stride()) {}
  __host__ __device__ T* operator[](int64_t row) const { return data + row * stride; }

  T* data = nullptr;   // null for an absent tensor
  int64_t stride = 0;  // elements
};

// Calls body(T{}) with T the element type, f32 or bf16: the one place of a backend where its dtype is chosen.
template <class Body>
void with_float(DType dtype, Body body) {
  if (dtype == DType::kBF16) {
    body(bf16{});
  } else {
    CHECK(dtype == DType::kF32, "the CUDA backend computes in f32 and bf16, not in ", name_of(dtype));
    body(float{});
  }
}

// Calls body(T{}, R{}) for operands beside a residual stream of the same type or the next wider.
template <class Body>
void with_residual(DType dtype, DType residual, Body body) {
  with_float(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, bf16>)
      if (residual == DType::kF32) return body(zero, float{});
    CHECK(residual == dtype, "no residual stream in ", name_of(residual), " beside ", name_of(dtype));
    body(zero, zero);
  });
}

// Whether all of these are multiples of `bytes`.
inline bool aligned_to(int64_t bytes, std::initializer_list<const void*> addresses) {
  for (const void* address : addresses)
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) != 0) return false;
  return true;
}

// Whether the rows of all these tensors, cut into pieces of `size` elements, can be moved in packs. A piece may be a
// whole tensor without gaps.
inline bool moves_in_packs(std::initializer_list<const Tensor*> tensors, int64_t size, int pack) {
  bool fits = size % pack == 0;
  for (const Tensor* tensor : tensors) {
    if (!tensor->defined()) continue;
    const bool one_piece = tensor->num_dims() == 1 || tensor->numel() == size;
    fits = fits && (one_piece || tensor->row_stride() % pack == 0) &&
           aligned_to(pack * size_of(tensor->dtype()), {tensor->raw()});
  }
  return fits;
}

// Elements of 16 bytes, the most that one access moves.
template <class T>
constexpr int kWidestPack = 16 / static_cast<int>(sizeof(T));

// Calls body(std::integral_constant<int, pack>) with as many neighbours, kMost or 1, as these can be moved in.
template <int kMost = 4, class Body>
void with_pack(std::initializer_list<const Tensor*> tensors, int64_t size, Body body) {
  constexpr int kPack = kMost;
  if (moves_in_packs(tensors, size, kPack))
    body(std::integral_constant<int, kPack>{});
  else
    body(std::integral_constant<int, 1>{});
}

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace cuda

}  // namespace palimpsest
