// With n = x * rstd and dn = dy * w:   dx = rstd * (dn - n * mean(dn * n)),   dw = sum over tokens of dy * n.
// The gated norm has y = w * n * phi(z), so dn = dy * w * phi(z), dw gains phi(z), and dz = dy * w * n * phi'(z).
#include "kernels/rms_norm.h"

#include <cmath>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/token_sums.h"
#include "kernels/cpu/vector_math.h"

namespace palimpsest::cpu {

namespace {

struct NormShape {
  explicit NormShape(const Tensor& x) : N(x.dim(0)), H(x.num_dims() == 3 ? x.dim(1) : 1), D(x.dim(-1)) {}
  int64_t N, H, D;
};

constexpr int64_t kTokens = 16;  // of one range of forward

template <class T>
T rstd_of(const T* x, int64_t D, T eps) {
  const T square = lane_sum<T>(D, [=](int64_t i) { return x[i] * x[i]; });
  return T(1) / std::sqrt(square / static_cast<T>(D) + eps);
}

// What a one-centred weight is added to.
template <class T>
T centre_of(NormWeight kind) {
  return kind == NormWeight::kOneCentred ? T(1) : T(0);
}

template <GateActivation kActivation, class T>
[[gnu::always_inline]] inline T gate_of(T z) {
  const T open = vector_sigmoid(z);
  return kActivation == GateActivation::kSigmoid ? open : z * open;
}

template <GateActivation kActivation, class T>
[[gnu::always_inline]] inline T gate_slope(T z) {
  const T open = vector_sigmoid(z);
  return kActivation == GateActivation::kSigmoid ? open * (T(1) - open) : open * (T(1) + z * (T(1) - open));
}

template <class To, class From>
void copy_row(To* to, const From* from, int64_t D) {
  for (int64_t i = 0; i < D; ++i) to[i] = static_cast<To>(from[i]);
}

// y = row(token, offset of the head)(i, n_i) over the normalised n_i. R: the type of x, where that is the residual
// stream. `kept`: a copy of x in either type, or absent.
template <class T, class R, class Row>
void forward_rows(const Tensor& y, const Tensor& rstd, const Tensor& x, double eps, const Tensor& kept, Row row) {
  const NormShape shape(x);
  const Rows<T> y_rows(y);
  const Rows<R> x_rows(x);
  T* rstd_out = rstd.data<T>();
  parallel_ranges(shape.N, kTokens, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (kept.defined() && kept.dtype() == DTypeOf<T>::value)
        copy_row(Rows<T>(kept)[n], x_rows[n], shape.H * shape.D);
      else if (kept.defined())
        copy_row(Rows<R>(kept)[n], x_rows[n], shape.H * shape.D);
      for (int64_t h = 0; h < shape.H; ++h) {
        const R* from = x_rows[n] + h * shape.D;
        T* to = y_rows[n] + h * shape.D;
        const T r = static_cast<T>(rstd_of(from, shape.D, static_cast<R>(eps)));
        rstd_out[n * shape.H + h] = r;
        const auto value = row(n, h * shape.D);
#pragma omp simd
        for (int64_t i = 0; i < shape.D; ++i) to[i] = value(i, static_cast<T>(from[i] * r));
      }
    }
  });
}

// row(token, offset of the head)(i, n_i, dy_i, sum) returns dn_i and adds to the sum of dw_i.
template <class T, class R, class Row>
void backward_rows(Stream& stream, const Tensor& dx, const Tensor& dw, const Tensor& dy, const Tensor& x,
                   const Tensor& rstd, Write write, Row row) {
  const NormShape shape(x);
  const Rows<T> dy_rows(dy), dx_rows(dx);
  const Rows<R> x_rows(x);
  const T* rstd_in = rstd.data<T>();
  const bool accumulates = write == Write::kAccumulate;
  const Arena::Scope scope(stream.scratch());
  // Of each range: its sums, and the dn of one row at a time.
  const Tensor room = allocate_token_sums(stream, dw.dtype(), shape.N, 2 * shape.D);
  const Tensor sums = room.columns(0, shape.D);
  const Rows<T> sum_rows(sums), dn_rows(room.columns(shape.D, shape.D));
  parallel_ranges(shape.N, kTokensPerSum, [=](int64_t begin, int64_t end) {
    T *sum = sum_rows[begin / kTokensPerSum], *dn = dn_rows[begin / kTokensPerSum];
    std::fill_n(sum, shape.D, T(0));
    for (int64_t n = begin; n < end; ++n)
      for (int64_t h = 0; h < shape.H; ++h) {
        const R* from = x_rows[n] + h * shape.D;
        const T* gradient = dy_rows[n] + h * shape.D;
        T* to = dx_rows[n] + h * shape.D;
        const T r = rstd_in[n * shape.H + h];
        const auto slope = row(n, h * shape.D);
#pragma omp simd
        for (int64_t i = 0; i < shape.D; ++i) dn[i] = slope(i, static_cast<T>(from[i] * r), gradient[i], sum[i]);
        const R dot = lane_sum<R>(shape.D, [=](int64_t i) { return dn[i] * from[i]; });
        const R mean = dot * r / static_cast<R>(shape.D);
#pragma omp simd
        for (int64_t i = 0; i < shape.D; ++i)
          to[i] = static_cast<T>((accumulates ? to[i] : T(0)) + r * (dn[i] - from[i] * r * mean));
      }
  });
  add_token_sums(dw.data<T>(), sums);
}

