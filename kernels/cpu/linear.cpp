#include "kernels/linear.h"

#include "kernels/cpu/blas.h"
#include "kernels/cpu/loops.h"

namespace palimpsest::cpu {

void linear_forward(Stream&, Tensor y, const Tensor& x, const Tensor& w, Write write) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    gemm(Transpose::kNo, Transpose::kYes, y.dim(0), y.dim(1), x.dim(1), T(1), x.data<T>(), x.row_stride(), w.data<T>(),
         w.row_stride(), write == Write::kAccumulate ? T(1) : T(0), y.data<T>(), y.row_stride());
  });
}

void linear_backward_input(Stream&, Tensor dx, const Tensor& dy, const Tensor& w, Write write) {
  with_real(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    gemm(Transpose::kNo, Transpose::kNo, dx.dim(0), dx.dim(1), dy.dim(1), T(1), dy.data<T>(), dy.row_stride(),
         w.data<T>(), w.row_stride(), write == Write::kAccumulate ? T(1) : T(0), dx.data<T>(), dx.row_stride());
  });
}

void linear_backward_weight(Stream&, Tensor dw, const Tensor& dy, const Tensor& x) {
  with_real(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    gemm(Transpose::kYes, Transpose::kNo, dw.dim(0), dw.dim(1), dy.dim(0), T(1), dy.data<T>(), dy.row_stride(),
         x.data<T>(), x.row_stride(), T(1), dw.data<T>(), dw.row_stride());
  });
}

}  // namespace palimpsest::cpu
