// The chunk-parallel kernel of the Hopper delta rule's backward with vector decay: from the states and their cotangents
// at a chunk's ends the gradients of q, k, beta and the gate. The equations stand in
// kernels/cpu/delta_rule_chunkwise_backward.cpp.
//
// After the products of kernels/cuda/delta_rule_sm90_tiles.cuh come the pairs of the chunk by dyadic levels, 16
// channels at a time. In the transposed layout an accumulator packed to bf16 is operand A again, a level's factor is a
// number a lane owns, and of the scans over tokens only two steps cross lanes and two cross warps.
#pragma once

#include "kernels/cuda/delta_rule_sm90_tiles.cuh"

namespace palimpsest::cuda::sm90 {

template <int K>
struct LocalLayout {
  static constexpr int kPitch = 2 * K + 16;  // bytes of a row of q, k or the gate
  static constexpr int kQ = TileLayout<K>::kBytes;
  static constexpr int kK = kQ + kChunk * kPitch;
  static constexpr int kG = kK + kChunk * kPitch;
  static constexpr int kNorms = kG + kChunk * kPitch;      // [2, C]
  static constexpr int kTotals = kNorms + 2 * kChunk * 4;  // [4, K]
  static constexpr int kDtBias = kTotals + 4 * K * 4;      // [K]
  static constexpr int kBeta = kDtBias + K * 4;            // [C]
  static constexpr int kDa = kBeta + kChunk * 4;           // [C, C]
  static constexpr int kDp = kDa + kLocalRowsBytes;
  static constexpr int kDiagonal = kDp + kLocalRowsBytes;        // [C]
  static constexpr int kExchange = kDiagonal + kChunk * 4;       // operands of levels 32, 16: [half, level, block, q k]
  static constexpr int kSums = kExchange + 2 * 2 * 4 * 2 * 512;  // [half][H N use][block][16]
  static constexpr int kStates = kSums + 2 * 3 * 4 * 16 * 4;     // [4, K] rowsum(S0 * dS)
  static constexpr int kBias = kStates + 4 * K * 4;              // [4, K] sums of ddt_bias
  static constexpr int kAlong = kBias + 4 * K * 4;               // [half][q k][C], later the sums of dA_log
  static constexpr int kBarriers = kAlong + 2 * 2 * kChunk * 4;
  static constexpr int kBytes = kBarriers + 8 * (kLocalStages + 1);
};

// The block asks for q, k and the gate's logits of an item, and what was computed of them.
template <int K>
__device__ inline void load_local_rows(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, const LocalItem& item,
                                       uint32_t base, uint32_t barrier) {
  using Layout = LocalLayout<K>;
  const int64_t slot_head = item.slot * p.HV + item.head;
  if (threadIdx.x == 0) {
    barrier_expect(barrier, static_cast<uint32_t>(2 * kChunk * 4 + 5 * K * 4 + kChunk * 4));
    bulk_load(base + Layout::kDtBias, p.dt_bias + item.head * K, K * 4, barrier);
    bulk_load(base + Layout::kNorms, w.norms + slot_head * 2 * kChunk, 2 * kChunk * 4, barrier);
    bulk_load(base + Layout::kTotals, w.totals + slot_head * 4 * K, 4 * K * 4, barrier);
    bulk_load(base + Layout::kBeta, w.beta + slot_head * kChunk, kChunk * 4, barrier);
  }
  copy_local_keys<K>(p, item, base + Layout::kQ, base + Layout::kK);
  copy_token_rows<K, kLocalThreads>(row_of(p.gate_logit, item.chunk.first, item.head, K), p.gate_logit.stride,
                                    item.chunk.n, [=](int row) { return base + Layout::kG + row * Layout::kPitch; });
  async_copy_arrive(barrier);
}

// The bits of a register pair (row, column), (row, column + 1) of an 8 x 8 tile that belong to level h, and of a pair
// (row, column), (row + 1, column): rows of second, columns of first halves.
__device__ inline bool in_level(int row, int column, int h) {
  const int apart = row ^ column;
  return column < row && apart >= h && apart < 2 * h;
}

// The four warps of a half of the channels.
__device__ inline void sync_half(int half) {
  if (half == 0) {
    sync_threads(1, 128);
  } else {
    sync_threads(2, 128);
  }
}

template <int K>
__global__ void __launch_bounds__(kLocalThreads, 1)
    delta_rule_bwd_local_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w) {
  using Layout = LocalLayout<K>;
  constexpr int kTiles = K / 32;  // of 16 channels a warp
  constexpr int kPitch = Layout::kPitch;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int b = warp % 4, half = warp / 4;
  const uint32_t base = dynamic_shared();
  const uint32_t rows_barrier = base + Layout::kBarriers + 8 * kLocalStages;
  const int64_t num_items = num_slots(p) * p.HV;
  if (thread == 0) {
    for (int i = 0; i <= kLocalStages; ++i) barrier_init(base + Layout::kBarriers + 8 * i, 1 + kLocalThreads);
    barrier_init_fence();
  }
  sync_block();
  clear_empty_partials(p, w, K);
  LocalItem item = next_item(p, blockIdx.x);
  TileRing<K> ring(p, w, item, base, base + Layout::kBarriers);
  uint32_t num_rows = 0;
  if (item.index < num_items) load_local_rows<K>(p, w, item, base, rows_barrier);

  // Rows of matrices that this lane addresses: fragment A or B by rows, and transposed.
  const int row_a = lane / 8 % 2 * 8 + lane % 8, piece_a = lane / 16;  // matrices: rows, rows + 8, then columns + 8
  const int row_b = lane / 16 * 8 + lane % 8, piece_b = lane / 8 % 2;  // columns, columns + 8, then rows + 8

  while (item.index < num_items) {
    const Chunk& chunk = item.chunk;
    const int n = chunk.n;
    const int64_t head = item.head;
    const HeadGate gate(p, head);
    TileSums<K> tile_sums;
    ring.add_item(item, tile_sums);
    store_score_gradients(tile_sums.scores, base + (half == 0 ? Layout::kDa : Layout::kDp),
                          shared_pointer<float>(base + Layout::kDiagonal));
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = tile_sums.states[c][i];
        for (int mask = 1; mask < 4; mask *= 2) sum += exchange(sum, mask);
        if (t == 0) shared_pointer<float>(base + Layout::kStates)[b * K + half * (K / 2) + 16 * c + 8 * i + g] = sum;
      }
    }
    auto& dqb = tile_sums.dqb;
    auto& dkb = tile_sums.dkb;
    auto& dkt = tile_sums.dkt;
    barrier_wait(rows_barrier, num_rows++ % 2);
    store_beta_gradient(p, item, shared_pointer<const float>(base + Layout::kBeta), tile_sums.dbeta);
    sync_block();

    // ---- by 16 channels ----
    const float* dt_bias = shared_pointer<const float>(base + Layout::kDtBias);
    const float* totals = shared_pointer<const float>(base + Layout::kTotals);
    const float* norms = shared_pointer<const float>(base + Layout::kNorms);
    float* bias_sums = shared_pointer<float>(base + Layout::kBias);
    float q_norm[4], k_norm[4], diagonal[4];  // of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the block
    float along_q[4] = {}, along_k[4] = {};
    float dA_log = 0.0F;
    bool valid[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * b + i / 2 * 8 + 2 * t + i % 2;
      q_norm[i] = norms[token];
      k_norm[i] = norms[kChunk + token];
      diagonal[i] = shared_pointer<const float>(base + Layout::kDiagonal)[token];
      valid[i] = token < n;
    }
    // The diagonal block of dA and dP: tiles of 8 x 8 (0, 0), (1, 1), (1, 0) by rows and transposed.
    uint32_t da_rows[4], dp_rows[4], da_columns[4], dp_columns[4];  // register r: tile (row r / 2, column r % 2)
    {
      const uint32_t block = (16 * b + row_b) * kLocalPitch + 32 * b + 16 * piece_b;
      load_matrices(da_rows, base + Layout::kDa + block);
      load_matrices(dp_rows, base + Layout::kDp + block);
      load_matrices_transposed(da_columns, base + Layout::kDa + block);
      load_matrices_transposed(dp_columns, base + Layout::kDp + block);
    }
    uint32_t row_mask[3], column_mask[3];  // of levels 1, 2, 4
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      row_mask[level] =
          (in_level(g, 2 * t, 1 << level) ? 0xffffU : 0U) | (in_level(g, 2 * t + 1, 1 << level) ? 0xffff0000U : 0U);
      column_mask[level] =
          (in_level(2 * t, g, 1 << level) ? 0xffffU : 0U) | (in_level(2 * t + 1, g, 1 << level) ? 0xffff0000U : 0U);
    }

    // A loop that stays one, for the instruction cache: each round takes accumulators [0] and shifts the others down,
    // its results come in at the end.