template <GateActivation kActivation, class T>
void gated_forward(const Tensor& y, const Tensor& rstd, const Tensor& o, const Tensor& z, const Tensor& w, double eps) {
  const Rows<T> z_rows(z);
  forward_rows<T, T>(y, rstd, o, eps, {}, [z_rows, weight = w.data<T>()](int64_t n, int64_t at) {
    return [weight, gate = z_rows[n] + at](int64_t i, T x) { return weight[i] * x * gate_of<kActivation>(gate[i]); };
  });
}

template <GateActivation kActivation, class T>
void gated_backward(Stream& stream, const Tensor& d_o, const Tensor& dz, const Tensor& dw, const Tensor& dy,
                    const Tensor& o, const Tensor& z, const Tensor& w, const Tensor& rstd, const Tensor& y) {
  const Rows<T> dz_rows(dz), z_rows(z);
  T* y_data = y.defined() ? y.data<T>() : nullptr;
  const auto row = [dz_rows, z_rows, y_data, y_stride = y.row_stride(), weight = w.data<T>()](int64_t n, int64_t at) {
    T* to_y = y_data == nullptr ? nullptr : y_data + n * y_stride + at;
    return [weight, gate = z_rows[n] + at, to_gate = dz_rows[n] + at, to_y](int64_t i, T x, T d, T& sum) {
      const T open = gate_of<kActivation>(gate[i]);
      if (to_y != nullptr) to_y[i] = weight[i] * x * open;
      to_gate[i] = d * weight[i] * x * gate_slope<kActivation>(gate[i]);
      sum += d * x * open;
      return d * weight[i] * open;
    };
  };
  backward_rows<T, T>(stream, d_o, dw, dy, o, rstd, Write::kOverwrite, row);
}

}  // namespace

void rms_norm_forward(Stream&, Tensor y, Tensor rstd, const Tensor& x, const Tensor& w, double eps, NormWeight kind,
                      const Tensor& kept) {
  with_residual(y.dtype(), x.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    forward_rows<T, decltype(wide)>(y, rstd, x, eps, kept,
                                    [weight = w.data<T>(), centre = centre_of<T>(kind)](int64_t, int64_t) {
                                      return [weight, centre](int64_t i, T n) { return (weight[i] + centre) * n; };
                                    });
  });
}

void rms_norm_backward(Stream& stream, Tensor dx, Tensor dw, const Tensor& dy, const Tensor& x, const Tensor& w,
                       const Tensor& rstd, NormWeight kind, Write write) {
  with_residual(dy.dtype(), x.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    backward_rows<T, decltype(wide)>(stream, dx, dw, dy, x, rstd, write,
                                     [weight = w.data<T>(), centre = centre_of<T>(kind)](int64_t, int64_t) {
                                       return [weight, centre](int64_t i, T n, T d, T& sum) {
                                         sum += d * n;
                                         return d * (weight[i] + centre);
                                       };
                                     });
  });
}

void gated_rms_norm_forward(Stream&, Tensor y, Tensor rstd, const Tensor& o, const Tensor& z, const Tensor& w,
                            double eps, GateActivation activation) {
  with_real(o.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (activation == GateActivation::kSigmoid)
      gated_forward<GateActivation::kSigmoid, T>(y, rstd, o, z, w, eps);
    else
      gated_forward<GateActivation::kSilu, T>(y, rstd, o, z, w, eps);
  });
}

void gated_rms_norm_backward(Stream& stream, Tensor d_o, Tensor dz, Tensor dw, const Tensor& dy, const Tensor& o,
                             const Tensor& z, const Tensor& w, const Tensor& rstd, GateActivation activation,
                             const Tensor& y) {
  with_real(o.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (activation == GateActivation::kSigmoid)
      gated_backward<GateActivation::kSigmoid, T>(stream, d_o, dz, dw, dy, o, z, w, rstd, y);
    else
      gated_backward<GateActivation::kSilu, T>(stream, d_o, dz, dw, dy, o, z, w, rstd, y);
  });
}

}  // namespace palimpsest::cpu
