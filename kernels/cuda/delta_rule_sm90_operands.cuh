// The decayed operands Qb, Kb, Kt again, for the backward of the Hopper delta rule with vector decay, and what the
// chunk-local kernel needs besides: the norms and the products of decays over 16 rows.
//
// A block of four warps has one chunk and head, warp b the rows 16 b .. 16 b + 15. A lane has neighbouring channels of
// all 16 rows, so that products of decays run inside it. Decays are combined as in
// kernels/cuda/delta_rule_sm90_prepare.cuh: products of steps, nothing exceeds 1.
#pragma once

#include "kernels/cuda/delta_rule_sm90_prepare.cuh"

namespace palimpsest::cuda::sm90 {

// Neighbouring numbers of a row, in pairs.
template <int n>
__device__ inline void load_pairs(const __nv_bfloat16* from, bool valid, uint32_t (&pairs)[n / 2]) {
  if constexpr (n == 4) {
    const uint2 both = valid ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
    pairs[0] = both.x;
    pairs[1] = both.y;
  } else {
    pairs[0] = valid ? *reinterpret_cast<const uint32_t*>(from) : 0;
  }
}
template <int n>
__device__ inline float number(const uint32_t (&pairs)[n], int i) {
  return i % 2 == 0 ? low_of(pairs[i / 2]) : high_of(pairs[i / 2]);
}
template <int n>
__device__ inline void store_numbers(uint8_t* to, const float (&x)[n], float factor) {
  if constexpr (n == 4) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_bf16(x[0] * factor, x[1] * factor), pack_bf16(x[2] * factor, x[3] * factor));
  } else {
    *reinterpret_cast<uint32_t*>(to) = pack_bf16(x[0] * factor, x[1] * factor);
  }
}

constexpr int operands_bytes(int K) {
  return 4 * K * 4 + 3 * kChunk * 4;
}

// Sums over the lanes of 16 numbers each: lane l ends with the sum of number l / 2.
__device__ inline float sum_over_lanes(float (&x)[16], int lane) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int size = 8 >> step;
    const bool upper = lane / (2 * size) % 2 == 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= size) continue;
      const float keep = upper ? x[size + i] : x[i], give = upper ? x[i] : x[size + i];
      x[i] = keep + exchange(give, 2 * size);
    }
  }
  return x[0] + exchange(x[0], 1);
}

template <int K>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    delta_rule_operands_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w) {
  constexpr int kOwn = K / 32;  // channels of a lane
  const int64_t slot = blockIdx.x / p.HV, head = blockIdx.x % p.HV;
  const Chunk chunk = find_chunk(p, slot);
  if (chunk.n == 0) return;
  const int n = chunk.n;
  const int thread = static_cast<int>(threadIdx.x), b = thread / 32, lane = thread % 32;
  const int64_t key_head = head / (p.HV / p.H), slot_head = slot * p.HV + head;
  const uint32_t base = dynamic_shared();
  float* totals = shared_pointer<float>(base);                      // [4, K]
  float* norms = shared_pointer<float>(base + 4 * K * 4);           // [2, C]
  const uint32_t beta_address = base + 4 * K * 4 + 2 * kChunk * 4;  // [C]
  prepare_beta(p, w, chunk, slot, head, beta_address);

  const HeadGate gate(p, head);
  uint32_t q[16][kOwn / 2], k[16][kOwn / 2];
  float decay[16 * kOwn];  // of row i and channel c of this lane at kOwn i + c
  {
    const int64_t first = chunk.first + 16 * b;
    const auto load_rows = [&](const DeltaRows<const __nv_bfloat16>& rows, int64_t of_head,
                               uint32_t(&to)[16][kOwn / 2]) {
      const __nv_bfloat16* from = row_of(rows, first, of_head, K) + kOwn * lane;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        load_pairs<kOwn>(from, 16 * b + i < n, to[i]);
        from += rows.stride;
      }
    };
    uint32_t raw[16][kOwn / 2];
    load_rows(p.gate_logit, head, raw);
    load_rows(p.q, key_head, q);
    load_rows(p.k, key_head, k);
    float bias[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) bias[c] = p.dt_bias[head * K + kOwn * lane + c];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) decay[kOwn * i + c] = number(raw[i], c) + bias[c];
    }
    gate.decays(decay, decay);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) decay[kOwn * i + c] = 16 * b + i < n ? decay[kOwn * i + c] : 1.0F;
    }
  }
  {
    float q_sums[16], k_sums[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      q_sums[i] = 0.0F;
      k_sums[i] = 0.0F;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        q_sums[i] += number(q[i], c) * number(q[i], c);
        k_sums[i] += number(k[i], c) * number(k[i], c);
      }
    }
    const float q_sum = sum_over_lanes(q_sums, lane), k_sum = sum_over_lanes(k_sums, lane);
    if (lane % 2 == 0) {
      const int row = 16 * b + lane / 2;
      const float q_norm = l2_factor(p, q_sum), k_norm = l2_factor(p, k_sum);
      norms[row] = q_norm * p.scale;
      norms[kChunk + row] = k_norm;
      w.norms[slot_head * 2 * kChunk + row] = q_norm;
      w.norms[slot_head * 2 * kChunk + kChunk + row] = k_norm;
    }
  }
  {
    float total[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      total[c] = 1.0F;
#pragma unroll
      for (int i = 0; i < 16; ++i) total[c] *= decay[kOwn * i + c];
      totals[b * K + kOwn * lane + c] = total[c];
      w.totals[(slot_head * 4 + b) * K + kOwn * lane + c] = total[c];
    }
  }
  sync_block();
  float before[kOwn], after[kOwn];
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    const BlockDecays decays = decays_around(totals + kOwn * lane + c, K, b);
    before[c] = decays.before;
    after[c] = decays.after;
    if (b == 0) w.decay[slot_head * K + kOwn * lane + c] = decays.all;
  }
  const int64_t offset = image_offset(p, chunk, head, K) * 2;
  const int channel = kOwn * lane, half = channel / 64, piece = channel % 64 / 8;
  const auto place = [&](__nv_bfloat16* image, int row) {
    return reinterpret_cast<uint8_t*>(image) + offset + half * int64_t{n} * 128 + image_piece(row, piece) +
           channel % 8 * 2;
  };
  // Kt from the last row to the first, Qb and Kb from the first to the last.
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    const int row = 16 * b + i;
    float x[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      x[c] = number(k[i], c) * after[c];
      after[c] *= decay[kOwn * i + c];
    }
    if (row < n) store_numbers<kOwn>(place(w.kt, row), x, norms[kChunk + row]);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = 16 * b + i;
    float x[kOwn], y[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      before[c] *= decay[kOwn * i + c];
      x[c] = number(q[i], c) * before[c];
      y[c] = number(k[i], c) * before[c];
    }
    if (row < n) {
      store_numbers<kOwn>(place(w.qb, row), x, norms[row]);
      store_numbers<kOwn>(place(w.kb, row), y, norms[kChunk + row]);
    }
  }
}

}  // namespace palimpsest::cuda::sm90
