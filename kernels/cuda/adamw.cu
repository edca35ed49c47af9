// AdamW, SGD and the global norm. The control tensor stays on the GPU: kernels read the clip factor and the step's
// number from it, and do nothing in a step that is not applied.
#include "kernels/adamw.h"

#include <algorithm>

#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kNormBlocks = 528, kMaxBlocks = 4224;

// sums [gridDim.x]: each block's share of sum x^2.
template <int kPack>
__global__ void square_kernel(double* sums, const float* x, int64_t n) {
  __shared__ double room[kWarp];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kPack;
  double own = 0;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack; i < n; i += step) {
    float values[kPack];
    load(x + i, values);
#pragma unroll
    for (int c = 0; c < kPack; ++c) own += static_cast<double>(values[c]) * values[c];
  }
  own = block_sum(own, room);
  if (threadIdx.x == 0) sums[blockIdx.x] = own;
}

__global__ void add_squares_kernel(double* control, const double* sums, int64_t count) {
  __shared__ double room[kWarp];
  double own = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) own += sums[i];
  own = block_sum(own, room);
  if (threadIdx.x == 0) control[kNormSquared] += own;
}

__global__ void require_finite_kernel(double* control, const double* sum) {
  if (!isfinite(*sum)) control[kNormSquared] = NAN;
}

__global__ void prepare_kernel(double* control, double max_norm) {
  const double norm = sqrt(control[kNormSquared]);
  const bool finite = isfinite(norm);
  control[kFinite] = finite ? 1.0 : 0.0;
  control[kClipFactor] = !finite ? 0.0 : max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0;
  if (finite) control[kAppliedSteps] += 1.0;
}

// The factors of one step, f32 as the elements.
struct StepFactors {
  float clip, unbias1, unbias2;
};

template <int kPack>
__global__ void adamw_kernel(float* p, float* m, float* v, const float* grad, const double* control, int64_t n,
                             AdamwOptions options) {
  __shared__ StepFactors factors;
  if (control[kFinite] == 0.0) return;
  if (threadIdx.x == 0) {
    // 1 / (1 - b^t): the weights of t old gradients sum to 1 - b^t, since the moments start at 0.
    factors = {static_cast<float>(control[kClipFactor]),
               static_cast<float>(options.lr / (1.0 - pow(options.beta1, control[kAppliedSteps]))),
               static_cast<float>(1.0 / (1.0 - pow(options.beta2, control[kAppliedSteps])))};
  }
  __syncthreads();
  const StepFactors f = factors;
  const auto beta1 = static_cast<float>(options.beta1), beta2 = static_cast<float>(options.beta2);
  const auto new1 = static_cast<float>(1.0 - options.beta1), new2 = static_cast<float>(1.0 - options.beta2);
  const auto eps = static_cast<float>(options.eps), decay = static_cast<float>(options.lr * options.weight_decay);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kPack;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack; i < n; i += step) {
    float param[kPack], first[kPack], second[kPack], g[kPack];
    load(p + i, param);
    load(m + i, first);
    load(v + i, second);
    load(grad + i, g);
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      const float gradient = g[c] * f.clip;
      first[c] = beta1 * first[c] + new1 * gradient;
      second[c] = beta2 * second[c] + new2 * (gradient * gradient);
      param[c] -= decay * param[c] + f.unbias1 * first[c] / (sqrtf(f.unbias2 * second[c]) + eps);
    }
    store(p + i, param);
    store(m + i, first);
    store(v + i, second);
  }
}

template <int kPack>
__global__ void sgd_kernel(float* p, const float* grad, const double* control, int64_t n, double lr) {
  if (control[kFinite] == 0.0) return;
  const auto rate = static_cast<float>(lr * control[kClipFactor]);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kPack;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack; i < n; i += step) {
    float param[kPack], g[kPack];
    load(p + i, param);
    load(grad + i, g);
#pragma unroll
    for (int c = 0; c < kPack; ++c) param[c] -= rate * g[c];
    store(p + i, param);
  }
}

int64_t blocks_for(int64_t n, int pack, int64_t most) {
  return std::min(most, ceil_div(n, static_cast<int64_t>(kThreads) * pack));
}

// with_pack for flat arrays: their length must divide too.
template <class Body>
void with_flat_pack(std::initializer_list<const Tensor*> tensors, Body body) {
  const int64_t n = (*tensors.begin())->numel();
  bool fits = n % 4 == 0;
  for (const Tensor* tensor : tensors) fits = fits && reinterpret_cast<uintptr_t>(tensor->raw()) % 16 == 0;
  if (fits)
    body(std::integral_constant<int, 4>{});
  else
    body(std::integral_constant<int, 1>{});
}

}  // namespace

void accumulate_norm_squared(Stream& stream, Tensor control, const Tensor& grad) {
  const int64_t n = grad.numel();
  const Arena::Scope scope(stream.scratch());
  const Tensor sums = stream.scratch().allocate(DType::kF64, {kNormBlocks});
  with_flat_pack({&grad}, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t blocks = blocks_for(n, kPack, kNormBlocks);
    launch(stream, square_kernel<kPack>, {.grid_x = blocks, .threads = kThreads}, sums.data<double>(),
           grad.data<float>(), n);
    launch(stream, add_squares_kernel, {.threads = 1024}, control.data<double>(), sums.data<double>(), blocks);
  });
}

void require_finite(Stream& stream, Tensor control, const Tensor& sum) {
  launch(stream, require_finite_kernel, {.threads = 1}, control.data<double>(), sum.data<double>());
}

void prepare_step(Stream& stream, Tensor control, double max_norm) {
  launch(stream, prepare_kernel, {.threads = 1}, control.data<double>(), max_norm);
}

void adamw_step(Stream& stream, Tensor param, Tensor m, Tensor v, const Tensor& grad, const Tensor& control,
                const AdamwOptions& options) {
  const int64_t n = param.numel();
  with_flat_pack({&param, &m, &v, &grad}, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    launch(stream, adamw_kernel<kPack>, {.grid_x = blocks_for(n, kPack, kMaxBlocks), .threads = kThreads},
           param.data<float>(), m.data<float>(), v.data<float>(), grad.data<float>(), control.data<double>(), n,
           options);
  });
}

void sgd_step(Stream& stream, Tensor param, const Tensor& grad, const Tensor& control, double lr) {
  const int64_t n = param.numel();
  with_flat_pack({&param, &grad}, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    launch(stream, sgd_kernel<kPack>, {.grid_x = blocks_for(n, kPack, kMaxBlocks), .threads = kThreads},
           param.data<float>(), grad.data<float>(), control.data<double>(), n, lr);
  });
}

}  // namespace palimpsest::cuda
