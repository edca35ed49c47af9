#include "kernels/swiglu.h"

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"

namespace palimpsest::cpu {

namespace {

constexpr int64_t kTokens = 8;  // of one range: tens of kilobytes

}  // namespace

void swiglu_forward(Stream&, Tensor h, const Tensor& gate_up) {
  with_real(h.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t F = h.dim(1);
    const Rows<T> h_rows(h), in(gate_up);
    parallel_ranges(h.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const T *gate = in[n], *up = gate + F;
        T* to = h_rows[n];
#pragma omp simd
        for (int64_t i = 0; i < F; ++i) to[i] = gate[i] * vector_sigmoid(gate[i]) * up[i];
      }
    });
  });
}

void swiglu_backward(Stream&, Tensor d_gate_up, Tensor h, const Tensor& dh, const Tensor& gate_up) {
  with_real(dh.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t F = dh.dim(1);
    const Rows<T> dh_rows(dh), in(gate_up), out(d_gate_up);
    auto backward = [=](auto h_row, int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const T *gate = in[n], *up = gate + F, *gradient = dh_rows[n];
        T *d_gate = out[n], *d_up = d_gate + F;
        auto to = h_row(n);
#pragma omp simd
        for (int64_t i = 0; i < F; ++i) {
          const T g = gate[i], u = up[i], d = gradient[i];
          const T open = vector_sigmoid(g);
          const T silu = g * open;
          d_gate[i] = d * u * (open + silu * (T(1) - open));
          d_up[i] = d * silu;
          if constexpr (std::is_pointer_v<decltype(to)>) to[i] = silu * u;
        }
      }
    };
    if (h.defined()) {
      const Rows<T> h_rows(h);
      parallel_ranges(dh.dim(0), kTokens,
                      [=](int64_t begin, int64_t end) { backward([=](int64_t n) { return h_rows[n]; }, begin, end); });
    } else {
      parallel_ranges(dh.dim(0), kTokens,
                      [=](int64_t begin, int64_t end) { backward([](int64_t) { return nullptr; }, begin, end); });
    }
  });
}

}  // namespace palimpsest::cpu
