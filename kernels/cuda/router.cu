// Routing of tokens to experts, in f32. A warp has a token; its scores (backward: their gradient) and what groups of
// experts are worth lie in shared memory. Sums over tokens go by runs of them and then over the runs, in f64 and in a
// fixed order.
#include "kernels/router.h"

#include <cfloat>

#include "kernels/adamw.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kTokens = 4;  // of a block, a warp each
constexpr int kThreads = 256;
constexpr int64_t kRun = 256;  // tokens of a partial sum

struct Problem {
  Rows<float> scores, weights;  // [N, E], [N, k]
  Rows<int32_t> experts;        // [N, k]
  int64_t N, E, k, num_groups, top_groups;
  bool softmax, renormalize;
  float scale;
};

__device__ inline int lane_of() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

// The token of this warp.
__device__ inline int64_t token_of() {
  return static_cast<int64_t>(blockIdx.x) * kTokens + threadIdx.x / kWarp;
}

// Where the largest of values [n] is, of equals the first: in every lane.
__device__ inline int64_t largest_of(const float* values, int64_t n) {
  float best = -INFINITY;
  int64_t at = n;
  for (int64_t i = lane_of(); i < n; i += kWarp)
    if (at == n || values[i] > best) {
      best = values[i];
      at = i;
    }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, best, distance);
    const int64_t other_at = __shfl_xor_sync(kAllLanes, at, distance);
    // A lane without values has at = n, which never wins.
    if (other_at < n && (at == n || other > best || (other == best && other_at < at))) {
      best = other;
      at = other_at;
    }
  }
  return at;
}

// The two largest scores of a group, added; a group of one has that.
__device__ inline float worth_of_group(const float* keys, int64_t size) {
  float best = -INFINITY, second = -INFINITY;
  for (int64_t i = 0; i < size; ++i) {
    second = fmaxf(second, fminf(best, keys[i]));
    best = fmaxf(best, keys[i]);
  }
  return size > 1 ? best + second : best;
}

// Leaves -infinity in `keys` for the experts of all but the best groups. A chosen group's worth, which is finite,
// becomes -infinity.
__device__ inline void keep_best_groups(const Problem& p, float* keys, float* worth) {
  const int64_t size = p.E / p.num_groups;
  for (int64_t group = lane_of(); group < p.num_groups; group += kWarp)
    worth[group] = worth_of_group(keys + group * size, size);
  __syncwarp();
  for (int64_t i = 0; i < p.top_groups; ++i) {
    const int64_t group = largest_of(worth, p.num_groups);
    __syncwarp();
    if (lane_of() == 0) worth[group] = -INFINITY;
    __syncwarp();
  }
  for (int64_t e = lane_of(); e < p.E; e += kWarp)
    if (worth[e / size] > -INFINITY) keys[e] = -INFINITY;
  __syncwarp();
}

__device__ inline void score(const Problem& p, const float* logits, float* scores) {
  float largest = -INFINITY, sum = 0.0F;
  if (p.softmax) {
    for (int64_t e = lane_of(); e < p.E; e += kWarp) largest = fmaxf(largest, logits[e]);
    largest = warp_max(largest);
    for (int64_t e = lane_of(); e < p.E; e += kWarp) sum += expf(logits[e] - largest);
    sum = warp_sum(sum);
  }
  for (int64_t e = lane_of(); e < p.E; e += kWarp)
    scores[e] = p.softmax ? expf(logits[e] - largest) / sum : sigmoid(logits[e]);
}

