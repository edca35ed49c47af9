#include "kernels/adamw.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/wide_sum.h"

namespace palimpsest::cpu {

namespace {

constexpr int64_t kGrain = 16384;  // elements of one range

}  // namespace

void accumulate_norm_squared(Stream&, Tensor control, std::span<const Tensor> grads) {
  for (const Tensor& grad : grads)
    with_real(grad.dtype(), [&](auto zero) {
      const auto* g = grad.data<decltype(zero)>();
      control.data<double>()[kNormSquared] += wide_sum(grad.numel(), [=](int64_t i) {
        const double value = g[i];
        return value * value;
      });
    });
}

void require_finite(Stream&, Tensor control, const Tensor& sum) {
  if (!std::isfinite(*sum.data<double>()))
    control.data<double>()[kNormSquared] = std::numeric_limits<double>::quiet_NaN();
}

void prepare_step(Stream&, Tensor control, double max_norm) {
  double* c = control.data<double>();
  const double norm = std::sqrt(c[kNormSquared]);
  const bool finite = std::isfinite(norm);
  c[kFinite] = finite ? 1.0 : 0.0;
  c[kClipFactor] = !finite ? 0.0 : max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0;
  if (finite) c[kAppliedSteps] += 1.0;
}

namespace {

void update(const AdamwOperands& operands, const double* c, const AdamwOptions& options) {
  with_real(operands.param.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *p = operands.param.data<T>(), *first = operands.m.data<T>(), *second = operands.v.data<T>();
    const T* g = operands.grad.data<T>();
    const auto clip = static_cast<T>(c[kClipFactor]);
    const auto beta1 = static_cast<T>(options.beta1), beta2 = static_cast<T>(options.beta2);
    const auto new1 = static_cast<T>(1.0 - options.beta1), new2 = static_cast<T>(1.0 - options.beta2);
    // 1 / (1 - b^t): the weights of t old gradients sum to 1 - b^t, since the moments start at 0.
    const auto unbias1 = static_cast<T>(options.lr / (1.0 - std::pow(options.beta1, c[kAppliedSteps])));
    const auto unbias2 = static_cast<T>(1.0 / (1.0 - std::pow(options.beta2, c[kAppliedSteps])));
    const auto eps = static_cast<T>(options.eps);
    const auto decay = static_cast<T>(options.lr * operands.weight_decay);
    parallel_ranges(operands.param.numel(), kGrain, [=](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const T gradient = g[i] * clip;
        const T mean = beta1 * first[i] + new1 * gradient;
        const T square = beta2 * second[i] + new2 * (gradient * gradient);
        first[i] = mean;
        second[i] = square;
        const T step = unbias1 * mean / (std::sqrt(unbias2 * square) + eps);
        p[i] -= decay * p[i] + step;
      }
    });
  });
}

}  // namespace

void adamw_step(Stream&, std::span<const AdamwOperands> operands, const Tensor& control, const AdamwOptions& options) {
  const double* c = control.data<double>();
  if (c[kFinite] == 0.0) return;
  for (const AdamwOperands& each : operands) update(each, c, options);
}

void sgd_step(Stream&, Tensor param, const Tensor& grad, const Tensor& control, double lr) {
  const double* c = control.data<double>();
  if (c[kFinite] == 0.0) return;
  with_real(param.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* p = param.data<T>();
    const T* g = grad.data<T>();
    const auto rate = static_cast<T>(lr * c[kClipFactor]);
    parallel_ranges(param.numel(), kGrain, [=](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) p[i] -= rate * g[i];
    });
  });
}

}  // namespace palimpsest::cpu
