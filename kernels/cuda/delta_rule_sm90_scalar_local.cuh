// The chunk-parallel kernel of the Hopper delta rule's backward with one decay a head (or none). After the products of
// kernels/cuda/delta_rule_sm90_tiles.cuh, with E_ij = exp(D_ij) and the scores Aqk, P recomputed:
//
//   dq_i = dQb_i e^G_i + sum_{j<=i} dA_ij E_ij k_j          kr_i = dKb_i e^G_i + sum_{j<i} dP_ij E_ij k_j
//   kc_j = sum_{i>=j} dA_ij E_ij q_i + sum_{i>j} dP_ij E_ij k_i                dk = kr + kc + dKt e^U
//   dg_t = tot + sum_{i>=t} H_i + sum_{j<t} N_j + sum_{j<t<=i} Z_ij,           Z = dA * Aqk + dP * P, off the diagonal
//
// Only sums: the last one by running sums along the rows of Z, then down its columns. W_A = dA * E and W_P = dP * E are
// bf16 tiles, q and k are normalised in place.
#pragma once

#include "kernels/cuda/delta_rule_sm90_scalar.cuh"
#include "kernels/cuda/delta_rule_sm90_tiles.cuh"

namespace palimpsest::cuda::sm90 {

constexpr int kPairPitch = 68;  // f32

template <int K>
struct ScalarLocalLayout {
  static constexpr int kPitch = 2 * K + 16;
  static constexpr int kQ = TileLayout<K>::kBytes;
  static constexpr int kK = kQ + kChunk * kPitch;
  static constexpr int kNorms = kK + kChunk * kPitch;    // [2, C]
  static constexpr int kBeta = kNorms + 2 * kChunk * 4;  // [C]
  static constexpr int kWa = kBeta + kChunk * 4;         // [C, C] bf16
  static constexpr int kWp = kWa + kLocalRowsBytes;
  static constexpr int kPairs = kWp + kLocalRowsBytes;             // [C, C] f32: Z, then its running sums
  static constexpr int kParts = kPairs + kChunk * kPairPitch * 4;  // [levels, C]
  static constexpr int kSums = kParts + kLevels * kChunk * 4;      // [2, C] G and U
  static constexpr int kAlong = kSums + 2 * kChunk * 4;            // [half][q . dq, k . dk, H, N][C]
  static constexpr int kWarps = kAlong + 2 * 4 * kChunk * 4;       // [3][8 warps]: S0 . dS, sums of ddt_bias, of dA_log
  static constexpr int kBarriers = kWarps + 3 * 8 * 4;
  static constexpr int kBytes = kBarriers + 8 * (kLocalStages + 1);
};

// The block asks for q and k of an item, their norms and beta.
template <int K>
__device__ inline void load_scalar_rows(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, const LocalItem& item,
                                        uint32_t base, uint32_t barrier) {
  using Layout = ScalarLocalLayout<K>;
  const int64_t slot_head = item.slot * p.HV + item.head;
  if (threadIdx.x == 0) {
    barrier_expect(barrier, static_cast<uint32_t>(3 * kChunk * 4));
    bulk_load(base + Layout::kNorms, w.norms + slot_head * 2 * kChunk, 2 * kChunk * 4, barrier);
    bulk_load(base + Layout::kBeta, w.beta + slot_head * kChunk, kChunk * 4, barrier);
  }
  copy_local_keys<K>(p, item, base + Layout::kQ, base + Layout::kK);
  async_copy_arrive(barrier);
}

// A sum over the threads of each warp, one number a warp.
__device__ inline void store_warp_sum(float x, float* sums) {
  for (int mask = 1; mask < 32; mask *= 2) x += exchange(x, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
}
__device__ inline float sum_of_warps(const float* sums) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kLocalThreads / 32; ++i) sum += sums[i];
  return sum;
}

