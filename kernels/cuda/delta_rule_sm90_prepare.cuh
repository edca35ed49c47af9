// First kernel of the Hopper delta rule with vector decay: from the raw inputs of a chunk and head the decayed operands
// Qb, Kb, Kt, the scores Aqk, and M = (I + diag(beta) P)^-1.
//
// A block of four warps has one chunk and head, warp b the rows 16 b .. 16 b + 15, a lane the elements that fragment A
// of a product gives it. All factors are products of step decays exp(g), combined over dyadic levels as the note in
// kernels/cpu/delta_rule_chunk.h says: the exponentials are taken once, nothing exceeds 1, and a product that
// underflows is 0 as it should be. Levels 1, 2, 4 are pairs inside 8 rows: fragment A holds 8 rows of q and the same 8
// of k, fragment B the 8 of k. Level 8 joins the two halves of a warp; levels 16 and 32 take B from another warp.
#pragma once

#include "kernels/cuda/delta_rule_sm90_common.cuh"

namespace palimpsest::cuda::sm90 {

constexpr int kPrepareThreads = 128;
constexpr int kScorePitch = 68;                        // f32
constexpr int kAqkPitch = 144;                         // bytes
constexpr int kMergePitch = 12;                        // f32
constexpr int kScoreBytes = kChunk * kScorePitch * 4;  // L, later beside it M
constexpr int kAqkBytes = kChunk * kAqkPitch;
constexpr int kMergeBytes = 4 * 32 * kMergePitch * 4;
constexpr int kExchangeBytes = 2 * 4 * 512;

template <int K>
struct PrepareLayout {
  static constexpr int kPitch = 2 * K + 16;  // of a row of q or k: no two rows of eight in the same banks
  static constexpr int kStepBytes = 1024;    // f32 decays of 16 rows and 16 channels, in the order of the lanes
  static constexpr int kWarpSteps = K / 16 * kStepBytes;
  static constexpr int kScores = kScoreBytes + kAqkBytes + kMergeBytes;
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kChunk * kPitch;
  static constexpr int kSteps = kK + kChunk * kPitch;  // raw gate, then decays, then Kt; later the scores
  static constexpr int kExchange = kSteps + (4 * kWarpSteps > kScores ? 4 * kWarpSteps : kScores);
  static constexpr int kTotals = kExchange + kExchangeBytes;
  static constexpr int kBeta = kTotals + 4 * K * 4;
  static constexpr int kBarrier = kBeta + kChunk * 4;
  static constexpr int kBytes = kBarrier + 16;
  static_assert(2 * kChunk * kPitch >= kScoreBytes, "M takes the place of q and k");
  static_assert(16 * kPitch <= kWarpSteps, "the raw gate's rows of a warp lie where its decays will");
};

// M - I of the chunk from L (strictly lower, f32) by substitution in the four diagonal blocks, one a warp, and
// M_21 = -M_22 (L_21 M_11) for blocks of 16, then 32 rows in tf32. Every thread of the block calls it.
__device__ inline void invert_unit_lower(int warp, int lane, uint32_t l_address, uint32_t m_address,
                                         uint32_t merge_address) {
  const float* l = shared_pointer<const float>(l_address);
  float* m = shared_pointer<float>(m_address);
  float* part = shared_pointer<float>(merge_address) + warp * 32 * kMergePitch;
  const int g = lane / 4, t = lane % 4;
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kScorePitch; i += kPrepareThreads) m[i] = 0.0F;
  sync_block();
  {
    const int column = lane % 16;
    const float* block = l + (16 * warp) * kScorePitch + 16 * warp;
    float y[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) y[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
    for (int j = 0; j < 15; ++j) {
#pragma unroll
      for (int i = j + 1; i < 16; ++i) y[i] -= block[i * kScorePitch + j] * y[j];
    }
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) m[(16 * warp + i) * kScorePitch + 16 * warp + column] = y[i];
    }
  }
  sync_block();
  // D [16 tiles, 8] = A [16 tiles, 8 steps] B [8 steps, 8] at the given places
  const auto multiply = [&](int tiles, const float* a, const float* b, int b_pitch, float(&d)[2][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile >= tiles) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) d[tile][i] = 0.0F;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step >= 2 * tiles) break;
        const float* rows = a + (16 * tile + g) * kScorePitch + 8 * step + t;
        const float* columns = b + (8 * step + t) * b_pitch + g;
        mma_tf32(d[tile], to_tf32(rows[0]), to_tf32(rows[8 * kScorePitch]), to_tf32(rows[4]),
                 to_tf32(rows[8 * kScorePitch + 4]), to_tf32(columns[0]), to_tf32(columns[4 * b_pitch]));
      }
    }
  };
  const auto put = [&](int tiles, const float(&d)[2][4], float sign, float* to, int pitch) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile >= tiles) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(16 * tile + g + 8 * (i / 2)) * pitch + 2 * t + i % 2] = sign * d[tile][i];
    }
  };
  const auto merge = [&](int tiles, int row, int column) {  // 8 columns of M_21, whose rows begin at `row`
    const int begin = row - 16 * tiles;                     // of M_11
    float d[2][4];
    multiply(tiles, l + row * kScorePitch + begin, m + begin * kScorePitch + column, kScorePitch, d);
    put(tiles, d, 1.0F, part, kMergePitch);
    sync_warp();
    multiply(tiles, m + row * kScorePitch + row, part, kMergePitch, d);
    put(tiles, d, -1.0F, m + row * kScorePitch + column, kScorePitch);
    sync_warp();
  };
  merge(1, 32 * (warp / 2) + 16, 32 * (warp / 2) + 8 * (warp % 2));
  sync_block();
  merge(2, 32, 8 * warp);
  sync_block();
}

