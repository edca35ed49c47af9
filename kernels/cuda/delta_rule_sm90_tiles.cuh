// The first part of the Hopper delta rule's chunk-local backward, which both kinds of decay share: a persistent block
// takes chunk after chunk and head, and while it works the tiles of the next are loaded, 64 value columns at a time.
// From them come dA = dO X^T, dP = -dV X^T, the products with S0 and dS, and dV . X. What has channels is held
// transposed, channels by tokens: warp (b, h) has the tokens 16 b .. 16 b + 15 and half h of the channels, 16 channels
// a tile of accumulators.
#pragma once

#include "kernels/cuda/delta_rule_sm90_common.cuh"

namespace palimpsest::cuda::sm90 {

constexpr int kLocalThreads = 256;
constexpr int kLocalStages = 2;
constexpr int kLocalPitch = 144;  // bytes of a row of 64 numbers
constexpr int kLocalRowsBytes = kChunk * kLocalPitch;

// A stage: 64 value columns. S0 and dS are images.
template <int K>
struct TileLayout {
  static constexpr int kStateBytes = K * 128;
  static constexpr int kS = 0, kDs = kStateBytes, kDo = 2 * kStateBytes, kDv = kDo + kLocalRowsBytes,
                       kX = kDv + kLocalRowsBytes;
  static constexpr int kStageBytes = kX + kLocalRowsBytes;
  static constexpr int kBytes = kLocalStages * kStageBytes;
  static_assert(kStageBytes % 1024 == 0);
};

// A piece of work: a chunk and head.
struct LocalItem {
  int64_t index;  // past the last: none
  int64_t slot, head;
  Chunk chunk;
};

__device__ inline LocalItem next_item(const DeltaRuleSm90& p, int64_t index) {
  const int64_t count = num_slots(p) * p.HV;
  LocalItem item;
  for (; index < count; index += gridDim.x) {
    item.slot = static_cast<uint32_t>(index) / static_cast<uint32_t>(p.HV);  // a grid has fewer than 2^31 blocks
    item.head = index - item.slot * p.HV;
    item.chunk = find_chunk(p, item.slot);
    if (item.chunk.n > 0) break;
  }
  item.index = index < count ? index : count;
  return item;
}

// Where S0 and dS of an item are: an image, f32 of the caller, or zero.
__device__ inline bool has_entry_image(const LocalItem& item) {
  return item.chunk.index > 0;
}
__device__ inline bool has_exit_image(const DeltaRuleSm90& p, const LocalItem& item) {
  return !item.chunk.is_last() || p.d_final_state != nullptr;
}

// The block asks for 64 value columns of an item. Rows past the end are 0.
template <int K>
__device__ inline void load_local_tile(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, const LocalItem& item,
                                       int64_t tile, uint32_t stage, uint32_t barrier) {
  using Layout = TileLayout<K>;
  const int thread = static_cast<int>(threadIdx.x), n = item.chunk.n;
  if (thread == 0) {
    const bool entry = has_entry_image(item), exit = has_exit_image(p, item);
    barrier_expect(barrier,
                   static_cast<uint32_t>((entry ? Layout::kStateBytes : 0) + (exit ? Layout::kStateBytes : 0)));
    const auto state = [&](int64_t slot) { return ((slot * p.HV + item.head) * p.V + tile * 64) * K; };
    if (entry) bulk_load(stage + Layout::kS, w.states + state(item.chunk.state_slot()), Layout::kStateBytes, barrier);
    if (exit) bulk_load(stage + Layout::kDs, w.dstates + state(item.slot), Layout::kStateBytes, barrier);
  }
  const auto copy = [&](uint32_t to, const __nv_bfloat16* rows, int64_t stride) {
    copy_token_rows<64, kLocalThreads>(rows, stride, n, [=](int row) { return to + row * kLocalPitch; });
  };
  const int64_t first = item.chunk.first;
  copy(stage + Layout::kDo, row_of(p.d_o, first, item.head, p.V) + tile * 64, p.d_o.stride);
  copy(stage + Layout::kDv, row_of(p.dv, first, item.head, p.V) + tile * 64, p.dv.stride);
  copy(stage + Layout::kX, w.x + (first * p.HV + item.head) * p.V + tile * 64, p.HV * p.V);
  async_copy_arrive(barrier);
}

// An image [64 values, K] of a f32 state [K, V], or of zero.
template <int K>
__device__ inline void fill_state_image(uint32_t image, const float* state, int64_t V, int64_t tile) {
  for (int i = static_cast<int>(threadIdx.x); i < 64 * K / 8; i += kLocalThreads) {
    const int value = i % 64, piece = i / 64;
    uint32_t packed[4] = {0, 0, 0, 0};
    if (state != nullptr) {
      const float* from = state + 8 * piece * V + tile * 64 + value;
      for (int j = 0; j < 4; ++j) packed[j] = pack_bf16(from[2 * j * V], from[(2 * j + 1) * V]);
    }
    *shared_pointer<uint4>(image + piece / 8 * kTileBytes + image_piece(value, piece % 8)) =
        make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
}

// What the tiles of one item add up to, in one thread.
template <int K>
struct TileSums {
  static constexpr int kTiles = K / 32;                                          // of 16 channels a warp
  float dqb[kTiles][2][4] = {}, dkb[kTiles][2][4] = {}, dkt[kTiles][2][4] = {};  // dkb is that of -Kb; by 8 tokens
  float states[kTiles][2] = {};  // a share of rowsum(S0 * dS) of channels g and g + 8
  float scores[4][2][4] = {};    // dA (half 0) or -dP (half 1) of the warp's 16 rows, by 16 and 8 columns
  float dbeta = 0.0F;            // a quarter of dV . X of token thread / 4
};

template <int K>
__device__ __forceinline__ void add_tile(uint32_t stage, TileSums<K>& sums) {
  using Layout = TileLayout<K>;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int b = warp % 4, half = warp / 4;
  const int row_a = lane / 8 % 2 * 8 + lane % 8, piece_a = lane / 16;  // matrices: rows, rows + 8, then columns + 8
  const int row_b = lane / 16 * 8 + lane % 8, piece_b = lane / 8 % 2;  // columns, columns + 8, then rows + 8
  const uint32_t own = stage + (half == 0 ? Layout::kDo : Layout::kDv) + (16 * b + row_a) * kLocalPitch;
#pragma unroll
  for (int step = 0; step < 4; ++step) {  // 16 values
    uint32_t a[4];
    load_matrices(a, own + 32 * step + 16 * piece_a);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > b) break;
      uint32_t x[4];
      load_matrices(x, stage + Layout::kX + (16 * block + row_b) * kLocalPitch + 32 * step + 16 * piece_b);
      mma_k16(sums.scores[block][0], a[0], a[1], a[2], a[3], x[0], x[1]);
      mma_k16(sums.scores[block][1], a[0], a[1], a[2], a[3], x[2], x[3]);
    }
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t d_o[4], dv[4], x[4];
    const uint32_t rows = (16 * b + row_b) * kLocalPitch + 32 * step + 16 * piece_b;
    load_matrices(d_o, stage + Layout::kDo + rows);
    load_matrices(dv, stage + Layout::kDv + rows);
    load_matrices(x, stage + Layout::kX + rows);
    // S0 and dS of 16 channels, loaded one round ahead.
    uint32_t states[2][2][4];
    const auto load_states = [&](int c) {
      const int piece = half * (K / 16) + 2 * c + piece_b;
      const uint32_t image = piece / 8 * kTileBytes + image_piece(16 * step + row_b, piece % 8);
      load_matrices_transposed(states[c % 2][0], stage + Layout::kS + image);
      load_matrices_transposed(states[c % 2][1], stage + Layout::kDs + image);
    };
    load_states(0);
#pragma unroll
    for (int c = 0; c < TileSums<K>::kTiles; ++c) {
      if (c + 1 < TileSums<K>::kTiles) load_states(c + 1);
      const uint32_t(&s)[4] = states[c % 2][0], (&ds)[4] = states[c % 2][1];
      mma_k16(sums.dqb[c][0], s[0], s[1], s[2], s[3], d_o[0], d_o[1]);
      mma_k16(sums.dqb[c][1], s[0], s[1], s[2], s[3], d_o[2], d_o[3]);
      mma_k16(sums.dkb[c][0], s[0], s[1], s[2], s[3], dv[0], dv[1]);
      mma_k16(sums.dkb[c][1], s[0], s[1], s[2], s[3], dv[2], dv[3]);
      mma_k16(sums.dkt[c][0], ds[0], ds[1], ds[2], ds[3], x[0], x[1]);
      mma_k16(sums.dkt[c][1], ds[0], ds[1], ds[2], ds[3], x[2], x[3]);
      if (step == b) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
          sums.states[c][r % 2] += low_of(s[r]) * low_of(ds[r]) + high_of(s[r]) * high_of(ds[r]);
      }
    }
  }
  {
    const uint32_t rows = thread / 4 * kLocalPitch + thread % 4 * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 dv = *shared_pointer<const uint4>(stage + Layout::kDv + rows + 16 * i);
      const uint4 x = *shared_pointer<const uint4>(stage + Layout::kX + rows + 16 * i);
      sums.dbeta += low_of(dv.x) * low_of(x.x) + high_of(dv.x) * high_of(x.x) + low_of(dv.y) * low_of(x.y) +
                    high_of(dv.y) * high_of(x.y) + low_of(dv.z) * low_of(x.z) + high_of(dv.z) * high_of(x.z) +
                    low_of(dv.w) * low_of(x.w) + high_of(dv.w) * high_of(x.w);
    }
  }
}