template <int K>
__global__ void __launch_bounds__(kLocalThreads, 1)
    delta_rule_scalar_bwd_local_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w) {
  using Layout = ScalarLocalLayout<K>;
  constexpr int kTiles = K / 32, kPitch = Layout::kPitch;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int b = warp % 4, half = warp / 4;
  const uint32_t base = dynamic_shared();
  const uint32_t rows_barrier = base + Layout::kBarriers + 8 * kLocalStages;
  const int64_t num_items = num_slots(p) * p.HV;
  const bool trains_gate = p.dgate_logit.data != nullptr;
  if (thread == 0) {
    for (int i = 0; i <= kLocalStages; ++i) barrier_init(base + Layout::kBarriers + 8 * i, 1 + kLocalThreads);
    barrier_init_fence();
  }
  sync_block();
  clear_empty_partials(p, w, 1);
  LocalItem item = next_item(p, blockIdx.x);
  TileRing<K> ring(p, w, item, base, base + Layout::kBarriers);
  uint32_t num_rows = 0;
  if (item.index < num_items) load_scalar_rows<K>(p, w, item, base, rows_barrier);
  const int row_a = lane / 8 % 2 * 8 + lane % 8, piece_a = lane / 16;
  const int row_b = lane / 16 * 8 + lane % 8, piece_b = lane / 8 % 2;
  const float* norms = shared_pointer<const float>(base + Layout::kNorms);
  const float* parts = shared_pointer<const float>(base + Layout::kParts);
  const float* sums = shared_pointer<const float>(base + Layout::kSums);
  float* along = shared_pointer<float>(base + Layout::kAlong);
  float* warps = shared_pointer<float>(base + Layout::kWarps);
  float* pairs = shared_pointer<float>(base + Layout::kPairs);

  while (item.index < num_items) {
    const Chunk& chunk = item.chunk;
    const int n = chunk.n;
    const int64_t head = item.head;
    const HeadGate gate(p, head);
    sum_scalar_gate(thread < n ? scalar_log2_decay(p, gate, chunk.first + thread, head) : 0.0F, thread,
                    base + Layout::kParts, base + Layout::kSums);
    TileSums<K> tile_sums;
    ring.add_item(item, tile_sums);
    {
      float states = 0.0F;
#pragma unroll
      for (int c = 0; c < kTiles; ++c) states += tile_sums.states[c][0] + tile_sums.states[c][1];
      store_warp_sum(states, warps);
    }
    barrier_wait(rows_barrier, num_rows++ % 2);
    store_beta_gradient(p, item, shared_pointer<const float>(base + Layout::kBeta), tile_sums.dbeta);
    for (int i = thread; i < kChunk * (K / 8); i += kLocalThreads) {  // q (with the scale) and k normalised
      const int row = i / (K / 8), piece = i % (K / 8);
      const auto scale_by = [&](uint32_t tile, float factor) {
        uint4* x = shared_pointer<uint4>(tile + row * kPitch + 16 * piece);
        *x = scaled(*x, factor);
      };
      scale_by(base + Layout::kQ, norms[row] * p.scale);
      scale_by(base + Layout::kK, norms[kChunk + row]);
    }
    sync_block();

    // W_A or W_P of this warp's rows, and Z from the scores.
    {
      float scores[4][2][4] = {};
      const uint32_t own = base + (half == 0 ? Layout::kQ : Layout::kK) + (16 * b + row_a) * kPitch + 16 * piece_a;
#pragma unroll
      for (int step = 0; step < K / 16; ++step) {
        uint32_t a[4];
        load_matrices(a, own + 32 * step);
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          if (block > b) break;
          uint32_t k[4];
          load_matrices(k, base + Layout::kK + (16 * block + row_b) * kPitch + 32 * step + 16 * piece_b);
          mma_k16(scores[block][0], a[0], a[1], a[2], a[3], k[0], k[1]);
          mma_k16(scores[block][1], a[0], a[1], a[2], a[3], k[2], k[3]);
        }
      }
      const uint32_t to = base + (half == 0 ? Layout::kWa : Layout::kWp);
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        if (block > b) break;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int row = 16 * b + 8 * i + g, column = 16 * block + 8 * part + 2 * t;
            float weight[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int j = column + e;
              const float decay = pair_decay(parts, row, j);
              const float gradient = tile_sums.scores[block][part][2 * i + e];
              float& score = scores[block][part][2 * i + e];
              weight[e] = half == 0 ? gradient * (j == row ? 1.0F : decay) : -gradient * decay;
              score *= j < row ? weight[e] : 0.0F;
            }
            *shared_pointer<uint32_t>(to + row * kLocalPitch + 2 * column) = pack_bf16(weight[0], weight[1]);
          }
        }
      }
      const auto put_pairs = [&](bool add) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          if (block > b) break;
