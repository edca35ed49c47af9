// Softmax cross-entropy. One block a row of logits; sums of tokens by one block in a fixed order.
#include "kernels/cross_entropy.h"

#include <algorithm>

#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 512;

// One token's statistics, as they lie in `stats`.
struct TokenStats {
  float maximum, sum, target_logit;
};
static_assert(sizeof(TokenStats) == 3 * sizeof(float));

TokenStats* stats_of(const Tensor& stats) {
  return reinterpret_cast<TokenStats*>(stats.data<float>());
}

// A row is read once: a thread's sum is of powers beside its own maximum so far.
template <int kPack, class T>
__global__ __launch_bounds__(kThreads) void stats_kernel(TokenStats* stats, Rows<T> logits, const int32_t* targets,
                                                         int64_t Vl, int64_t vocab_begin) {
  constexpr int kAhead = 4;  // packs that are loaded before the first is used
  __shared__ float room[kWarp];
  const int64_t n = blockIdx.x;
  const T* row = logits[n];
  float maximum = -INFINITY, sum = 0.0F;
  for (int64_t first = static_cast<int64_t>(threadIdx.x) * kPack; first < Vl; first += kAhead * kThreads * kPack) {
    float x[kAhead][kPack], most = maximum;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) load(row + min(first + k * kThreads * kPack, Vl - kPack), x[k]);
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
#pragma unroll
      for (int c = 0; c < kPack; ++c) most = x[k][c] > most ? x[k][c] : most;
    if (most > maximum) {
      sum *= exp_of<T>(maximum - most);  // 0 at first
      maximum = most;
    }
    const float beside = maximum == -INFINITY ? 0.0F : maximum;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k * kThreads * kPack >= Vl) break;
#pragma unroll
      for (int c = 0; c < kPack; ++c) sum += exp_of<T>(x[k][c] - beside);
    }
  }
  const float own_maximum = maximum;
  maximum = block_max(maximum, room);
  sum = block_sum(sum == 0.0F ? 0.0F : sum * expf(own_maximum - maximum), room);
  if (threadIdx.x != 0) return;
  const int64_t local = targets[n] - vocab_begin;
  const bool here = targets[n] != kIgnoreTarget && local >= 0 && local < Vl;
  stats[n] = {maximum, sum, here ? to_f32(row[local]) : 0.0F};
}

__global__ void merge_kernel(TokenStats* stats, const TokenStats* parts, int64_t n, int64_t num_parts) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= n) return;
  TokenStats merged = {-INFINITY, 0.0F, 0.0F};
  for (int64_t part = 0; part < num_parts; ++part)
    merged.maximum = fmaxf(merged.maximum, parts[part * n + row].maximum);
  for (int64_t part = 0; part < num_parts; ++part) {
    const TokenStats share = parts[part * n + row];
    merged.sum += share.sum * expf(share.maximum - merged.maximum);
    merged.target_logit += share.target_logit;
  }
  stats[row] = merged;
}

__global__ void loss_kernel(float* loss, float* z_term, const TokenStats* stats, const int32_t* targets, int64_t count,
                            float z_loss) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= count) return;
  const bool scored = targets[n] != kIgnoreTarget;
  const float log_sum = logf(stats[n].sum), lse = stats[n].maximum + log_sum;
  loss[n] = scored ? (stats[n].maximum - stats[n].target_logit) + log_sum : 0.0F;
  if (z_term != nullptr) z_term[n] = scored ? z_loss * lse * lse : 0.0F;
}

template <int kPack, class T>
__global__ void backward_kernel(Rows<T> logits, const TokenStats* stats, const int32_t* targets, int64_t Vl,
                                int64_t vocab_begin, double z_loss, double grad_scale) {
  const int64_t n = blockIdx.x;
  T* row = logits[n];
  const bool scored = targets[n] != kIgnoreTarget;
  const float maximum = stats[n].maximum;
  const double lse = maximum + log(static_cast<double>(stats[n].sum));
  const float scale = scored ? static_cast<float>(grad_scale * (1.0 + 2.0 * z_loss * lse) / stats[n].sum) : 0.0F;
  const int64_t target = scored ? targets[n] - vocab_begin : -1;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kPack; i < Vl; i += kThreads * kPack) {
    float x[kPack];
    load(row + i, x);
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      x[c] = scored ? scale * exp_of<T>(x[c] - maximum) : 0.0F;
      if (i + c == target) x[c] -= static_cast<float>(grad_scale);
    }
    store(row + i, x);
  }
}

__global__ void sum_kernel(double* sum, const float* x, int64_t count) {
  __shared__ double room[kWarp];
  double own = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) own += x[i];
  own = block_sum(own, room);
  if (threadIdx.x == 0) *sum += own;
}

}  // namespace

void cross_entropy_stats(Stream& stream, Tensor stats, const Tensor& logits, const Tensor& targets,
                         int64_t vocab_begin) {
  with_float(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack<kWidestPack<T>>({&logits}, logits.dim(1), [&](auto pack) {
      launch(stream, stats_kernel<decltype(pack)::value, T>, {.grid_x = logits.dim(0), .threads = kThreads},
             stats_of(stats), Rows<T>(logits), targets.data<int32_t>(), logits.dim(1), vocab_begin);
    });
  });
}

void cross_entropy_merge_stats(Stream& stream, Tensor stats, const Tensor& parts) {
  const int64_t n = stats.dim(0), num_parts = n > 0 ? parts.dim(0) / n : 0;
  launch(stream, merge_kernel, {.grid_x = ceil_div(n, kThreads), .threads = kThreads}, stats_of(stats), stats_of(parts),
         n, num_parts);
}

void cross_entropy_loss(Stream& stream, Tensor token_loss, Tensor z_term, const Tensor& stats, const Tensor& targets,
                        double z_loss) {
  const int64_t n = stats.dim(0);
  launch(stream, loss_kernel, {.grid_x = ceil_div(n, kThreads), .threads = kThreads}, token_loss.data<float>(),
         z_term.defined() ? z_term.data<float>() : nullptr, stats_of(stats), targets.data<int32_t>(), n, z_loss);
}

void cross_entropy_backward(Stream& stream, Tensor logits, const Tensor& stats, const Tensor& targets,
                            int64_t vocab_begin, double z_loss, double grad_scale) {
  with_float(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack<kWidestPack<T>>({&logits}, logits.dim(1), [&](auto pack) {
      launch(stream, backward_kernel<decltype(pack)::value, T>, {.grid_x = logits.dim(0), .threads = kThreads},
             Rows<T>(logits), stats_of(stats), targets.data<int32_t>(), logits.dim(1), vocab_begin, z_loss, grad_scale);
    });
  });
}

void sum_into(Stream& stream, Tensor sum, const Tensor& x) {
  launch(stream, sum_kernel, {.threads = 1024}, sum.data<double>(), x.data<float>(), x.numel());
}

}  // namespace palimpsest::cuda
