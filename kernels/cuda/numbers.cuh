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

// kPack neighbours, moved in one access; the address is a multiple of their size.
template <int kPack, class T>
struct alignas(kPack * sizeof(T)) Pack {
  T values[kPack];
};

template <int kPack, class T>
__device__ inline void load(const T* from, float (&x)[kPack]) {
  const Pack<kPack, T> pack = *reinterpret_cast<const Pack<kPack, T>*>(from);
#pragma unroll
  for (int i = 0; i < kPack; ++i) x[i] = to_f32(pack.values[i]);
}

template <int kPack, class T>
__device__ inline void store(T* to, const float (&x)[kPack]) {
  Pack<kPack, T> pack;
#pragma unroll
  for (int i = 0; i < kPack; ++i) pack.values[i] = from_f32<T>(x[i]);
  *reinterpret_cast<Pack<kPack, T>*>(to) = pack;
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

// Calls body(std::integral_constant<int, pack>) with as many neighbours, 4 or 1, as the rows of all these tensors,
// cut into pieces of `size` elements, can be moved in.
template <class Body>
void with_pack(std::initializer_list<const Tensor*> tensors, int64_t size, Body body) {
  constexpr int kPack = 4;
  bool fits = size % kPack == 0;
  for (const Tensor* tensor : tensors) {
    if (!tensor->defined()) continue;
    fits = fits && (tensor->num_dims() == 1 || tensor->row_stride() % kPack == 0) &&
           reinterpret_cast<uintptr_t>(tensor->raw()) % static_cast<uintptr_t>(kPack * size_of(tensor->dtype())) == 0;
  }
  if (fits)
    body(std::integral_constant<int, kPack>{});
  else
    body(std::integral_constant<int, 1>{});
}

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace cuda

}  // namespace palimpsest