// The ring of stages, and how far ahead of the items the loads are.
template <int K>
class TileRing {
 public:
  // Barriers of the stages lie at `barriers`.
  __device__ TileRing(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, const LocalItem& first, uint32_t base,
                      uint32_t barriers)
      : p_(p), w_(w), ahead_(first), base_(base), barriers_(barriers) {
#pragma unroll 1
    for (int i = 0; i < kLocalStages; ++i) load_ahead();
  }

  // All value columns of an item, into `sums`.
  __device__ __forceinline__ void add_item(const LocalItem& item, TileSums<K>& sums) {
    using Layout = TileLayout<K>;
    const bool entry = has_entry_image(item), exit = has_exit_image(p_, item);
#pragma unroll 1
    for (int64_t tile = 0; tile < p_.V / 64; ++tile) {
      const uint32_t index = num_used_ % kLocalStages, stage = base_ + index * Layout::kStageBytes;
      barrier_wait(barriers_ + 8 * index, num_used_ / kLocalStages % 2);
      ++num_used_;
      if (!entry || !exit) {
        if (!entry)
          fill_state_image<K>(stage + Layout::kS,
                              state_of(p_, p_.initial_state, p_.entering, item.chunk.document, item.head), p_.V, tile);
        if (!exit) fill_state_image<K>(stage + Layout::kDs, nullptr, p_.V, tile);
        async_fence();  // bulk copies will write there again
        sync_block();
      }
      add_tile<K>(stage, sums);
      sync_block();
      load_ahead();
    }
  }

