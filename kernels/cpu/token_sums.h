// The last step of a sum over tokens, see kernels/token_sums.h.
#pragma once

#include "kernels/cpu/loops.h"
#include "kernels/token_sums.h"

namespace palimpsest::cpu {

// total [width] += the rows of sums, in order.
template <class T>
void add_token_sums(T* total, const Tensor& sums) {
  const Rows<T> rows(sums);
  const int64_t count = sums.dim(0);
  constexpr int64_t kColumns = 1024;
  parallel_ranges(sums.dim(1), kColumns, [=](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < count; ++row) {
      const T* sum = rows[row];
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) total[i] += sum[i];
    }
  });
}

}  // namespace palimpsest::cpu