#pragma unroll
          for (int part = 0; part < 2; ++part) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& z = pairs[(16 * b + i / 2 * 8 + g) * kPairPitch + 16 * block + 8 * part + 2 * t + i % 2];
              z = add ? z + scores[block][part][i] : scores[block][part][i];
            }
          }
        }
      };
      if (half == 0) put_pairs(false);
      sync_block();
      if (half == 1) put_pairs(true);
    }

    // dq and dk, 16 channels at a time.
    float to_start[4], to_end[4];  // of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the block
    float along_q[4] = {}, along_k[4] = {}, starts[4] = {}, ends[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * b + i / 2 * 8 + 2 * t + i % 2;
      to_start[i] = exp2_fast(sums[token]);
      to_end[i] = exp2_fast(sums[kChunk + token]);
    }
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
      const uint32_t channels = 2 * (half * (K / 2) + 16 * c) + 16 * piece_b;
      float(&dq)[2][4] = tile_sums.dqb[c];
      float(&dk)[2][4] = tile_sums.dkb[c];
      uint32_t own_q[4], own_k[4];
      load_matrices_transposed(own_q, base + Layout::kQ + (16 * b + row_b) * kPitch + channels);
      load_matrices_transposed(own_k, base + Layout::kK + (16 * b + row_b) * kPitch + channels);
      const auto q_of = [&](int part, int i) {
        const uint32_t pair = own_q[2 * part + i / 2];
        return i % 2 == 0 ? low_of(pair) : high_of(pair);
      };
      const auto k_of = [&](int part, int i) {
        const uint32_t pair = own_k[2 * part + i / 2];
        return i % 2 == 0 ? low_of(pair) : high_of(pair);
      };
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = 2 * part + i % 2;
          const float from_key = -dk[part][i] * to_start[token], to_state = tile_sums.dkt[c][part][i] * to_end[token];
          dq[part][i] *= to_start[token];
          dk[part][i] = from_key + to_state;
          starts[token] += q_of(part, i) * dq[part][i] + k_of(part, i) * from_key;
          ends[token] += k_of(part, i) * to_state;
        }
      }
#pragma unroll 1
      for (int block = 0; block <= b; ++block) {  // as queries
        uint32_t k[4], wa[4], wp[4];
        load_matrices_transposed(k, base + Layout::kK + (16 * block + row_b) * kPitch + channels);
        const uint32_t at = (16 * b + row_b) * kLocalPitch + 32 * block + 16 * piece_b;
        load_matrices(wa, base + Layout::kWa + at);
        load_matrices(wp, base + Layout::kWp + at);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          mma_k16(dq[part], k[0], k[1], k[2], k[3], wa[2 * part], wa[2 * part + 1]);
          mma_k16(dk[part], k[0], k[1], k[2], k[3], wp[2 * part], wp[2 * part + 1]);
        }
      }
#pragma unroll 1
      for (int block = b; block < 4; ++block) {  // as keys
        uint32_t q[4], k[4], wa[4], wp[4];
        load_matrices_transposed(q, base + Layout::kQ + (16 * block + row_b) * kPitch + channels);
        load_matrices_transposed(k, base + Layout::kK + (16 * block + row_b) * kPitch + channels);
        const uint32_t at = (16 * block + row_a) * kLocalPitch + 32 * b + 16 * piece_a;
        load_matrices_transposed(wa, base + Layout::kWa + at);
        load_matrices_transposed(wp, base + Layout::kWp + at);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          mma_k16(dk[part], q[0], q[1], q[2], q[3], wa[2 * part], wa[2 * part + 1]);
          mma_k16(dk[part], k[0], k[1], k[2], k[3], wp[2 * part], wp[2 * part + 1]);
        }
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          along_q[2 * part + i % 2] += q_of(part, i) * dq[part][i];
          along_k[2 * part + i % 2] += k_of(part, i) * dk[part][i];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * b + i / 2 * 8 + 2 * t + i % 2;
      float numbers[4] = {along_q[i], along_k[i], starts[i], ends[i]};
