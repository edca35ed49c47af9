// First kernel of the Hopper delta rule with one decay a head (or none): as the vector kind, see
// kernels/cuda/delta_rule_sm90_prepare.cuh, but the decays of pairs multiply finished f32 scores of the raw q and k.
// Exponents are sums of g by dyadic levels: pair (i, j) of level h has D_ij = part_i + part_j, both counted from the
// last row of the first half.
#pragma once

#include "kernels/cuda/delta_rule_sm90_prepare.cuh"

namespace palimpsest::cuda::sm90 {

constexpr int kLevels = 6;

template <int K>
struct ScalarPrepareLayout {
  static constexpr int kPitch = 2 * K + 16;
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kChunk * kPitch;
  static constexpr int kScores = kK + kChunk * kPitch;  // L, Aqk, room for the merges of the inverse, M
  static constexpr int kM = kScores + kScoreBytes + kAqkBytes + kMergeBytes;
  static constexpr int kParts = kM + kScoreBytes;              // [levels, C] sums of g log2(e)
  static constexpr int kSums = kParts + kLevels * kChunk * 4;  // [2, C] G and U
  static constexpr int kNorms = kSums + 2 * kChunk * 4;        // [2, C] of q (with the scale) and k
  static constexpr int kBeta = kNorms + 2 * kChunk * 4;
  static constexpr int kBarrier = kBeta + kChunk * 4;
  static constexpr int kBytes = kBarrier + 16;
};

// Sums of the chunk's g: threads 0 .. 63 have one row each, the others none. g is 0 past the end.
__device__ inline void sum_scalar_gate(float g, int row, uint32_t parts_address, uint32_t sums_address) {
  float* parts = shared_pointer<float>(parts_address);
  float* sums = shared_pointer<float>(sums_address);
  float pre = g, suf = 0.0F, total = g;
  if (row < kChunk) {
#pragma unroll
    for (int level = 0; level < 5; ++level) {
      const bool second = (row >> level) % 2 == 1;
      parts[level * kChunk + row] = second ? pre : suf;
      const float other = exchange(total, 1 << level);
      pre += second ? other : 0.0F;
      suf += second ? 0.0F : other;
      total += other;
    }
    parts[5 * kChunk + row] = row >= 32 ? pre : suf;
    if (row % 32 == 0) sums[row / 32] = total;
  }
  sync_block();
  const float other = row < kChunk ? sums[row < 32 ? 1 : 0] : 0.0F;
  sync_block();
  if (row < kChunk) {
    sums[row] = row < 32 ? pre : pre + other;
    sums[kChunk + row] = row < 32 ? suf + other : suf;
  }
  sync_block();
}

// exp(D_ij) of a pair of rows j < i, else 0, from the sums by levels.
__device__ inline float pair_decay(const float* parts, int i, int j) {
  const float* level = parts + (j < i ? 31 - __clz(i ^ j) : 0) * kChunk;
  return j < i ? exp2_fast(level[i] + level[j]) : 0.0F;
}

// A head's shifted logit of a token.
__device__ inline float shifted_scalar_logit(const DeltaRuleSm90& p, int64_t token, int64_t head) {
  return __bfloat162float(*row_of(p.gate_logit, token, head, 1)) + (p.dt_bias == nullptr ? 0.0F : p.dt_bias[head]);
}

// g log2(e) of one row of a head.
__device__ inline float scalar_log2_decay(const DeltaRuleSm90& p, const HeadGate& gate, int64_t token, int64_t head) {
  if (gate.kind == DeltaGateKind::kConstant) return log2_fast(gate.constant);
  const float y = shifted_scalar_logit(p, token, head);
  return gate.kind == DeltaGateKind::kSoftplus ? -gate.rate * softplus2(y)
                                               : kLog2e * gate.bound * sigmoid_fast(gate.rate * y);
}

template <int K, bool kScoresToo>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    delta_rule_scalar_prepare_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w) {
  using Layout = ScalarPrepareLayout<K>;
  constexpr int kPitch = Layout::kPitch;
  const int64_t slot = blockIdx.x / p.HV, head = blockIdx.x % p.HV;
  const Chunk chunk = find_chunk(p, slot);
  if (chunk.n == 0) return;
  const int n = chunk.n;
  const int thread = static_cast<int>(threadIdx.x), b = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const uint32_t base = dynamic_shared();
  const uint32_t q_tile = base + Layout::kQ, k_tile = base + Layout::kK, barrier = base + Layout::kBarrier;
  if (thread == 0) {
    barrier_init(barrier, kPrepareThreads);
    barrier_init_fence();
  }
  sync_block();
  const int64_t key_head = head / (p.HV / p.H);
  copy_key_rows<K>(p, chunk, key_head, q_tile, k_tile);
  async_copy_arrive(barrier);
  prepare_beta(p, w, chunk, slot, head, base + Layout::kBeta);
  {
    const HeadGate gate(p, head);
    const float decay = thread < n ? scalar_log2_decay(p, gate, chunk.first + thread, head) : 0.0F;
    sum_scalar_gate(decay, thread, base + Layout::kParts, base + Layout::kSums);
  }
  const float* sums = shared_pointer<const float>(base + Layout::kSums);
  barrier_wait(barrier, 0);

  float* norms = shared_pointer<float>(base + Layout::kNorms);
  const int row_a = lane / 8 % 2 * 8 + lane % 8, piece_a = lane / 16;
  const int row_b = lane / 16 * 8 + lane % 8, piece_b = lane / 8 % 2;
  float scores[4][2][2][4] = {};  // [16 columns][8 columns][q, k]
  float q_sum[2] = {0.0F, 0.0F}, k_sum[2] = {0.0F, 0.0F};
#pragma unroll
  for (int step = 0; step < K / 16; ++step) {
    uint32_t q[4], k[4];
    load_matrices(q, q_tile + (16 * b + row_a) * kPitch + 32 * step + 16 * piece_a);
    load_matrices(k, k_tile + (16 * b + row_a) * kPitch + 32 * step + 16 * piece_a);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      q_sum[r % 2] += low_of(q[r]) * low_of(q[r]) + high_of(q[r]) * high_of(q[r]);
      k_sum[r % 2] += low_of(k[r]) * low_of(k[r]) + high_of(k[r]) * high_of(k[r]);
    }
    if constexpr (kScoresToo) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        if (block > b) break;
        uint32_t columns[4];
        load_matrices(columns, k_tile + (16 * block + row_b) * kPitch + 32 * step + 16 * piece_b);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          mma_k16(scores[block][part][0], q[0], q[1], q[2], q[3], columns[2 * part], columns[2 * part + 1]);
          mma_k16(scores[block][part][1], k[0], k[1], k[2], k[3], columns[2 * part], columns[2 * part + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for (int mask = 1; mask < 4; mask *= 2) {
      q_sum[i] += exchange(q_sum[i], mask);
      k_sum[i] += exchange(k_sum[i], mask);
    }
    const int row = 16 * b + 8 * i + g;
    const float q_norm = l2_factor(p, q_sum[i]), k_norm = l2_factor(p, k_sum[i]);
    if (t == 0) {
      norms[row] = q_norm * p.scale;
      norms[kChunk + row] = k_norm;
      if constexpr (!kScoresToo) {
        float* kept = w.norms + (slot * p.HV + head) * 2 * kChunk + row;
        kept[0] = q_norm;
        kept[kChunk] = k_norm;
      }
    }
  }
  sync_block();
  for (int c = thread; c < K; c += kPrepareThreads) w.decay[(slot * p.HV + head) * K + c] = exp2_fast(sums[kChunk - 1]);

  // The decayed operands: rows times a factor each.
  {
    const int64_t offset = image_offset(p, chunk, head, K);
    for (int i = thread; i < n * (K / 8); i += kPrepareThreads) {
      const int row = i / (K / 8), piece = i % (K / 8);
      const int64_t to = offset * 2 + (piece / 8) * int64_t{n} * 128 + image_piece(row, piece % 8);
      const float to_start = exp2_fast(sums[row]), to_end = exp2_fast(sums[kChunk + row]);
      const auto put = [&](__nv_bfloat16* image, uint32_t tile, float factor) {
        const uint4* x = shared_pointer<const uint4>(tile + row * kPitch + 16 * piece);
        *reinterpret_cast<uint4*>(reinterpret_cast<uint8_t*>(image) + to) = scaled(*x, factor);
      };
      put(w.qb, q_tile, norms[row] * to_start);
      put(w.kb, k_tile, norms[kChunk + row] * to_start);
      put(w.kt, k_tile, norms[kChunk + row] * to_end);
    }
  }
  if constexpr (kScoresToo) {
    const uint32_t l_address = base + Layout::kScores, aqk_address = l_address + kScoreBytes;
    float* l = shared_pointer<float>(l_address);
    const float* beta = shared_pointer<const float>(base + Layout::kBeta);
    const float* parts = shared_pointer<const float>(base + Layout::kParts);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 16 * b + 8 * i + g, column = 16 * block + 8 * part + 2 * t;
          float q[2] = {0.0F, 0.0F}, k[2] = {0.0F, 0.0F};
          if (block <= b) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int j = column + e;
              const float decay = pair_decay(parts, row, j);
              q[e] = scores[block][part][0][2 * i + e] * norms[row] * norms[kChunk + j] * (j == row ? 1.0F : decay);
              k[e] = scores[block][part][1][2 * i + e] * norms[kChunk + row] * norms[kChunk + j] * decay * beta[row];
            }
          }
          put_pair(aqk_address, row, column, q[0], q[1]);
          l[row * kScorePitch + column] = k[0];
          l[row * kScorePitch + column + 1] = k[1];
        }
      }
    }
    invert_unit_lower(b, lane, l_address, base + Layout::kM, aqk_address + kAqkBytes);
    store_scores(p, w, chunk, head, base + Layout::kM, aqk_address);
  }
}

}  // namespace palimpsest::cuda::sm90