#pragma unroll 1
    for (int c = 0; c < kTiles; ++c) {
      const int first_channel = half * (K / 2) + 16 * c;
      const uint32_t fragment = (16 * b + row_b) * kPitch + 2 * first_channel + 16 * piece_b;
      // Element 2 r + i of an operand: channel g + 8 (r % 2), token 8 (r / 2) + 2 t + i; index r / 2 * 2 + i of a
      // token.
      float q[8], k[8];
      float f1[8], f2[8], f4[8], f8[8], to_start[8], to_end[8];  // factors of the levels, G, U
      float f16[8], f32[8];
      {
        uint32_t q_raw[4], k_raw[4], g_raw[4];
        load_matrices_transposed(q_raw, base + Layout::kQ + fragment);
        load_matrices_transposed(k_raw, base + Layout::kK + fragment);
        load_matrices_transposed(g_raw, base + Layout::kG + fragment);
        float before[2], after[2], middle[2], bias[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int channel = first_channel + 8 * i + g;
          const BlockDecays decays = decays_around(totals + channel, K, b);
          before[i] = decays.before;
          after[i] = decays.after;
          middle[i] = decays.middle;
          bias[i] = dt_bias[channel];
        }
        float y[8], pre[8], suf[8], total[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int x = 2 * r + i, token = r / 2 * 2 + i;
            const float raw = i == 0 ? low_of(g_raw[r]) : high_of(g_raw[r]);
            y[x] = raw + bias[r % 2];
            q[x] = (i == 0 ? low_of(q_raw[r]) : high_of(q_raw[r])) * q_norm[token] * p.scale;
            k[x] = (i == 0 ? low_of(k_raw[r]) : high_of(k_raw[r])) * k_norm[token];
          }
        }
        gate.decays(y, pre);
#pragma unroll
        for (int x = 0; x < 8; ++x) pre[x] = valid[x / 4 * 2 + x % 2] ? pre[x] : 1.0F;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          f1[2 * r] = 1.0F;
          f1[2 * r + 1] = pre[2 * r + 1];
          suf[2 * r] = pre[2 * r + 1];
          suf[2 * r + 1] = 1.0F;
          pre[2 * r + 1] *= pre[2 * r];
          total[r] = pre[2 * r + 1];
        }
