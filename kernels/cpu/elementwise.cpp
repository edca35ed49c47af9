#include "kernels/elementwise.h"

#include <algorithm>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"

namespace palimpsest::cpu {

void fill_zero(Stream&, Tensor y) {
  with_real(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> to(y);
    parallel_elements(
        {&y}, [=](int64_t row, int64_t begin, int64_t end) { std::fill(to[row] + begin, to[row] + end, T(0)); });
  });
}

void copy(Stream&, Tensor y, const Tensor& x) {
  with_residual(y.dtype(), x.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    using R = decltype(wide);
    const Rows<T> to(y);
    const Rows<R> from(x);
    parallel_elements({&y, &x}, [=](int64_t row, int64_t begin, int64_t end) {
      std::transform(from[row] + begin, from[row] + end, to[row] + begin,
                     [](R value) { return static_cast<T>(value); });
    });
  });
}

void copy_all(Stream& stream, std::span<const CopyOperands> operands) {
  for (const CopyOperands& each : operands) cpu::copy(stream, each.y, each.x);
}

void add(Stream&, Tensor y, const Tensor& a, const Tensor& b) {
  with_residual(b.dtype(), a.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    using R = decltype(wide);
    const Rows<R> y_rows(y), a_rows(a);
    const Rows<T> b_rows(b);
    parallel_elements({&y, &a, &b}, [=](int64_t row, int64_t begin, int64_t end) {
      R* to = y_rows[row];
      const R* first = a_rows[row];
      const T* second = b_rows[row];
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) to[i] = first[i] + second[i];
    });
  });
}

void sigmoid_gate_forward(Stream&, Tensor y, const Tensor& x, const Tensor& z) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> y_rows(y), x_rows(x), z_rows(z);
    parallel_elements({&y, &x, &z}, [=](int64_t row, int64_t begin, int64_t end) {
      T* to = y_rows[row];
      const T *value = x_rows[row], *gate = z_rows[row];
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) to[i] = value[i] * vector_sigmoid(gate[i]);
    });
  });
}

void sigmoid_gate_backward(Stream&, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z) {
  with_real(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> dx_rows(dx), dz_rows(dz), dy_rows(dy), x_rows(x), z_rows(z);
    parallel_elements({&dx, &dz, &dy, &x, &z}, [=](int64_t row, int64_t begin, int64_t end) {
      T *to_x = dx_rows[row], *to_z = dz_rows[row];
      const T *gradient = dy_rows[row], *value = x_rows[row], *gate = z_rows[row];
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const T open = vector_sigmoid(gate[i]);
        const T d = gradient[i];
        to_z[i] = d * value[i] * open * (T(1) - open);
        to_x[i] = d * open;
      }
    });
  });
}

}  // namespace palimpsest::cpu