// Writes M - I and Aqk of the chunk as images.
__device__ inline void store_scores(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, const Chunk& chunk,
                                    int64_t head, uint32_t m_address, uint32_t aqk_address) {
  const float* m = shared_pointer<const float>(m_address);
  const int64_t offset = image_offset(p, chunk, head, kChunk);
  auto* m_image = reinterpret_cast<uint8_t*>(w.m + offset);
  auto* aqk_image = reinterpret_cast<uint8_t*>(w.aqk + offset);
  for (int i = static_cast<int>(threadIdx.x); i < chunk.n * 8; i += kPrepareThreads) {
    const int row = i / 8, piece = i % 8;
    const float* from = m + row * kScorePitch + 8 * piece;
    const auto at = [&](int j) { return 8 * piece + j < row ? from[j] : 0.0F; };
    const uint4 packed =
        make_uint4(pack_bf16(at(0), at(1)), pack_bf16(at(2), at(3)), pack_bf16(at(4), at(5)), pack_bf16(at(6), at(7)));
    *reinterpret_cast<uint4*>(m_image + image_piece(row, piece)) = packed;
    *reinterpret_cast<uint4*>(aqk_image + image_piece(row, piece)) =
        *shared_pointer<const uint4>(aqk_address + row * kAqkPitch + 16 * piece);
  }
}

// One f32 pair of scores into the bf16 tile of Aqk.
__device__ inline void put_pair(uint32_t aqk_address, int row, int column, float low, float high) {
  *shared_pointer<uint32_t>(aqk_address + row * kAqkPitch + 2 * column) = pack_bf16(low, high);
}

// beta of the chunk's tokens, 0 past the end, in shared and in global memory.
__device__ inline void prepare_beta(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, const Chunk& chunk,
                                    int64_t slot, int64_t head, uint32_t beta_address) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kChunk) return;
  float beta = 0.0F;
  if (i < chunk.n) {
    const float logit = __bfloat162float(*row_of(p.beta_logit, chunk.first + i, head, 1));
    beta = p.beta_scale * sigmoid_fast(logit);
    beta = beta < kSmallestBeta ? kSmallestBeta : beta;
  }
  *shared_pointer<float>(beta_address + 4 * i) = beta;
  w.beta[(slot * p.HV + head) * kChunk + i] = beta;
}