#pragma unroll
        for (int level = 0; level < 2; ++level) {  // 2, 4
          const bool second = (t >> level) % 2 == 1;
          float(&f)[8] = level == 0 ? f2 : f4;
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const float other = exchange(total[r], 1 << level);
#pragma unroll
            for (int x = 2 * r; x < 2 * r + 2; ++x) {
              f[x] = second ? pre[x] : suf[x];
              if (second) {
                pre[x] *= other;
              } else {
                suf[x] *= other;
              }
            }
            total[r] *= other;
          }
        }
#pragma unroll
        for (int x = 0; x < 8; ++x) {
          const int i = x / 2 % 2;  // of the channel
          f8[x] = x < 4 ? suf[x] : pre[x];
          if (x < 4) {
            suf[x] *= total[2 + i];
          } else {
            pre[x] *= total[i];
          }
          f16[x] = b % 2 == 1 ? pre[x] : suf[x];
          f32[x] = (b < 2 ? suf[x] : pre[x]) * middle[i];
          to_start[x] = pre[x] * before[i];
          to_end[x] = suf[x] * after[i];
        }
      }
      float dq[8], dk[8], dpre[8], dsuf[8];
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        const int part = x / 4, i = x / 2 % 2 * 2 + x % 2, token = x / 4 * 2 + x % 2;
        const float from_state = dqb[0][part][i] * to_start[x], from_key = -dkb[0][part][i] * to_start[x];
        const float to_state = dkt[0][part][i] * to_end[x];
        dpre[x] = q[x] * from_state + k[x] * from_key;
        dsuf[x] = k[x] * to_state;
        dq[x] = from_state + diagonal[token] * k[x];
        dk[x] = from_key + to_state + diagonal[token] * q[x];
      }
      uint32_t aq[4], ak[4];
      const auto scale_by = [&](const float(&factor)[8]) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          aq[r] = pack_bf16(q[2 * r] * factor[2 * r], q[2 * r + 1] * factor[2 * r + 1]);
          ak[r] = pack_bf16(k[2 * r] * factor[2 * r], k[2 * r + 1] * factor[2 * r + 1]);
        }
      };
      // The operands of levels 32 and 16, in the order of the lanes.
      const auto slot = [&](int level, int block, int part) {
        return base + Layout::kExchange + (((half * 2 + level) * 4 + block) * 2 + part) * 512 + 16 * lane;
      };
      scale_by(f32);
      if (b >= 2) *shared_pointer<uint4>(slot(0, b, 0)) = make_uint4(aq[0], aq[1], aq[2], aq[3]);
      *shared_pointer<uint4>(slot(0, b, 1)) = make_uint4(ak[0], ak[1], ak[2], ak[3]);
      scale_by(f16);
      if (b % 2 == 1) *shared_pointer<uint4>(slot(1, b, 0)) = make_uint4(aq[0], aq[1], aq[2], aq[3]);
      *shared_pointer<uint4>(slot(1, b, 1)) = make_uint4(ak[0], ak[1], ak[2], ak[3]);
      sync_half(half);

      // Levels 32 and 16: this warp's tokens lie in a second half, or in a first one.
      float use32[8], use16[8];
      const auto join = [&](int level, bool second, int first_block, int num_blocks, const float(&f)[8],
                            float(&use)[8]) {
        float sums[2][2][4] = {};  // of dA and of dP, or of both in [0]
        for (int block = first_block; block < first_block + num_blocks; ++block) {
          const uint4 far_k = *shared_pointer<const uint4>(slot(level, block, 1));
          uint32_t da[4], dp[4];
          if (second) {
            const uint32_t at = (16 * b + row_b) * kLocalPitch + 32 * block + 16 * piece_b;
            load_matrices(da, base + Layout::kDa + at);
            load_matrices(dp, base + Layout::kDp + at);
            mma_k16(sums[0][0], far_k.x, far_k.y, far_k.z, far_k.w, da[0], da[1]);
            mma_k16(sums[0][1], far_k.x, far_k.y, far_k.z, far_k.w, da[2], da[3]);
            mma_k16(sums[1][0], far_k.x, far_k.y, far_k.z, far_k.w, dp[0], dp[1]);
            mma_k16(sums[1][1], far_k.x, far_k.y, far_k.z, far_k.w, dp[2], dp[3]);
          } else {
            const uint4 far_q = *shared_pointer<const uint4>(slot(level, block, 0));
            const uint32_t at = (16 * block + row_a) * kLocalPitch + 32 * b + 16 * piece_a;
            load_matrices_transposed(da, base + Layout::kDa + at);
            load_matrices_transposed(dp, base + Layout::kDp + at);
            mma_k16(sums[0][0], far_q.x, far_q.y, far_q.z, far_q.w, da[0], da[1]);
            mma_k16(sums[0][1], far_q.x, far_q.y, far_q.z, far_q.w, da[2], da[3]);
            mma_k16(sums[0][0], far_k.x, far_k.y, far_k.z, far_k.w, dp[0], dp[1]);
            mma_k16(sums[0][1], far_k.x, far_k.y, far_k.z, far_k.w, dp[2], dp[3]);
          }
        }
        scale_by(f);
#pragma unroll
        for (int x = 0; x < 8; ++x) {
          const int part = x / 4, i = x / 2 % 2 * 2 + x % 2;
          const float kf = x % 2 == 0 ? low_of(ak[x / 2]) : high_of(ak[x / 2]);
          if (second) {
            const float qf = x % 2 == 0 ? low_of(aq[x / 2]) : high_of(aq[x / 2]);
            dq[x] += f[x] * sums[0][part][i];
            dk[x] += f[x] * sums[1][part][i];
            use[x] = qf * sums[0][part][i] + kf * sums[1][part][i];
          } else {
            dk[x] += f[x] * sums[0][part][i];
            use[x] = kf * sums[0][part][i];
          }
        }
      };
      join(0, b >= 2, b >= 2 ? 0 : 2, 2, f32, use32);
      join(1, b % 2 == 1, b ^ 1, 1, f16, use16);

      // dg, from the longest segments to the shortest: `share` is what a token's own block has of the longer ones.
      float share[8];
      {
        float* sums = shared_pointer<float>(base + Layout::kSums) + half * 3 * 4 * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float h = 0.0F, s = 0.0F, use = 0.0F;
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            const int x = 4 * part + 2 * i;
            h += dpre[x] + dpre[x + 1];
            s += dsuf[x] + dsuf[x + 1];
            use += use32[x] + use32[x + 1];
          }
          for (int mask = 1; mask < 4; mask *= 2) {
            h += exchange(h, mask);
            s += exchange(s, mask);
            use += exchange(use, mask);
          }
          if (t == 0) {
            sums[(0 * 4 + b) * 16 + 8 * i + g] = h;
            sums[(1 * 4 + b) * 16 + 8 * i + g] = s;
            sums[(2 * 4 + b) * 16 + 8 * i + g] = use;
          }
        }
        sync_half(half);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int channel = first_channel + 8 * i + g;
          const auto h = [&](int block) { return sums[block * 16 + 8 * i + g]; };
          const auto s = [&](int block) { return sums[(4 + block) * 16 + 8 * i + g]; };
          const auto use = [&](int block) { return sums[(8 + block) * 16 + 8 * i + g]; };
          const float* products = shared_pointer<const float>(base + Layout::kStates) + channel;
          float total = (products[0] + products[K] + products[2 * K] + products[3 * K]) * totals[channel] *
                        totals[K + channel] * totals[2 * K + channel] * totals[3 * K + channel];
          total += b < 2 ? h(2) + h(3) : s(0) + s(1);
          total += b == 0 ? h(1) : b == 1 ? s(0) + use(0) : b == 2 ? h(3) + use(3) : s(2);
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            share[4 * part + 2 * i] = total;
            share[4 * part + 2 * i + 1] = total;
          }
        }
      }
      // Where R of level 32, 16 goes: second halves to dpre, first halves to dsuf.
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        dpre[x] += (b >= 2 ? use32[x] : 0.0F) + (b % 2 == 1 ? use16[x] : 0.0F);
        dsuf[x] += (b < 2 ? use32[x] : 0.0F) + (b % 2 == 0 ? use16[x] : 0.0F);
      }
      // Level 8: tokens 8 .. 15 against 0 .. 7 of the block.
      {
        float sums[3][4] = {};  // dq, kr of the second, kc of the first half
        scale_by(f8);
        mma_k8(sums[0], ak[0], ak[1], da_rows[2]);
        mma_k8(sums[1], ak[0], ak[1], dp_rows[2]);
        mma_k16(sums[2], aq[2], aq[3], ak[2], ak[3], da_columns[2], dp_columns[2]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float h = dpre[4 + 2 * i] + dpre[5 + 2 * i], s = dsuf[2 * i] + dsuf[2 * i + 1];
          for (int mask = 1; mask < 4; mask *= 2) {
            h += exchange(h, mask);
            s += exchange(s, mask);
          }
          share[2 * i] += h;
          share[2 * i + 1] += h;
          share[4 + 2 * i] += s;
          share[5 + 2 * i] += s;
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const float k_first = x % 2 == 0 ? low_of(ak[x / 2]) : high_of(ak[x / 2]);
          const float k_second = x % 2 == 0 ? low_of(ak[2 + x / 2]) : high_of(ak[2 + x / 2]);
          const float q_second = x % 2 == 0 ? low_of(aq[2 + x / 2]) : high_of(aq[2 + x / 2]);
          dk[x] += f8[x] * sums[2][x];
          dsuf[x] += k_first * sums[2][x];
          dq[4 + x] += f8[4 + x] * sums[0][x];
          dk[4 + x] += f8[4 + x] * sums[1][x];
          dpre[4 + x] += q_second * sums[0][x] + k_second * sums[1][x];
        }
      }