#pragma unroll
      for (int which = 0; which < 4; ++which) {
        for (int mask = 4; mask < 32; mask *= 2) numbers[which] += exchange(numbers[which], mask);
        if (g == 0) along[(half * 4 + which) * kChunk + token] = numbers[which];
      }
    }
    sync_block();

    // dg of token thread / 4, a quarter of each sum a thread.
    {
      const int row = thread / 4, first = thread % 4 * 16;
      float quarter = 0.0F;
      for (int j = first; j < first + 16; ++j) quarter += j < row ? pairs[row * kPairPitch + j] : 0.0F;
      float running = 0.0F;  // of the quarters before this one
      const float next = exchange(quarter, 1);
      if (thread % 2 == 1) running = next;
      const float others = exchange(quarter + next, 2);
      if (thread % 4 >= 2) running += others;
      for (int j = first; j < first + 16; ++j) {  // sum of the columns before j
        const float z = j < row ? pairs[row * kPairPitch + j] : 0.0F;
        pairs[row * kPairPitch + j] = running;
        running += z;
      }
    }
    sync_block();
    if (trains_gate) {
      const int token = thread / 4, first = thread % 4 * 16;
      float dg = 0.0F;
      for (int i = first; i < first + 16; ++i)
        dg += i >= token ? along[2 * kChunk + i] + along[6 * kChunk + i] + pairs[i * kPairPitch + token]
                         : along[3 * kChunk + i] + along[7 * kChunk + i];
      for (int mask = 1; mask < 4; mask *= 2) dg += exchange(dg, mask);
      float dy[1] = {0.0F}, dA_log = 0.0F;
      if (thread % 4 == 0 && token < n) {
        dy[0] = dg + exp2_fast(sums[kChunk - 1]) * sum_of_warps(warps);
        const float y[1] = {shifted_scalar_logit(p, chunk.first + token, head)};
        gate.backward(y, dy, dA_log);
        *row_of(p.dgate_logit, chunk.first + token, head, 1) = __float2bfloat16_rn(dy[0]);
      }
      store_warp_sum(dy[0], warps + 8);
      store_warp_sum(dA_log, warps + 16);
    }

    // The l2 norms, and out.
    KeyNorms key_norms;  // the tiles hold the normalised q, with the scale, and k
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * b + i / 2 * 8 + 2 * t + i % 2;
      key_norms.q_norm[i] = norms[token];
      key_norms.k_norm[i] = norms[kChunk + token];
      key_norms.along_q[i] = p.l2norm_qk ? along[token] + along[4 * kChunk + token] : 0.0F;
      key_norms.along_k[i] = p.l2norm_qk ? along[kChunk + token] + along[5 * kChunk + token] : 0.0F;
    }
    const float inverse_scale = 1.0F / p.scale;
    put_key_gradients<K>(
        p, tile_sums, key_norms, base + Layout::kQ, base + Layout::kK, [=](int) { return inverse_scale; },
        [](int) { return 1.0F; });
    sync_block();
    store_key_gradients<K>(p, w, item, base + Layout::kQ, base + Layout::kK, [](const auto&, int64_t) {});
    if (trains_gate && thread == 0) {
      float* partials = w.partials + item.index * 2;
      partials[0] = sum_of_warps(warps + 8);
      partials[1] = sum_of_warps(warps + 16);
    }
    sync_block();
    item = next_item(p, item.index + gridDim.x);
    if (item.index < num_items) load_scalar_rows<K>(p, w, item, base, rows_barrier);
  }
}

}  // namespace palimpsest::cuda::sm90