// Asks for the raw q and k of a chunk, rows 2 K + 16 bytes apart.
template <int K>
__device__ inline void copy_key_rows(const DeltaRuleSm90& p, const Chunk& chunk, int64_t key_head, uint32_t q_tile,
                                     uint32_t k_tile) {
  constexpr int kPitch = 2 * K + 16;
  copy_token_rows<K, kPrepareThreads>(row_of(p.q, chunk.first, key_head, K), p.q.stride, chunk.n,
                                      [=](int row) { return q_tile + row * kPitch; });
  copy_token_rows<K, kPrepareThreads>(row_of(p.k, chunk.first, key_head, K), p.k.stride, chunk.n,
                                      [=](int row) { return k_tile + row * kPitch; });
}

template <int K>
__global__ void __launch_bounds__(kPrepareThreads, 3)
    delta_rule_prepare_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w) {
  using Layout = PrepareLayout<K>;
  constexpr int kPitch = Layout::kPitch, kSteps = K / 16;
  const int64_t slot = blockIdx.x / p.HV, head = blockIdx.x % p.HV;
  const Chunk chunk = find_chunk(p, slot);
  if (chunk.n == 0) return;
  const int n = chunk.n;
  const int thread = static_cast<int>(threadIdx.x), b = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const uint32_t base = dynamic_shared();
  const uint32_t q_tile = base + Layout::kQ, k_tile = base + Layout::kK;
  const uint32_t steps = base + Layout::kSteps + b * Layout::kWarpSteps;  // of this warp
  const uint32_t barrier = base + Layout::kBarrier;
  float* totals = shared_pointer<float>(base + Layout::kTotals);  // [4, K]

  if (thread == 0) {
    barrier_init(barrier, kPrepareThreads);
    barrier_init_fence();
  }
  sync_block();
  const int64_t key_head = head / (p.HV / p.H);
  copy_key_rows<K>(p, chunk, key_head, q_tile, k_tile);
  copy_token_rows<K, kPrepareThreads>(row_of(p.gate_logit, chunk.first, head, K), p.gate_logit.stride, n, [&](int row) {
    return base + Layout::kSteps + (row / 16) * Layout::kWarpSteps + (row % 16) * kPitch;
  });
  async_copy_arrive(barrier);
  prepare_beta(p, w, chunk, slot, head, base + Layout::kBeta);
  const HeadGate gate(p, head);
  barrier_wait(barrier, 0);
  sync_warp();

  // Fragment A of 16 rows and the 16 channels of a step: this lane's row of a matrix.
  const int matrix_row = (lane / 8 % 2) * 8 + lane % 8, matrix_piece = lane / 16;
  const uint32_t fragment = matrix_row * kPitch + 16 * matrix_piece;
  const uint32_t q_fragment = q_tile + 16 * b * kPitch + fragment, k_fragment = k_tile + 16 * b * kPitch + fragment;

  // The norms of rows g and g + 8.
  float q_factor[2] = {p.scale, p.scale}, k_factor[2] = {1.0F, 1.0F};
  if (p.l2norm_qk) {
    float q_sum[2] = {0.0F, 0.0F}, k_sum[2] = {0.0F, 0.0F};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t q[4], k[4];
      load_matrices(q, q_fragment + 32 * step);
      load_matrices(k, k_fragment + 32 * step);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        q_sum[r % 2] += low_of(q[r]) * low_of(q[r]) + high_of(q[r]) * high_of(q[r]);
        k_sum[r % 2] += low_of(k[r]) * low_of(k[r]) + high_of(k[r]) * high_of(k[r]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int mask = 1; mask < 4; mask *= 2) {
        q_sum[i] += exchange(q_sum[i], mask);
        k_sum[i] += exchange(k_sum[i], mask);
      }
      q_factor[i] = reciprocal_root(q_sum[i] + p.l2norm_eps) * p.scale;
      k_factor[i] = reciprocal_root(k_sum[i] + p.l2norm_eps);
    }
  }

  // Decays exp(g), and their products over the 16 rows.
  {
    uint32_t raw[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrices(raw[step], steps + fragment + 32 * step);
    sync_warp();  // all raw numbers are in registers: their place is free
    const bool valid[2] = {16 * b + g < n, 16 * b + g + 8 < n};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float y[8], e[8], total[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // channels 2 t + {0, 1}, then + 8
        float2 bias = make_float2(0.0F, 0.0F);
        if (p.dt_bias != nullptr)
          bias = *reinterpret_cast<const float2*>(p.dt_bias + head * K + 16 * step + 8 * half + 2 * t);
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // rows g, g + 8
          const uint32_t pair = raw[step][2 * half + i];
          y[4 * half + 2 * i] = low_of(pair) + bias.x;
          y[4 * half + 2 * i + 1] = high_of(pair) + bias.y;
        }
      }
      gate.decays(y, e);
#pragma unroll
      for (int i = 0; i < 8; ++i) e[i] = valid[i / 2 % 2] ? e[i] : 1.0F;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        total[2 * half] = e[4 * half] * e[4 * half + 2];
        total[2 * half + 1] = e[4 * half + 1] * e[4 * half + 3];
        *shared_pointer<float4>(steps + step * Layout::kStepBytes + 512 * half + 16 * lane) =
            make_float4(e[4 * half], e[4 * half + 1], e[4 * half + 2], e[4 * half + 3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        for (int mask = 4; mask < 32; mask *= 2) total[i] *= exchange(total[i], mask);
        if (g == 0) totals[b * K + 16 * step + 8 * (i / 2) + 2 * t + i % 2] = total[i];
      }
    }
  }
  sync_block();
  for (int c = thread; c < K; c += kPrepareThreads)
    w.decay[(slot * p.HV + head) * K + c] = totals[c] * totals[K + c] * totals[2 * K + c] * totals[3 * K + c];

  float near[3][2][4] = {};          // levels 1, 2, 4 of rows 0-7 and 8-15: q rows in [0], [1], k rows in [2], [3]
  float eight[4] = {};               // level 8, likewise
  float far[3][2][2][4] = {};        // [block of columns][8 columns][q, k]: levels 16 and 32
  float diagonal[2] = {0.0F, 0.0F};  // q k of rows g and g + 8