#pragma unroll
      for (int level = 2; level >= 0; --level) {  // 4, 2, 1
        const float(&f)[8] = level == 2 ? f4 : level == 1 ? f2 : f1;
        scale_by(f);
        float sums[2][2][4] = {};  // by 8 tokens: dq of second halves; kr of second, kc of first halves
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          mma_k8(sums[0][part], ak[2 * part], ak[2 * part + 1], da_rows[3 * part] & row_mask[level]);
          mma_k8(sums[1][part], ak[2 * part], ak[2 * part + 1], dp_rows[3 * part] & row_mask[level]);
          mma_k16(sums[1][part], aq[2 * part], aq[2 * part + 1], ak[2 * part], ak[2 * part + 1],
                  da_columns[3 * part] & column_mask[level], dp_columns[3 * part] & column_mask[level]);
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (level == 0) {
            share[2 * r] += dpre[2 * r + 1];
            share[2 * r + 1] += dsuf[2 * r];
          } else {
            const bool second = (t >> (level - 1)) % 2 == 1;
            float other = second ? dpre[2 * r] + dpre[2 * r + 1] : dsuf[2 * r] + dsuf[2 * r + 1];
            if (level == 2) other += exchange(other, 1);
            other = exchange(other, 1 << (level - 1));
            share[2 * r] += other;
            share[2 * r + 1] += other;
          }
        }
