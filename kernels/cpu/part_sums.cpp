#include "kernels/part_sums.h"

#include "kernels/cpu/loops.h"

namespace palimpsest::cpu {

void add_parts(Stream&, Tensor y, const Tensor& own, const Tensor& others) {
  with_real(own.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t size = own.numel(), total = others.numel();
    parallel_elements({&y, &own}, [=, to = y.data<T>(), first = own.data<T>(), parts = others.data<T>()](
                                      int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T sum = first[i];
        for (int64_t part = 0; part < total; part += size) sum += parts[part + i];
        to[i] = sum;
      }
    });
  });
}

}  // namespace palimpsest::cpu