#pragma unroll 2
  for (int step = 0; step < kSteps; ++step) {
    float q[8], k[8], pre[8], suf[8], total[8];  // element 2 r + i: register r of the fragment
    {
      uint32_t q_raw[4], k_raw[4];
      load_matrices(q_raw, q_fragment + 32 * step);
      load_matrices(k_raw, k_fragment + 32 * step);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        q[2 * r] = low_of(q_raw[r]) * q_factor[r % 2];
        q[2 * r + 1] = high_of(q_raw[r]) * q_factor[r % 2];
        k[2 * r] = low_of(k_raw[r]) * k_factor[r % 2];
        k[2 * r + 1] = high_of(k_raw[r]) * k_factor[r % 2];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 e = *shared_pointer<const float4>(steps + step * Layout::kStepBytes + 512 * half + 16 * lane);
        pre[4 * half] = e.x;
        pre[4 * half + 1] = e.y;
        pre[4 * half + 2] = e.z;
        pre[4 * half + 3] = e.w;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      suf[i] = 1.0F;
      total[i] = pre[i];
      diagonal[i / 2 % 2] += q[i] * k[i];
    }
    uint32_t aq[4], ak[4];
    const auto scale_by = [&](const float(&factor)[8]) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        aq[r] = pack_bf16(q[2 * r] * factor[2 * r], q[2 * r + 1] * factor[2 * r + 1]);
        ak[r] = pack_bf16(k[2 * r] * factor[2 * r], k[2 * r + 1] * factor[2 * r + 1]);
      }
    };
    float factor[8];
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      const bool second = (g >> level) % 2 == 1;
#pragma unroll
      for (int i = 0; i < 8; ++i) factor[i] = second ? pre[i] : suf[i];
      scale_by(factor);
      mma_k16(near[level][0], aq[0], ak[0], aq[2], ak[2], ak[0], ak[2]);
      mma_k16(near[level][1], aq[1], ak[1], aq[3], ak[3], ak[1], ak[3]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float other = exchange(total[i], 4 << level);
        if (second) {
          pre[i] *= other;
        } else {
          suf[i] *= other;
        }
        total[i] *= other;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) factor[i] = i / 2 % 2 == 1 ? pre[i] : suf[i];
    scale_by(factor);
    mma_k16(eight, aq[1], ak[1], aq[3], ak[3], ak[0], ak[2]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pre[4 * half + 2 + i] *= total[4 * half + i];
        suf[4 * half + i] *= total[4 * half + 2 + i];
      }
    }
    // Products of the 16 rows of other warps, channels 16 step + 8 half + 2 t + i.
    float before[4], after[4], middle[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int channel = 16 * step + 8 * (c / 2) + 2 * t + c % 2;
      const BlockDecays decays = decays_around(totals + channel, K, b);
      before[c] = decays.before;
      after[c] = decays.after;
      middle[c] = decays.middle;
    }
    const uint32_t slots = base + Layout::kExchange + (step % 2) * 2048 + 16 * lane;
    float far_factor[8];  // level 32
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      factor[i] = b % 2 == 1 ? pre[i] : suf[i];  // level 16
      far_factor[i] = (b < 2 ? suf[i] : pre[i]) * middle[i / 4 * 2 + i % 2];
    }
    scale_by(factor);
    if (b == 0) *shared_pointer<uint4>(slots) = make_uint4(ak[0], ak[1], ak[2], ak[3]);
    if (b == 2) *shared_pointer<uint4>(slots + 3 * 512) = make_uint4(ak[0], ak[1], ak[2], ak[3]);
    uint32_t aq16[4], ak16[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      aq16[r] = aq[r];
      ak16[r] = ak[r];
    }
    scale_by(far_factor);
    if (b < 2) *shared_pointer<uint4>(slots + (1 + b) * 512) = make_uint4(ak[0], ak[1], ak[2], ak[3]);
    sync_block();
    const auto join = [&](float(&sums)[2][2][4], int from, const uint32_t(&second_q)[4], const uint32_t(&second_k)[4]) {
      const uint4 first = *shared_pointer<const uint4>(slots + from * 512);
      mma_k16(sums[0][0], second_q[0], second_q[1], second_q[2], second_q[3], first.x, first.z);
      mma_k16(sums[0][1], second_k[0], second_k[1], second_k[2], second_k[3], first.x, first.z);
      mma_k16(sums[1][0], second_q[0], second_q[1], second_q[2], second_q[3], first.y, first.w);
      mma_k16(sums[1][1], second_k[0], second_k[1], second_k[2], second_k[3], first.y, first.w);
    };
    if (b == 1) join(far[0], 0, aq16, ak16);
    if (b == 3) join(far[2], 3, aq16, ak16);
    if (b >= 2) {
      join(far[0], 1, aq, ak);
      join(far[1], 2, aq, ak);
    }
    // The decayed operands, over the raw numbers that they come from.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      pre[i] *= before[i / 4 * 2 + i % 2];
      suf[i] *= after[i / 4 * 2 + i % 2];
    }
    scale_by(pre);
    store_matrices(q_fragment + 32 * step, aq[0], aq[1], aq[2], aq[3]);
    store_matrices(k_fragment + 32 * step, ak[0], ak[1], ak[2], ak[3]);
    scale_by(suf);
    store_matrices(steps + step * Layout::kStepBytes + matrix_row * 32 + 16 * matrix_piece, ak[0], ak[1], ak[2], ak[3]);
  }
  sync_warp();
  {
    const int64_t offset = image_offset(p, chunk, head, K);
    for (int i = lane; i < 16 * (K / 8); i += 32) {
      const int row = i / (K / 8), piece = i % (K / 8), chunk_row = 16 * b + row;
      if (chunk_row >= n) break;
      const int64_t to = offset * 2 + (piece / 8) * int64_t{n} * 128 + image_piece(chunk_row, piece % 8);
      const auto copy = [to](__nv_bfloat16* image, uint32_t from) {
        *reinterpret_cast<uint4*>(reinterpret_cast<uint8_t*>(image) + to) = *shared_pointer<const uint4>(from);
      };
      copy(w.qb, q_tile + chunk_row * kPitch + 16 * piece);
      copy(w.kb, k_tile + chunk_row * kPitch + 16 * piece);
      copy(w.kt, steps + piece / 2 * Layout::kStepBytes + row * 32 + 16 * (piece % 2));
    }
  }
  sync_block();
  const uint32_t l_address = base + Layout::kSteps, aqk_address = l_address + kScoreBytes;
  float* l = shared_pointer<float>(l_address);
  const float* beta = shared_pointer<const float>(base + Layout::kBeta);
  for (int i = 0; i < 2; ++i) {
    for (int mask = 1; mask < 4; mask *= 2) diagonal[i] += exchange(diagonal[i], mask);
  }
  const int column = 2 * t;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // pairs inside 8 rows
    float pair[2][2];                     // [q, k][column]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int apart = g ^ (column + i);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float value = apart >= 4   ? near[2][half][2 * part + i]
                            : apart >= 2 ? near[1][half][2 * part + i]
                                         : near[0][half][2 * part + i];
        pair[part][i] = column + i < g ? value : 0.0F;
      }
      if (column + i == g) pair[0][i] = diagonal[half];
    }
    const int row = 16 * b + 8 * half + g, first = 16 * b + 8 * half + column;
    put_pair(aqk_address, row, first, pair[0][0], pair[0][1]);
    l[row * kScorePitch + first] = beta[row] * pair[1][0];
    l[row * kScorePitch + first + 1] = beta[row] * pair[1][1];
  }
  {
    const int row = 16 * b + 8 + g, first = 16 * b + column;
    put_pair(aqk_address, row, first, eight[0], eight[1]);
    l[row * kScorePitch + first] = beta[row] * eight[2];
    l[row * kScorePitch + first + 1] = beta[row] * eight[3];
    put_pair(aqk_address, 16 * b + g, first + 8, 0.0F, 0.0F);
  }
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block == b) continue;
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // 8 columns
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // rows g, g + 8
        const int row = 16 * b + 8 * i + g, first = 16 * block + 8 * part + column;
        if (block < b && block < 3) {
          constexpr int kLast = 2;
          const auto& sums = far[block < kLast ? block : kLast][part];
          put_pair(aqk_address, row, first, sums[0][2 * i], sums[0][2 * i + 1]);
          l[row * kScorePitch + first] = beta[row] * sums[1][2 * i];
          l[row * kScorePitch + first + 1] = beta[row] * sums[1][2 * i + 1];
        } else {
          put_pair(aqk_address, row, first, 0.0F, 0.0F);
        }
      }
    }
  }
  // M takes the place of q and k, whose last readers have passed the barrier above.
  invert_unit_lower(b, lane, l_address, base + Layout::kQ, aqk_address + kAqkBytes);
  store_scores(p, w, chunk, head, base + Layout::kQ, aqk_address);
}

}  // namespace palimpsest::cuda::sm90