 private:
  __device__ void load_ahead() {
    if (ahead_.index >= num_slots(p_) * p_.HV) return;
    const uint32_t index = num_loaded_++ % kLocalStages;
    load_local_tile<K>(p_, w_, ahead_, ahead_tile_, base_ + index * TileLayout<K>::kStageBytes, barriers_ + 8 * index);
    if (++ahead_tile_ == p_.V / 64) {
      ahead_tile_ = 0;
      ahead_ = next_item(p_, ahead_.index + gridDim.x);
    }
  }

  const DeltaRuleSm90& p_;
  const DeltaRuleWorkspace& w_;
  LocalItem ahead_;
  int64_t ahead_tile_ = 0;
  uint32_t base_, barriers_, num_loaded_ = 0, num_used_ = 0;
};

// dA and -dP of a warp's rows as bf16 tiles; the diagonal of dA in f32 besides.
__device__ __forceinline__ void store_score_gradients(const float (&scores)[4][2][4], uint32_t to, float* diagonal) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const int b = warp % 4, half = warp / 4;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > b) break;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 16 * b + 8 * i + g, column = 16 * block + 8 * part + 2 * t;
        float low = scores[block][part][2 * i], high = scores[block][part][2 * i + 1];
        if (half == 0) {
          if (column == row) diagonal[row] = low;
          if (column + 1 == row) diagonal[row] = high;
        } else {
          low = -low;
          high = -high;
        }
        *shared_pointer<uint32_t>(to + row * kLocalPitch + 2 * column) = pack_bf16(low, high);
      }
    }
  }
}

// dlogit of beta = (dV . X) (1 - beta / beta_scale) / beta of token thread / 4; `dbeta` is a quarter of dV . X.
__device__ inline void store_beta_gradient(const DeltaRuleSm90& p, const LocalItem& item, const float* beta,
                                           float dbeta) {
  const int thread = static_cast<int>(threadIdx.x), token = thread / 4;
  for (int mask = 1; mask < 4; mask *= 2) dbeta += exchange(dbeta, mask);
  if (thread % 4 == 0 && token < item.chunk.n)
    *row_of(p.dbeta_logit, item.chunk.first + token, item.head, 1) =
        __float2bfloat16_rn(dbeta * (1.0F - beta[token] / p.beta_scale) / beta[token]);
}

// Where the gradients of q and k of a token and value head go: to their places, or to be summed over a group.
__device__ inline __nv_bfloat16* group_row(const DeltaRuleSm90& p, const DeltaRows<__nv_bfloat16>& rows,
                                           __nv_bfloat16* of_heads, int64_t token, int64_t head) {
  return p.HV > p.H ? of_heads + (token * p.HV + head) * p.K : row_of(rows, token, head, p.K);
}

