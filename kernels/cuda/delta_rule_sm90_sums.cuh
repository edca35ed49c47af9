// The last sums of the Hopper delta rule's backward, each in a fixed order.
#pragma once

#include "kernels/cuda/delta_rule_sm90_common.cuh"

namespace palimpsest::cuda::sm90 {

constexpr int kSumThreads = 256;
constexpr int kSumColumns = 32;
constexpr int kSumBytes = kSumThreads * 4;

// ddt_bias and dA_log of one head: 32 of their W + 1 numbers a block, summed over all slots.
__global__ void __launch_bounds__(kSumThreads)
    delta_rule_bwd_gate_sums_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w, int W) {
  const int groups = (W + kSumColumns) / kSumColumns;  // W + 1 columns
  const int64_t head = blockIdx.x / groups;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = static_cast<int>(blockIdx.x) % groups * kSumColumns + thread % kSumColumns;
  constexpr int kRuns = kSumThreads / kSumColumns;
  float* sums = shared_pointer<float>(dynamic_shared());
  float sum = 0.0F;
  if (column <= W) {
    const int64_t slots = num_slots(p);
    for (int64_t slot = thread / kSumColumns; slot < slots; slot += kRuns)
      sum += w.partials[(slot * p.HV + head) * (W + 1) + column];
  }
  sums[thread] = sum;
  sync_block();
  if (thread >= kSumColumns || column > W) return;
  for (int run = 1; run < kRuns; ++run) sum += sums[run * kSumColumns + thread];
  if (column < W) {
    p.ddt_bias[head * W + column] += sum;
  } else {
    p.dA_log[head] += sum;
  }
}

// dq and dk of a key head: the sum over the value heads that share it. Eight numbers a thread.
__global__ void __launch_bounds__(kSumThreads)
    delta_rule_bwd_group_sums_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w) {
  const int64_t index = blockIdx.x * int64_t{kSumThreads} + threadIdx.x, pieces = p.K / 8;
  if (index >= p.N * p.H * pieces) return;
  const int64_t piece = index % pieces, head = index / pieces % p.H, token = index / pieces / p.H;
  const int64_t group = p.HV / p.H;
  for (int which = 0; which < 2; ++which) {
    const __nv_bfloat16* from = (which == 0 ? w.dq : w.dk) + (token * p.HV + head * group) * p.K + 8 * piece;
    float sum[8] = {};
    for (int64_t i = 0; i < group; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(from + i * p.K);
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[2 * j] += low_of(words[j]);
        sum[2 * j + 1] += high_of(words[j]);
      }
    }
    __nv_bfloat16* to = row_of(which == 0 ? p.dq : p.dk, token, head, p.K) + 8 * piece;
    *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                               pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
  }
}

}  // namespace palimpsest::cuda::sm90
