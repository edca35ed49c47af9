// The end of the delta rule's backward, token by token: through the l2 norm, the gate and the sigmoid of beta, with the
// sums over tokens of the gate's parameters.
#include "kernels/cuda/delta_rule.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 64;  // of one block of the gate's kernel

// dx = factor * (dx^ - x^ (x^ . dx^)), dx^ summed over the value heads of a key head. A warp: a token and key head; a
// lane: packs of neighbouring channels.
template <class T>
__global__ void norm_kernel(const __grid_constant__ DeltaProblem<T> p, Rows<T> x, Rows<T> dx, const float* factors,
                            const float* dx_normalised) {
  constexpr int kPack = 4, kPacks = kMaxKeySize / (kWarp * kPack);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (i >= p.N * p.H) return;
  const int64_t token = i / p.H, head = i % p.H, group = p.HV / p.H;
  const float factor = factors[i];
  const T* from = x[token] + head * p.K;
  T* to = dx[token] + head * p.K;
  float d[kPacks][kPack] = {}, normalised[kPacks][kPack], dot = 0.0F;
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t first = (lane + j * kWarp) * kPack;
    if (first < p.Kp)
      for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        float share[kPack];
        load(dx_normalised + (token * p.HV + h) * p.Kp + first, share);
#pragma unroll
        for (int c = 0; c < kPack; ++c) d[j][c] += share[c];
      }
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      normalised[j][c] = first + c < p.K ? to_f32(from[first + c]) * factor : 0.0F;
      dot += d[j][c] * normalised[j][c];
    }
  }
  dot = p.l2norm ? warp_sum(dot) : 0.0F;
#pragma unroll
  for (int j = 0; j < kPacks; ++j)
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      const int64_t channel = (lane + j * kWarp) * kPack + c;
      if (channel < p.K) to[channel] = from_f32<T>(factor * (d[j][c] - normalised[j][c] * dot));
    }
}

// dlogit of beta = (Y . X) (1 - beta / beta_scale).
template <class T>
__global__ void beta_kernel(const __grid_constant__ DeltaProblem<T> p, Rows<T> dbeta_logit, const float* shares,
                            int64_t num_shares) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.N * p.HV) return;
  float sum = 0.0F;
  for (int64_t share = 0; share < num_shares; ++share) sum += shares[share * p.N * p.HV + i];
  const int64_t token = i / p.HV, head = i % p.HV;
  dbeta_logit[token][head] = from_f32<T>(sum * sigmoid(-to_f32(p.beta_logit[token][head])));
}

struct GateGradient {
  float logit, rate;  // dlogit and the share of dA_log
};

template <class T>
__device__ GateGradient gate_gradient(const DeltaProblem<T>& p, int64_t token, int64_t head, int64_t channel,
                                      float rate, float dg) {
  using Kind = typename DecayGate<T>::Kind;
  const float y = p.gate.shifted(token, head, channel);
  if (p.gate.kind == Kind::kBounded) {
    const float u = expf(-fabsf(rate * y));  // sigmoid(z) sigmoid(-z) = u / (1 + u)^2
    const float d = dg * p.gate.lower_bound * rate * u / ((1.0F + u) * (1.0F + u));
    return {d, d * y};
  }
  return {-dg * rate * sigmoid(y), dg * p.gate.log_decay(token, head, channel, rate)};
}

// Grid: x runs of kTokens tokens, y value heads. Threads take channels (vector) or tokens (scalar).
// bias_sums [runs, HV * W], rate_sums [runs, HV].
template <class T>
__global__ void gate_kernel(const __grid_constant__ DeltaProblem<T> p, Rows<T> dgate_logit, const float* dg,
                            float* bias_sums, float* rate_sums) {
  __shared__ float room[kWarp];
  const int64_t head = blockIdx.y, begin = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int64_t end = min(p.N, begin + kTokens), W = p.gate.W;
  const float rate = p.gate.rate(head);
  float rate_sum = 0.0F;
  if (p.gate.vector) {
    for (int64_t c = threadIdx.x; c < W; c += kThreads) {
      float bias_sum = 0.0F;
      for (int64_t token = begin; token < end; ++token) {
        const GateGradient d = gate_gradient(p, token, head, c, rate, dg[(token * p.HV + head) * p.Kp + c]);
        dgate_logit[token][head * W + c] = from_f32<T>(d.logit);
        bias_sum += d.logit;
        rate_sum += d.rate;
      }
      bias_sums[(blockIdx.x * p.HV + head) * W + c] = bias_sum;
    }
  } else {
    float bias_sum = 0.0F;
    const int64_t token = begin + threadIdx.x;
    if (token < end) {
      float sum = 0.0F;
      for (int64_t slice = 0; slice < ceil_div(p.Kp, kSlice); ++slice) sum += dg[(slice * p.N + token) * p.HV + head];
      const GateGradient d = gate_gradient(p, token, head, 0, rate, sum);
      dgate_logit[token][head] = from_f32<T>(d.logit);
      bias_sum = d.logit;
      rate_sum = d.rate;
    }
    bias_sum = block_sum(bias_sum, room);
    if (threadIdx.x == 0) bias_sums[blockIdx.x * p.HV + head] = bias_sum;
  }
  rate_sum = block_sum(rate_sum, room);
  if (threadIdx.x == 0) rate_sums[blockIdx.x * p.HV + head] = rate_sum;
}

}  // namespace

template <class T>
void launch_finish(Stream& stream, const DeltaProblem<T>& p, const FinishGradients<T>& f) {
  const LaunchShape key_heads = {.grid_x = ceil_div(p.N * p.H, kThreads / kWarp), .threads = kThreads};
  launch(stream, norm_kernel<T>, key_heads, p, p.q, f.dq, p.q_factor, f.dq_normalised);
  launch(stream, norm_kernel<T>, key_heads, p, p.k, f.dk, p.k_factor, f.dk_normalised);
  if (p.delta)
    launch(stream, beta_kernel<T>, {.grid_x = ceil_div(p.N * p.HV, kThreads), .threads = kThreads}, p, f.dbeta_logit,
           f.dbeta_shares, ceil_div(p.V, 32));
  if (!p.gate.has_gradient()) return;
  const Arena::Scope scope(stream.scratch());
  const int64_t runs = ceil_div(p.N, kTokens);
  const Tensor bias_sums = stream.scratch().allocate(DType::kF32, Shape{runs, p.HV * p.gate.W});
  const Tensor rate_sums = stream.scratch().allocate(DType::kF32, Shape{runs, p.HV});
  launch(stream, gate_kernel<T>, {.grid_x = runs, .grid_y = p.HV, .threads = kThreads}, p, f.dgate_logit, f.dg,
         bias_sums.data<float>(), rate_sums.data<float>());
  add_rows_to(stream, f.ddt_bias, bias_sums.data<float>(), runs, p.HV * p.gate.W);
  add_rows_to(stream, f.dA_log, rate_sums.data<float>(), runs, p.HV);
}

template void launch_finish(Stream&, const DeltaProblem<float>&, const FinishGradients<float>&);
template void launch_finish(Stream&, const DeltaProblem<bf16>&, const FinishGradients<bf16>&);

}  // namespace palimpsest::cuda