#pragma unroll
        for (int x = 0; x < 8; ++x) {
          const int part = x / 4, i = x / 2 % 2 * 2 + x % 2;
          const float kf = x % 2 == 0 ? low_of(ak[x / 2]) : high_of(ak[x / 2]);
          const float qf = x % 2 == 0 ? low_of(aq[x / 2]) : high_of(aq[x / 2]);
          const float use = qf * sums[0][part][i] + kf * sums[1][part][i];
          const bool second = level == 0 ? x % 2 == 1 : (t >> (level > 0 ? level - 1 : 0)) % 2 == 1;
          dq[x] += f[x] * sums[0][part][i];
          dk[x] += f[x] * sums[1][part][i];
          if (second) {
            dpre[x] += use;
          } else {
            dsuf[x] += use;
          }
        }
      }
      // The gate; its logits' gradients replace the logits.
      {
        uint32_t g_raw[4], packed[4];
        load_matrices_transposed(g_raw, base + Layout::kG + fragment);
        float bias_sum[2] = {0.0F, 0.0F}, y[8], dy[8];
#pragma unroll
        for (int x = 0; x < 8; ++x) {
          const float bias = dt_bias[first_channel + x / 2 % 2 * 8 + g];
          y[x] = (x % 2 == 0 ? low_of(g_raw[x / 2]) : high_of(g_raw[x / 2])) + bias;
          dy[x] = valid[x / 4 * 2 + x % 2] ? dpre[x] + share[x] : 0.0F;
        }
        gate.backward(y, dy, dA_log);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          bias_sum[r % 2] += dy[2 * r] + dy[2 * r + 1];
          packed[r] = pack_bf16(dy[2 * r], dy[2 * r + 1]);
        }
        store_matrices_transposed(base + Layout::kG + fragment, packed[0], packed[1], packed[2], packed[3]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          for (int mask = 1; mask < 4; mask *= 2) bias_sum[i] += exchange(bias_sum[i], mask);
          if (t == 0) bias_sums[b * K + first_channel + 8 * i + g] = bias_sum[i];
        }
      }