// The gradients of q and k of an item from their tiles to their places; more(copy, token) may copy(to, tile) from
// others.
template <int K, class More>
__device__ __forceinline__ void store_key_gradients(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w,
                                                    const LocalItem& item, uint32_t q_tile, uint32_t k_tile,
                                                    More more) {
  constexpr int kPitch = 2 * K + 16;
  for (int i = static_cast<int>(threadIdx.x); i < item.chunk.n * (K / 8); i += kLocalThreads) {
    const int row = i / (K / 8), piece = i % (K / 8);
    const int64_t token = item.chunk.first + row;
    const auto copy = [&](__nv_bfloat16* to, uint32_t tile) {
      *reinterpret_cast<uint4*>(to + 8 * piece) = *shared_pointer<const uint4>(tile + row * kPitch + 16 * piece);
    };
    copy(group_row(p, p.dq, w.dq, token, item.head), q_tile);
    copy(group_row(p, p.dk, w.dk, token, item.head), k_tile);
    more(copy, token);
  }
}

// The last of a warp's 16 tokens, over K / 2 channels: dq and dk of the normalised go through the l2 norms, and in
// place of q and k, which lie in tiles. Arrays [4] are of the lane's tokens: norms, what makes the normalised of a
// tile's numbers, and the products x^ . dx^.
struct KeyNorms {
  float q_norm[4], k_norm[4], along_q[4], along_k[4];
};
template <int K, class QFactor, class KFactor>
__device__ __forceinline__ void put_key_gradients(const DeltaRuleSm90& p, const TileSums<K>& sums, const KeyNorms& of,
                                                  uint32_t q_tile, uint32_t k_tile, QFactor q_factor,
                                                  KFactor k_factor) {
  constexpr int kPitch = 2 * K + 16;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int b = warp % 4, half = warp / 4, row_b = lane / 16 * 8 + lane % 8, piece_b = lane / 8 % 2;
#pragma unroll
  for (int c = 0; c < TileSums<K>::kTiles; ++c) {
    const uint32_t at = (16 * b + row_b) * kPitch + 2 * (half * (K / 2) + 16 * c) + 16 * piece_b;
    uint32_t q[4], k[4];
    load_matrices_transposed(q, q_tile + at);
    load_matrices_transposed(k, k_tile + at);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float q_out[2], k_out[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = r / 2 * 2 + i;
        const float q_hat = (i == 0 ? low_of(q[r]) : high_of(q[r])) * q_factor(token);
        const float k_hat = (i == 0 ? low_of(k[r]) : high_of(k[r])) * k_factor(token);
        q_out[i] = of.q_norm[token] * (p.scale * sums.dqb[c][r / 2][r % 2 * 2 + i] - q_hat * of.along_q[token]);
        k_out[i] = of.k_norm[token] * (sums.dkb[c][r / 2][r % 2 * 2 + i] - k_hat * of.along_k[token]);
      }
      q[r] = pack_bf16(q_out[0], q_out[1]);
      k[r] = pack_bf16(k_out[0], k_out[1]);
    }
    store_matrices_transposed(q_tile + at, q[0], q[1], q[2], q[3]);
    store_matrices_transposed(k_tile + at, k[0], k[1], k[2], k[3]);
  }
}

// Asks for the raw q and k of an item.
template <int K>
__device__ inline void copy_local_keys(const DeltaRuleSm90& p, const LocalItem& item, uint32_t q_tile,
                                       uint32_t k_tile) {
  constexpr int kPitch = 2 * K + 16;
  const int64_t key_head = item.head / (p.HV / p.H), first = item.chunk.first;
  copy_token_rows<K, kLocalThreads>(row_of(p.q, first, key_head, K), p.q.stride, item.chunk.n,
                                    [=](int row) { return q_tile + row * kPitch; });
  copy_token_rows<K, kLocalThreads>(row_of(p.k, first, key_head, K), p.k.stride, item.chunk.n,
                                    [=](int row) { return k_tile + row * kPitch; });
}

// Slots without tokens take part in the sums of the gate's parameters.
__device__ inline void clear_empty_partials(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, int W) {
  const int64_t num_items = num_slots(p) * p.HV;
  for (int64_t index = blockIdx.x; index < num_items; index += gridDim.x) {
    if (find_chunk(p, index / p.HV).n > 0) continue;
    for (int c = static_cast<int>(threadIdx.x); c <= W; c += kLocalThreads) w.partials[index * (W + 1) + c] = 0.0F;
  }
}

}  // namespace palimpsest::cuda::sm90
