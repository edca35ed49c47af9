// AdamW, SGD and the global norm. The control tensor stays on the GPU: kernels read the clip factor and the step's
// number from it, and do nothing in a step that is not applied.
#include "kernels/adamw.h"

#include <algorithm>

#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = kBatchThreads;
constexpr int64_t kNormBlocks = 528, kMaxBlocks = 4224;

// sums [gridDim.x]: each block's share of sum x^2.
template <int kPack>
__global__ void square_kernel(double* sums, const __grid_constant__ Batch<const float*> batch) {
  __shared__ double room[kWarp];
  const int which = batch.index();
  const float* x = batch.arrays[which];
  const int64_t n = batch.n[which], step = batch.template step<kPack>(which);
  double own = 0;
#pragma unroll 4
  for (int64_t i = batch.template begin<kPack>(which); i < n; i += step) {
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

struct AdamwArrays {
  float *p, *m, *v;
  const float* grad;
  float decay;  // lr * weight_decay
};

template <int kPack>
__global__ void adamw_kernel(const __grid_constant__ Batch<AdamwArrays> batch, const double* control,
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
  const auto eps = static_cast<float>(options.eps);
  const int which = batch.index();
  const auto [p, m, v, grad, decay] = batch.arrays[which];
  const int64_t n = batch.n[which], step = batch.template step<kPack>(which);
  for (int64_t i = batch.template begin<kPack>(which); i < n; i += step) {
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

// Whether flat arrays of this length can be moved in packs.
bool fits_pack(std::initializer_list<const Tensor*> tensors) {
  return moves_in_packs(tensors, (*tensors.begin())->numel(), kWidestPack<float>);
}
template <class Body>
void with_flat_pack(bool fits, Body body) {
  if (fits)
    body(std::integral_constant<int, kWidestPack<float>>{});
  else
    body(std::integral_constant<int, 1>{});
}

// Calls launch(batch, pack) for all items, those that fit packs first. of(item) gives the length, the arrays, and
// whether they do.
template <class Arrays>
struct Flat {
  int64_t n;
  Arrays arrays;
  bool fits;
};
template <class Arrays, class Items, class Of, class Launch>
void in_batches(const Items& items, int64_t most_blocks, Of of, Launch launch_batch) {
  for (const bool fits : {true, false})
    with_flat_pack(fits, [&](auto pack) {
      Batch<Arrays> batch;
      const auto send = [&] {
        if (batch.count > 0) launch_batch(batch, pack);
        batch = {};
      };
      for (const auto& item : items) {
        const Flat<Arrays> flat = of(item);
        if (flat.fits != fits || flat.n == 0) continue;
        batch.add(flat.n, blocks_for(flat.n, decltype(pack)::value, most_blocks), flat.arrays);
        if (batch.count == kMostArrays) send();
      }
      send();
    });
}

}  // namespace

void accumulate_norm_squared(Stream& stream, Tensor control, std::span<const Tensor> grads) {
  const Arena::Scope scope(stream.scratch());
  const int64_t most = std::min<int64_t>(kMostArrays, static_cast<int64_t>(grads.size()));
  const Tensor sums = stream.scratch().allocate(DType::kF64, {most * kNormBlocks});
  if (stream.is_planning()) return;
  in_batches<const float*>(
      grads, kNormBlocks,
      [](const Tensor& grad) {
        return Flat<const float*>{.n = grad.numel(), .arrays = grad.data<float>(), .fits = fits_pack({&grad})};
      },
      [&](const Batch<const float*>& batch, auto pack) {
        launch(stream, square_kernel<decltype(pack)::value>, {.grid_x = batch.blocks(), .threads = kThreads},
               sums.data<double>(), batch);
        launch(stream, add_squares_kernel, {.threads = 1024}, control.data<double>(), sums.data<double>(),
               batch.blocks());
      });
}

void require_finite(Stream& stream, Tensor control, const Tensor& sum) {
  launch(stream, require_finite_kernel, {.threads = 1}, control.data<double>(), sum.data<double>());
}

void prepare_step(Stream& stream, Tensor control, double max_norm) {
  launch(stream, prepare_kernel, {.threads = 1}, control.data<double>(), max_norm);
}

void adamw_step(Stream& stream, std::span<const AdamwOperands> operands, const Tensor& control,
                const AdamwOptions& options) {
  if (stream.is_planning()) return;
  in_batches<AdamwArrays>(
      operands, kMaxBlocks,
      [&](const AdamwOperands& each) {
        return Flat<AdamwArrays>{.n = each.param.numel(),
                                 .arrays = {.p = each.param.data<float>(),
                                            .m = each.m.data<float>(),
                                            .v = each.v.data<float>(),
                                            .grad = each.grad.data<float>(),
                                            .decay = static_cast<float>(options.lr * each.weight_decay)},
                                 .fits = fits_pack({&each.param, &each.m, &each.v, &each.grad})};
      },
      [&](const Batch<AdamwArrays>& batch, auto pack) {
        launch(stream, adamw_kernel<decltype(pack)::value>, {.grid_x = batch.blocks(), .threads = kThreads}, batch,
               control.data<double>(), options);
      });
}

void sgd_step(Stream& stream, Tensor param, const Tensor& grad, const Tensor& control, double lr) {
  const int64_t n = param.numel();
  with_flat_pack(fits_pack({&param, &grad}), [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    launch(stream, sgd_kernel<kPack>, {.grid_x = blocks_for(n, kPack, kMaxBlocks), .threads = kThreads},
           param.data<float>(), grad.data<float>(), control.data<double>(), n, lr);
  });
}

}  // namespace palimpsest::cuda