#pragma unroll
      for (int later = 0; later + 1 < kTiles; ++later) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            dqb[later][part][i] = dqb[later + 1][part][i];
            dkb[later][part][i] = dkb[later + 1][part][i];
            dkt[later][part][i] = dkt[later + 1][part][i];
          }
        }
      }
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        const int part = x / 4, i = x / 2 % 2 * 2 + x % 2, token = x / 4 * 2 + x % 2;
        along_q[token] += q[x] * dq[x];
        along_k[token] += k[x] * dk[x];
        dqb[kTiles - 1][part][i] = dq[x];
        dkb[kTiles - 1][part][i] = dk[x];
      }
    }

    // ---- over all channels ----
    {
      float* along = shared_pointer<float>(base + Layout::kAlong);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        for (int mask = 4; mask < 32; mask *= 2) {
          along_q[i] += exchange(along_q[i], mask);
          along_k[i] += exchange(along_k[i], mask);
        }
        const int token = 16 * b + i / 2 * 8 + 2 * t + i % 2;
        if (g == 0) {
          along[half * 2 * kChunk + token] = along_q[i];
          along[(half * 2 + 1) * kChunk + token] = along_k[i];
        }
      }
      for (int mask = 1; mask < 32; mask *= 2) dA_log += exchange(dA_log, mask);
      sync_block();
      KeyNorms key_norms;  // the tiles hold the raw q and k
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * b + i / 2 * 8 + 2 * t + i % 2;
        key_norms.q_norm[i] = q_norm[i];
        key_norms.k_norm[i] = k_norm[i];
        key_norms.along_q[i] = p.l2norm_qk ? along[token] + along[2 * kChunk + token] : 0.0F;
        key_norms.along_k[i] = p.l2norm_qk ? along[kChunk + token] + along[3 * kChunk + token] : 0.0F;
      }
      put_key_gradients<K>(
          p, tile_sums, key_norms, base + Layout::kQ, base + Layout::kK, [&](int token) { return q_norm[token]; },
          [&](int token) { return k_norm[token]; });
      sync_block();
      if (lane == 0) along[warp] = dA_log;
      store_key_gradients<K>(p, w, item, base + Layout::kQ, base + Layout::kK, [&](const auto& copy, int64_t token) {
        copy(row_of(p.dgate_logit, token, head, K), base + Layout::kG);
      });
      sync_block();
      float* partials = w.partials + (item.slot * p.HV + head) * (K + 1);
      for (int c = thread; c < K; c += kLocalThreads)
        partials[c] = bias_sums[c] + bias_sums[K + c] + bias_sums[2 * K + c] + bias_sums[3 * K + c];
      if (thread == 0) {
        float sum = 0.0F;
        for (int i = 0; i < kLocalThreads / 32; ++i) sum += along[i];
        partials[K] = sum;
      }
      item = next_item(p, item.index + gridDim.x);
      if (item.index < num_items) load_local_rows<K>(p, w, item, base, rows_barrier);
    }
  }
}

}  // namespace palimpsest::cuda::sm90
