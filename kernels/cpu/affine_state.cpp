#include "kernels/affine_state.h"

#include <algorithm>

#include "kernels/cpu/blas.h"
#include "kernels/cpu/loops.h"

namespace palimpsest::cpu {

void affine_identity(Stream&, Tensor maps) {
  with_real(maps.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t K = maps.dim(2), width = maps.dim(3), V = width - K;
    T* data = maps.data<T>();
    std::fill_n(data, maps.numel(), T(0));
    for (int64_t map = 0; map < maps.dim(0) * maps.dim(1); ++map)
      for (int64_t c = 0; c < K; ++c) data[(map * K + c) * width + V + c] = T(1);
  });
}

void affine_apply(Stream& stream, Tensor states, const Tensor& map, AffineDirection direction) {
  const Arena::Scope scope(stream.scratch());
  const Tensor before = stream.scratch().allocate(states.dtype(), states.shape());
  if (stream.is_planning()) return;
  with_real(states.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t K = states.dim(2), V = states.dim(3), width = V + K;
    const auto transpose = direction == AffineDirection::kAdjoint ? Transpose::kYes : Transpose::kNo;
    parallel_ranges(states.dim(1), 1, [&](int64_t head, int64_t) {
      T* state = states.data<T>() + head * K * V;
      T* old = before.data<T>() + head * K * V;
      const T* b = map.data<T>() + head * K * width;
      std::copy_n(state, K * V, old);
      for (int64_t c = 0; c < K; ++c) std::copy_n(b + c * width, V, state + c * V);
      gemm(transpose, Transpose::kNo, K, V, K, T(1), b + V, width, old, V, T(1), state, V);
    });
  });
}

}  // namespace palimpsest::cpu
