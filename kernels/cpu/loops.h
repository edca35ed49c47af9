// Parallel loops of the CPU backends. Work is cut the same way whatever the number of threads, so results never depend
// on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/tensor.h"

namespace palimpsest::cpu {

// Calls body(T{}) with T the element type, f32 or f64: the one place of a backend where its dtype is chosen.
template <class Body>
void with_real(DType dtype, Body body) {
  if (dtype == DType::kF64) {
    body(double{});
  } else {
    CHECK(dtype == DType::kF32, "the CPU backend computes in f32 and f64, not in ", name_of(dtype));
    body(float{});
  }
}

// Calls body(T{}, R{}) for operands beside a residual stream of the same type or the next wider.
template <class Body>
void with_residual(DType dtype, DType residual, Body body) {
  with_real(dtype, [&](auto zero) {
    if (residual == dtype)
      body(zero, zero);
    else
      with_real(residual, [&](auto wide) { body(zero, wide); });
  });
}

// The rows of a tensor, [0] to [dim(0) - 1].
template <class T>
struct Rows {
  explicit Rows(const Tensor& tensor) : data(tensor.data<T>()), stride(tensor.row_stride()) {}
  T* operator[](int64_t row) const { return data + row * stride; }

  T* data;
  int64_t stride;  // elements
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// body(begin, end) on ranges of `grain` indices of [0, n). Exceptions must not leave the body.
template <class Body>
void parallel_ranges(int64_t n, int64_t grain, Body body) {
  const int64_t count = ceil_div(n, grain);
#pragma omp parallel for schedule(static) if (count > 1)
  for (int64_t range = 0; range < count; ++range) body(range * grain, std::min(n, (range + 1) * grain));
}

// body(row, begin, end) on pieces of the rows of tensors of one shape, which count as one long row when no tensor has
// gaps between its rows.
template <class Body>
void parallel_elements(std::initializer_list<const Tensor*> tensors, Body body) {
  constexpr int64_t kGrain = 8192;  // elements: some microseconds of work
  bool contiguous = true;
  for (const Tensor* tensor : tensors) contiguous = contiguous && tensor->contiguous();
  const Tensor& any = **tensors.begin();
  if (contiguous) {
    parallel_ranges(any.numel(), kGrain, [&](int64_t begin, int64_t end) { body(int64_t{0}, begin, end); });
  } else {
    const int64_t size = any.row_size();
    parallel_ranges(any.dim(0), std::max<int64_t>(1, kGrain / std::max<int64_t>(size, 1)),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t row = begin; row < end; ++row) body(row, int64_t{0}, size);
                    });
  }
}

}  // namespace palimpsest::cpu
