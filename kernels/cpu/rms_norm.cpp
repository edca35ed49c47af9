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

template <GateActivation kActivation, class T>
void gated_forward(const Tensor& y, const Tensor& rstd, const Tensor& o, const Tensor& z, const Tensor& w, double eps) {
  const NormShape shape(o);
  const Rows<T> y_rows(y), o_rows(o), z_rows(z);
  T* rstd_out = rstd.data<T>();
  const T* weight = w.data<T>();
  parallel_ranges(shape.N, kTokens, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t h = 0; h < shape.H; ++h) {
        const T *from = o_rows[n] + h * shape.D, *gate = z_rows[n] + h * shape.D;
        T* to = y_rows[n] + h * shape.D;
        const T r = rstd_of(from, shape.D, static_cast<T>(eps));
        rstd_out[n * shape.H + h] = r;
#pragma omp simd
        for (int64_t i = 0; i < shape.D; ++i) to[i] = weight[i] * (from[i] * r) * gate_of<kActivation>(gate[i]);
      }
  });
}

template <GateActivation kActivation, class T>
void gated_backward(Stream& stream, const Tensor& d_o, const Tensor& dz, const Tensor& dw, const Tensor& dy,
                    const Tensor& o, const Tensor& z, const Tensor& w, const Tensor& rstd) {
  const NormShape shape(o);
  const Rows<T> d_o_rows(d_o), dz_rows(dz), dy_rows(dy), o_rows(o), z_rows(z);
  const T *weight = w.data<T>(), *rstd_in = rstd.data<T>();
  const Arena::Scope scope(stream.scratch());
  const Tensor sums = allocate_token_sums(stream, dw.dtype(), shape.N, shape.D);
  const Rows<T> sum_rows(sums);
  parallel_ranges(shape.N, kTokensPerSum, [=](int64_t begin, int64_t end) {
    T* sum = sum_rows[begin / kTokensPerSum];
    std::fill_n(sum, shape.D, T(0));
    for (int64_t n = begin; n < end; ++n)
      for (int64_t h = 0; h < shape.H; ++h) {
        const int64_t at = h * shape.D;
        const T *from = o_rows[n] + at, *gate = z_rows[n] + at, *gradient = dy_rows[n] + at;
        T *to = d_o_rows[n] + at, *to_gate = dz_rows[n] + at;
        const T r = rstd_in[n * shape.H + h];
        // dn and n * dn first: d_o holds dn until the mean is known.
#pragma omp simd
        for (int64_t i = 0; i < shape.D; ++i) {
          const T x = from[i] * r, d = gradient[i];
          const T open = gate_of<kActivation>(gate[i]);
          to_gate[i] = d * weight[i] * x * gate_slope<kActivation>(gate[i]);
          sum[i] += d * x * open;
          to[i] = d * weight[i] * open;
        }
        const T dot = lane_sum<T>(shape.D, [=](int64_t i) { return to[i] * from[i]; });
        const T mean = dot * r / static_cast<T>(shape.D);
#pragma omp simd
        for (int64_t i = 0; i < shape.D; ++i) to[i] = r * (to[i] - from[i] * r * mean);
      }
  });
  add_token_sums(dw.data<T>(), sums);
}

}  // namespace

void rms_norm_forward(Stream&, Tensor y, Tensor rstd, const Tensor& x, const Tensor& w, double eps, NormWeight kind) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const NormShape shape(x);
    const Rows<T> y_rows(y), x_rows(x);
    T* rstd_out = rstd.data<T>();
    const T* weight = w.data<T>();
    const T centre = centre_of<T>(kind);
    parallel_ranges(shape.N, kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t h = 0; h < shape.H; ++h) {
          const T* from = x_rows[n] + h * shape.D;
          T* to = y_rows[n] + h * shape.D;
          const T r = rstd_of(from, shape.D, static_cast<T>(eps));
          rstd_out[n * shape.H + h] = r;
#pragma omp simd
          for (int64_t i = 0; i < shape.D; ++i) to[i] = (weight[i] + centre) * (from[i] * r);
        }
    });
  });
}

void rms_norm_backward(Stream& stream, Tensor dx, Tensor dw, const Tensor& dy, const Tensor& x, const Tensor& w,
                       const Tensor& rstd, NormWeight kind) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const NormShape shape(x);
    const Rows<T> dx_rows(dx), dy_rows(dy), x_rows(x);
    const T *weight = w.data<T>(), *rstd_in = rstd.data<T>();
    const T centre = centre_of<T>(kind);
    const Arena::Scope scope(stream.scratch());
    const Tensor sums = allocate_token_sums(stream, dw.dtype(), shape.N, shape.D);
    const Rows<T> sum_rows(sums);
    parallel_ranges(shape.N, kTokensPerSum, [=](int64_t begin, int64_t end) {
      T* sum = sum_rows[begin / kTokensPerSum];
      std::fill_n(sum, shape.D, T(0));
      for (int64_t n = begin; n < end; ++n)
        for (int64_t h = 0; h < shape.H; ++h) {
          const T *from = x_rows[n] + h * shape.D, *gradient = dy_rows[n] + h * shape.D;
          T* to = dx_rows[n] + h * shape.D;
          const T r = rstd_in[n * shape.H + h];
          const T dot = lane_sum<T>(shape.D, [=](int64_t i) { return gradient[i] * (weight[i] + centre) * from[i]; });
          const T mean = dot * r / static_cast<T>(shape.D);
#pragma omp simd
          for (int64_t i = 0; i < shape.D; ++i) {
            const T n_i = from[i] * r, d = gradient[i];
            sum[i] += d * n_i;
            to[i] = r * (d * (weight[i] + centre) - n_i * mean);
          }
        }
    });
    add_token_sums(dw.data<T>(), sums);
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
                             const Tensor& z, const Tensor& w, const Tensor& rstd, GateActivation activation) {
  with_real(o.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (activation == GateActivation::kSigmoid)
      gated_backward<GateActivation::kSigmoid, T>(stream, d_o, dz, dw, dy, o, z, w, rstd);
    else
      gated_backward<GateActivation::kSilu, T>(stream, d_o, dz, dw, dy, o, z, w, rstd);
  });
}

}  // namespace palimpsest::cpu