__global__ void router_fwd_kernel(Problem p, Rows<float> logits, const float* bias) {
  extern __shared__ float shared[];
  const int64_t n = token_of();
  if (n >= p.N) return;
  float *keys = shared + threadIdx.x / kWarp * (p.E + p.num_groups), *worth = keys + p.E;
  float* s = p.scores[n];
  score(p, logits[n], s);
  for (int64_t e = lane_of(); e < p.E; e += kWarp) {
    const float key = bias == nullptr ? s[e] : s[e] + bias[e];
    // Every expert can be chosen, whatever its score: a row of NaN must still send its token somewhere.
    keys[e] = key > -INFINITY ? key : -FLT_MAX / 4;
  }
  __syncwarp();
  if (p.num_groups > 1) keep_best_groups(p, keys, worth);
  float sum = 0.0F;
  for (int64_t j = 0; j < p.k; ++j) {
    const int64_t e = largest_of(keys, p.E);
    sum += s[e];
    __syncwarp();
    if (lane_of() == 0) {
      p.experts[n][j] = static_cast<int32_t>(e);
      keys[e] = -INFINITY;
    }
    __syncwarp();
  }
  const float factor = p.scale / (p.renormalize ? sum + 1e-20F : 1.0F);
  for (int64_t j = lane_of(); j < p.k; j += kWarp) p.weights[n][j] = factor * s[p.experts[n][j]];
}

template <class T>
__global__ void router_bwd_kernel(Problem p, Rows<T> d_logits, Rows<float> d_weights, const double* slope) {
  extern __shared__ float shared[];
  const int64_t n = token_of();
  if (n >= p.N) return;
  float* d = shared + threadIdx.x / kWarp * p.E;
  const float *s = p.scores[n], *dw = d_weights[n];
  const int32_t* chosen = p.experts[n];
  // 1. by the scores: w_j = c s_j, or c s_j / sum, with c = scale
  for (int64_t e = lane_of(); e < p.E; e += kWarp) d[e] = slope == nullptr ? 0.0F : static_cast<float>(slope[e]);
  float sum = 1.0F, mean = 0.0F;
  if (p.renormalize) {
    sum = 1e-20F;
    for (int64_t j = 0; j < p.k; ++j) sum += s[chosen[j]];
    for (int64_t j = 0; j < p.k; ++j) mean += dw[j] * s[chosen[j]] / sum;
  }
  __syncwarp();
  for (int64_t j = lane_of(); j < p.k; j += kWarp) d[chosen[j]] += p.scale / sum * (dw[j] - mean);
  __syncwarp();
  // 2. by the logits
  float dot = 0.0F;
  if (p.softmax) {
    for (int64_t e = lane_of(); e < p.E; e += kWarp) dot += d[e] * s[e];
    dot = warp_sum(dot);
  }
  for (int64_t e = lane_of(); e < p.E; e += kWarp)
    d_logits[n][e] = from_f32<T>(s[e] * (p.softmax ? d[e] - dot : d[e] * (1.0F - s[e])));
}

Problem make_problem(const Routing& routing, const RouterOptions& options) {
  return {.scores = Rows<float>(routing.scores),
          .weights = Rows<float>(routing.weights),
          .experts = Rows<int32_t>(routing.experts),
          .N = routing.scores.dim(0),
          .E = routing.scores.dim(1),
          .k = routing.experts.dim(1),
          .num_groups = options.num_groups,
          .top_groups = options.top_groups,
          .softmax = options.score == RouterScore::kSoftmax,
          .renormalize = options.renormalize,
          .scale = static_cast<float>(options.scale)};
}

// A warp a token, with so many numbers of shared memory each.
LaunchShape token_shape(const Problem& p, int64_t numbers) {
  return {.grid_x = ceil_div(p.N, kTokens),
          .threads = kTokens * kWarp,
          .shared_bytes = kTokens * numbers * static_cast<int64_t>(sizeof(float))};
}

// Grid: x runs of tokens, y strips of experts. sums [runs, E].
__global__ void mass_kernel(double* sums, Rows<float> scores, int64_t N, int64_t E) {
  const int64_t e = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (e >= E) return;
  const int64_t begin = blockIdx.x * kRun;
  double sum = 0;
  for (int64_t n = begin; n < min(N, begin + kRun); ++n) sum += static_cast<double>(scores[n][e]);
  sums[blockIdx.x * E + e] = sum;
}

__global__ void tally_kernel(double* load, double* mass, const int32_t* offsets, const double* sums, int64_t runs,
                             int64_t E) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= E) return;
  load[e] += offsets[e + 1] - offsets[e];
  for (int64_t run = 0; run < runs; ++run) mass[e] += sums[run * E + e];
}

// One block.
__global__ void balance_kernel(double* sum, double* slope, Rows<double> load, Rows<double> mass, int64_t L, int64_t E,
                               BalanceOptions options) {
  __shared__ double room[kWarp];
  double total = 0;
  for (int64_t i = threadIdx.x; i < L * E; i += kThreads) total += load[i / E][i % E];
  total = block_sum(total, room);
  double term = 0;
  for (int64_t e = threadIdx.x; e < E; e += kThreads) {
    double given = 0, scores = 0;
    for (int64_t l = 0; l < L; ++l) {
      given += load[l][e];
      scores += mass[l][e];
    }
    const double share = total > 0 ? static_cast<double>(options.top_k) * given / total : 0.0;
    const double by_score = options.coefficient * static_cast<double>(E) / static_cast<double>(L) * share;
    term += by_score * scores;
    slope[e] = by_score * options.slope_scale;
  }
  term = block_sum(term, room);
  if (threadIdx.x == 0) *sum += term;
}

// One block.
__global__ void selection_bias_kernel(float* bias, const double* load, int64_t E, int64_t first, int64_t count,
                                      float speed, const double* control) {
  __shared__ double room[kWarp];
  double total = 0;
  for (int64_t e = threadIdx.x; e < E; e += kThreads) total += load[e];
  const double mean = block_sum(total, room) / static_cast<double>(E);
  if (control[kFinite] == 0.0) return;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const double given = load[first + i];
    if (given != mean) bias[i] += given < mean ? speed : -speed;
  }
}

}  // namespace

void router_forward(Stream& stream, const Routing& routing, const Tensor& logits, const Tensor& bias,
                    const RouterOptions& options) {
  const Problem p = make_problem(routing, options);
  launch(stream, router_fwd_kernel, token_shape(p, p.E + p.num_groups), p, Rows<float>(logits),
         bias.defined() ? bias.data<float>() : nullptr);
}

void router_backward(Stream& stream, Tensor d_logits, const Tensor& d_weights, const Routing& routing,
                     const Tensor& slope, const RouterOptions& options) {
  const Problem p = make_problem(routing, options);
  with_float(d_logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch(stream, router_bwd_kernel<T>, token_shape(p, p.E), p, Rows<T>(d_logits), Rows<float>(d_weights),
           slope.defined() ? slope.data<double>() : nullptr);
  });
}

void tally_experts(Stream& stream, Tensor load, Tensor mass, const Tensor& offsets, const Tensor& scores) {
  const Arena::Scope scope(stream.scratch());
  const int64_t N = scores.dim(0), E = scores.dim(1), strips = ceil_div(E, kThreads);
  const int64_t runs = mass.defined() ? ceil_div(N, kRun) : 0;
  const Tensor sums = stream.scratch().allocate(DType::kF64, {runs, E});
  launch(stream, mass_kernel, {.grid_x = runs, .grid_y = strips, .threads = kThreads}, sums.data<double>(),
         Rows<float>(scores), N, E);
  launch(stream, tally_kernel, {.grid_x = strips, .threads = kThreads}, load.data<double>(),
         mass.defined() ? mass.data<double>() : nullptr, offsets.data<int32_t>(), sums.data<double>(), runs, E);
}

void balance_experts(Stream& stream, Tensor sum, Tensor slope, const Tensor& load, const Tensor& mass,
                     const BalanceOptions& options) {
  launch(stream, balance_kernel, {.threads = kThreads}, sum.data<double>(), slope.data<double>(), Rows<double>(load),
         Rows<double>(mass), load.dim(0), load.dim(1), options);
}

void selection_bias_step(Stream& stream, Tensor bias, const Tensor& load, int64_t first, double speed,
                         const Tensor& control) {
  launch(stream, selection_bias_kernel, {.threads = kThreads}, bias.data<float>(), load.data<double>(), load.dim(0),
         first, bias.dim(0), static_cast<float>(speed), control.data<double>());
}

}  // namespace palimpsest::cuda
