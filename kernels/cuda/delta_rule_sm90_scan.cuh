// The serial kernels of the Hopper delta rule: the state through the chunks of one document, and its cotangent back.
//
// A block has one document, value head and 64 value columns. Its fifth warp loads a chunk ahead of the other four,
// which hold S^T (dS^T) [64, K] in f32 accumulators, 16 value columns a warp. An accumulator packed to bf16 is operand
// A of the next product, so that state, X and dX never pass through shared memory:
//
//   forward   R^T = V^T - S^T Kb^T              backward  dX^T = dS^T Kt^T + dO^T Aqk
//             X^T = bR^T + bR^T (M - I)^T                 Y^T = dX^T + dX^T (M - I)
//             O^T = S^T Qb^T + X^T Aqk^T                  dV^T = Y^T diag(beta)
//             S^T = S^T Diag(e^G_C) + X^T Kt              dS^T = dS^T Diag(e^G_C) + dO^T Qb - dV^T Kb
//
// Rows of a tile past the end of a short chunk are 0, and so is all that comes of them.
#pragma once

#include "kernels/cuda/delta_rule_sm90_common.cuh"

namespace palimpsest::cuda::sm90 {

constexpr int kScanThreads = 160;
constexpr int kScanConsumers = 128;
constexpr int kValueTile = 64;
constexpr int kRowPitch = 144;  // bytes of a row of 64 values in shared memory
constexpr int kOutPitch = 48;   // of 16 values
constexpr int kStages = 2;

template <int K>
struct ScanLayout {
  static constexpr int kHalves = K / 64;
  static constexpr int kKb = 0;
  static constexpr int kQb = kKb + kHalves * kTileBytes;
  static constexpr int kKt = kQb + kHalves * kTileBytes;
  static constexpr int kM = kKt + kHalves * kTileBytes;
  static constexpr int kAqk = kM + kTileBytes;
  static constexpr int kRows = kAqk + kTileBytes;  // V or dO
  static constexpr int kBeta = kRows + kChunk * kRowPitch;
  static constexpr int kDecay = kBeta + kChunk * 4;
  static constexpr int kStageBytes = (kDecay + K * 4 + 1023) / 1024 * 1024;
  static constexpr int kState = kStages * kStageBytes;  // image on its way out
  static constexpr int kOut = kState + kHalves * kTileBytes;
  static constexpr int kBarriers = kOut + 4 * kChunk * kOutPitch;  // full, then empty
  static constexpr int kBytes = kBarriers + 16 * kStages;
};

// What a scan is for: everything that it can give; or, from nothing at the start of a segment that is not a document's,
// the state at its end; or the map's Phi, which is that with no values and from the identity.
enum class ScanPass : uint8_t { kResults, kEnds, kMaps };

// The document, its chunks and the piece of the work that a block has.
struct ScanTask {
  int64_t document, begin, head, tile, slot, first_slot;  // slot: of the segment; first_slot: of the document's chunks
  int first, num_chunks;                                  // the document's chunks from `first` on
  int64_t length;
  bool starts, ends;  // whether the document does here

  __device__ ScanTask(const DeltaRuleSm90& p, int segment) {
    const int64_t tiles = p.V / kValueTile, index = blockIdx.x, tokens = int64_t{kChunk} * segment;
    tile = index % tiles;
    head = index / tiles % p.HV;
    slot = index / tiles / p.HV;
    document = slot;
    if (segment > 0) {
      int64_t low = 0, high = p.num_documents - 1;
      while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (p.offsets[middle] / tokens + middle <= slot) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      document = low;
    }
    begin = p.offsets[document];
    length = p.offsets[document + 1] - begin;
    first_slot = begin / kChunk + document;
    first = segment == 0 ? 0 : static_cast<int>(slot - begin / tokens - document) * segment;
    const int left = static_cast<int>((length + kChunk - 1) / kChunk) - first;
    num_chunks = segment == 0 || left < segment ? left : segment;
    starts = first == 0;
    ends = num_chunks == left;
  }
  // Some slots stay empty.
  __device__ bool exists() const { return starts || num_chunks > 0; }
  __device__ int64_t first_token() const { return begin + first * int64_t{kChunk}; }
  __device__ Chunk chunk(int index) const {
    const int64_t left = length - index * int64_t{kChunk};
    Chunk chunk;
    chunk.document = document;
    chunk.first = begin + index * int64_t{kChunk};
    chunk.length = length;
    chunk.index = index;
    chunk.n = left < kChunk ? static_cast<int>(left) : kChunk;
    return chunk;
  }
};

// The loading warp brings a chunk: Kb, Qb, Kt, M, Aqk, 64 columns of `rows`, beta and the decay of the state.
template <int K>
__device__ inline void load_scan_chunk(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, const ScanTask& task,
                                       const Chunk& chunk, const DeltaRows<const __nv_bfloat16>& rows, uint32_t stage,
                                       uint32_t full, int lane) {
  using Layout = ScanLayout<K>;
  const uint32_t tile_bytes = static_cast<uint32_t>(chunk.n * 128);
  if (lane == 0) {
    barrier_expect(full, tile_bytes * (3 * Layout::kHalves + 2) + kChunk * 4 + K * 4);
    const int64_t image = image_offset(p, chunk, task.head, K);
    const int64_t square = image_offset(p, chunk, task.head, kChunk);
    const int64_t slot_head = (task.first_slot + chunk.index) * p.HV + task.head;
    for (int half = 0; half < Layout::kHalves; ++half) {
      const int64_t from = image + half * int64_t{chunk.n} * 64;
      bulk_load(stage + Layout::kKb + half * kTileBytes, w.kb + from, tile_bytes, full);
      bulk_load(stage + Layout::kKt + half * kTileBytes, w.kt + from, tile_bytes, full);
      bulk_load(stage + Layout::kQb + half * kTileBytes, w.qb + from, tile_bytes, full);
    }
    bulk_load(stage + Layout::kM, w.m + square, tile_bytes, full);
    bulk_load(stage + Layout::kAqk, w.aqk + square, tile_bytes, full);
    bulk_load(stage + Layout::kBeta, w.beta + slot_head * kChunk, kChunk * 4, full);
    bulk_load(stage + Layout::kDecay, w.decay + slot_head * K, K * 4, full);
  }
  const __nv_bfloat16* from = row_of(rows, chunk.first, task.head, p.V) + task.tile * kValueTile + lane % 8 * 8;
#pragma unroll 4
  for (int row = lane / 8; row < kChunk; row += 4)  // rows past the end are 0
    async_copy(stage + Layout::kRows + row * kRowPitch + lane % 8 * 16, row < chunk.n ? from + row * rows.stride : from,
               row < chunk.n);
  async_copy_arrive(full);
}

// Zeros in the rows past the end of all tiles of a stage, by the loading warp.
template <int K>
__device__ inline void clear_tiles(uint32_t stage, int n, int lane) {
  using Layout = ScanLayout<K>;
  for (int tile = 0; tile < Layout::kRows; tile += kTileBytes) {
    for (int i = 128 * n + 16 * lane; i < kTileBytes; i += 512)
      *shared_pointer<uint4>(stage + tile + i) = make_uint4(0, 0, 0, 0);
  }
  async_fence();
  sync_warp();
}

// Zeros in all stages, the barriers ready.
template <int K>
__device__ inline void start_scan(uint32_t base) {
  using Layout = ScanLayout<K>;
  for (uint32_t i = threadIdx.x * 16; i < kStages * Layout::kStageBytes; i += kScanThreads * 16)
    *shared_pointer<uint4>(base + i) = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(base + Layout::kBarriers + 8 * i, 1 + 32);
      barrier_init(base + Layout::kBarriers + 8 * (kStages + i), kScanConsumers);
    }
    barrier_init_fence();
  }
  async_fence();
  sync_block();
}

template <int K>
__device__ inline void load_scan(const DeltaRuleSm90& p, const DeltaRuleWorkspace& w, const ScanTask& task,
                                 const DeltaRows<const __nv_bfloat16>& rows, bool forward, uint32_t base, int lane) {
  using Layout = ScanLayout<K>;
  for (int i = 0; i < task.num_chunks; ++i) {
    const int stage = i % kStages;
    if (i >= kStages)
      barrier_wait(base + Layout::kBarriers + 8 * (kStages + stage), static_cast<uint32_t>(i / kStages + 1) % 2);
    const Chunk chunk = task.chunk(task.first + (forward ? i : task.num_chunks - 1 - i));
    if (forward && i >= kStages && i + 1 == task.num_chunks) {  // a short chunk comes last; backward it comes first
      clear_tiles<K>(base + stage * Layout::kStageBytes, chunk.n, lane);
    }
    load_scan_chunk<K>(p, w, task, chunk, rows, base + stage * Layout::kStageBytes,
                       base + Layout::kBarriers + 8 * stage, lane);
  }
}

// Accumulators as operand A, 16 columns a step.
template <int kSteps>
__device__ inline void pack_operand(const float (&d)[2 * kSteps][4], uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[step][2 * half] = pack_bf16(d[2 * step + half][0], d[2 * step + half][1]);
      a[step][2 * half + 1] = pack_bf16(d[2 * step + half][2], d[2 * step + half][3]);
    }
  }
}

// d [64, 64 or K] (+)= sign a B over kSteps steps of 16; transposed: B = tile^T, whose rows are split in halves of 64
// columns.
template <bool accumulate, int kSteps, int kTiles>
__device__ inline void multiply_transposed(float (&d)[kTiles][4], const uint32_t (&a)[kSteps][4], uint32_t tile) {
  warpgroup_product<Major::kK, 1, accumulate>(d, a[0], tile_descriptor(tile));
#pragma unroll
  for (int step = 1; step < kSteps; ++step)
    warpgroup_product<Major::kK, 1>(d, a[step], tile_descriptor(tile + step / 4 * kTileBytes + step % 4 * 32));
}
template <int sign, int kSteps, int kTiles>
__device__ inline void multiply(float (&d)[kTiles][4], const uint32_t (&a)[kSteps][4], uint32_t tile) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    warpgroup_product<Major::kN, sign>(d, a[step], tile_descriptor(tile + step * 2048, kTileBytes));
}

// Where a lane writes rows of tokens: 8 of the warp's 16 values of every 16th row from row lane / 2 on.
struct LaneRows {
  __nv_bfloat16* data;  // null: nowhere
  int64_t stride16;     // of 16 rows

  __device__ LaneRows(__nv_bfloat16* rows, int64_t stride, int64_t first, int64_t column, int lane)
      : data(rows == nullptr ? nullptr : rows + (first + lane / 2) * stride + column + lane % 2 * 8),
        stride16(16 * stride) {}
  __device__ void move(int chunks) { data += chunks * 4 * stride16; }
};

// Accumulators [16 values of this warp, 64 tokens], packed, to the first n rows of tokens.
__device__ inline void store_rows(const uint32_t (&packed)[4][4], uint32_t out, int lane, int n, const LaneRows& to) {
  const uint32_t address = out + (lane / 16 * 8 + lane % 8) * kOutPitch + lane / 8 % 2 * 16;
  const uint4* own = shared_pointer<const uint4>(out + lane / 2 * kOutPitch + lane % 2 * 16);
  sync_warp();  // what lay there has been read
#pragma unroll
  for (int step = 0; step < 4; ++step)
    store_matrices_transposed(address + step * 16 * kOutPitch, packed[step][0], packed[step][1], packed[step][2],
                              packed[step][3]);
  sync_warp();
  uint4 rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rows[i] = own[i * kOutPitch];  // 16 rows of kOutPitch bytes
  __nv_bfloat16* row = to.data;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (lane / 2 + 16 * i < n) *reinterpret_cast<uint4*>(row) = rows[i];
    row += to.stride16;
  }
}

// The state, packed as operand A, to its image. Each warp stores its 16 rows, a lane 16 bytes of every 512 from `to`
// on.
template <int K>
__device__ inline void store_state_image(const uint32_t (&a)[K / 16][4], uint32_t image, int warp, int lane,
                                         uint4* to) {
  const uint4* own = shared_pointer<const uint4>(image + warp * 2048 + lane * 16);
  sync_warp();  // what lay there has been read
#pragma unroll
  for (int step = 0; step < K / 16; ++step)
    store_matrices(image + step / 4 * kTileBytes +
                       image_piece(16 * warp + lane / 8 % 2 * 8 + lane % 8, 2 * (step % 4) + lane / 16),
                   a[step][0], a[step][1], a[step][2], a[step][3]);
  sync_warp();
#pragma unroll
  for (int half = 0; half < K / 64; ++half) {
    uint4 rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = own[half * (kTileBytes / 16) + i * 32];
#pragma unroll
    for (int i = 0; i < 4; ++i) to[half * (kTileBytes / 16) + i * 32] = rows[i];
  }
}

// A whole f32 state [K, V] of one document and head: this thread's numbers, or zeros.
template <int K>
__device__ inline void load_state(const float* state, int64_t V, int value, int t, float (&s)[K / 8][4]) {
#pragma unroll
  for (int j = 0; j < K / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[j][i] = state == nullptr ? 0.0F : state[(8 * j + 2 * t + i % 2) * V + value + i / 2 * 8];
  }
}
template <int K>
__device__ inline void identity_state(int value, int t, float (&s)[K / 8][4]) {
#pragma unroll
  for (int j = 0; j < K / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = 8 * j + 2 * t + i % 2 == value + i / 2 * 8 ? 1.0F : 0.0F;
  }
}
template <int K>
__device__ inline void store_state(float* state, int64_t V, int value, int t, const float (&s)[K / 8][4]) {
  if (state == nullptr) return;
#pragma unroll
  for (int j = 0; j < K / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state[(8 * j + 2 * t + i % 2) * V + value + i / 2 * 8] = s[j][i];
  }
}
template <int K>
__device__ inline void decay_state(uint32_t decay, int t, float (&s)[K / 8][4]) {
#pragma unroll
  for (int j = 0; j < K / 8; ++j) {
    const float2 d = *shared_pointer<const float2>(decay + 4 * (8 * j + 2 * t));
    s[j][0] *= d.x;
    s[j][1] *= d.y;
    s[j][2] *= d.x;
    s[j][3] *= d.y;
  }
}

// 16 values of this warp and 64 tokens as operand A or in the layout of accumulators, from rows of tokens.
__device__ inline void load_rows_transposed(uint32_t (&packed)[4][4], uint32_t rows, int warp, int lane) {
  const uint32_t address = rows + (lane / 16 * 8 + lane % 8) * kRowPitch + 2 * (16 * warp + lane / 8 % 2 * 8);
#pragma unroll
  for (int step = 0; step < 4; ++step) load_matrices_transposed(packed[step], address + step * 16 * kRowPitch);
}

template <int K>
__global__ void __launch_bounds__(kScanThreads, 1)
    delta_rule_fwd_scan_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w, ScanPass pass) {
  using Layout = ScanLayout<K>;
  constexpr int kSteps = K / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const uint32_t base = dynamic_shared();
  const ScanTask task(p, w.segment);
  if (!task.exists()) return;
  const float* entry = nullptr;
  float* exit = nullptr;
  if (task.starts && pass != ScanPass::kMaps) {
    entry = state_of(p, p.initial_state, p.entering, task.document, task.head);
  } else if (pass == ScanPass::kResults) {
    entry = segment_state(p, w.ends, task.slot - 1, task.head);
  }
  if (pass != ScanPass::kResults) {
    exit = segment_state(p, pass == ScanPass::kMaps ? w.maps : w.ends, task.slot, task.head);
  } else if (task.ends) {
    exit = state_of(p, p.final_state, p.leaving, task.document, task.head);
  }
  if (p.o.data == nullptr && w.x == nullptr && exit == nullptr) return;  // nobody asks for anything of it
  start_scan<K>(base);
  if (warp == 4) {
    load_scan<K>(p, w, task, p.v, true, base, lane);
    return;
  }
  const int value = static_cast<int>(task.tile) * kValueTile + 16 * warp + lane / 4;
  const uint32_t out = base + Layout::kOut + warp * kChunk * kOutPitch;
  float s[K / 8][4];
  if (pass == ScanPass::kMaps) {
    identity_state<K>(value, t, s);
  } else {
    load_state<K>(entry, p.V, value, t, s);
  }
  uint32_t a[kSteps][4], o_packed[4][4];
  pack_operand<kSteps>(s, a);
  const int64_t column = task.head * p.V + task.tile * kValueTile + 16 * warp;
  LaneRows o_rows(p.o.data, p.o.stride, task.first_token(), column, lane);
  LaneRows x_rows(w.x, p.HV * p.V, task.first_token(), column, lane);
  // Images of the states at the starts of the second, third .. chunk.
  const int64_t state_stride = p.HV * p.V * K / 8;  // uint4
  const int64_t first_state = task.begin / kChunk + (task.starts ? 0 : task.first - 1);
  uint4* states = w.states == nullptr ? nullptr
                                      : reinterpret_cast<uint4*>(w.states) + first_state * state_stride +
                                            (task.head * p.V + task.tile * kValueTile) * K / 8 + warp * 128 + lane;
  for (int i = 0; i < task.num_chunks; ++i) {
    const Chunk chunk = task.chunk(task.first + i);
    const uint32_t stage = base + i % kStages * Layout::kStageBytes;
    const uint32_t barrier = base + Layout::kBarriers + 8 * (i % kStages);
    barrier_wait(barrier, static_cast<uint32_t>(i / kStages) % 2);
    float r[8][4], o[8][4];
    warpgroup_fence();
    multiply_transposed<false, kSteps>(r, a, stage + Layout::kKb);
    warpgroup_commit();
    multiply_transposed<false, kSteps>(o, a, stage + Layout::kQb);
    warpgroup_commit();
    // While they run: what is left to store of the last chunk.
    uint32_t v[4][4];
    load_rows_transposed(v, stage + Layout::kRows, warp, lane);
    if (chunk.index > 0 && states != nullptr) {
      store_state_image<K>(a, base + Layout::kState, warp, lane, states);
      states += state_stride;
    }
    if (i > 0 && o_rows.data != nullptr) {
      store_rows(o_packed, out, lane, kChunk, o_rows);
      o_rows.move(1);
    }
    warpgroup_wait<1>();
    pin(r);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 beta = *shared_pointer<const float2>(stage + Layout::kBeta + 4 * (8 * j + 2 * t));
      const uint32_t low = v[j / 2][j % 2 * 2], high = v[j / 2][j % 2 * 2 + 1];
      r[j][0] = beta.x * (low_of(low) - r[j][0]);
      r[j][1] = beta.y * (high_of(low) - r[j][1]);
      r[j][2] = beta.x * (low_of(high) - r[j][2]);
      r[j][3] = beta.y * (high_of(high) - r[j][3]);
    }
    uint32_t x[4][4];
    pack_operand<4>(r, x);
    warpgroup_fence();
    multiply_transposed<true, 4>(r, x, stage + Layout::kM);
    warpgroup_commit();
    decay_state<K>(stage + Layout::kDecay, t, s);
    warpgroup_wait<0>();
    pin(r);
    pin(o);
    pack_operand<4>(r, x);
    warpgroup_fence();
    multiply<1, 4>(s, x, stage + Layout::kKt);
    warpgroup_commit();
    multiply_transposed<true, 4>(o, x, stage + Layout::kAqk);
    warpgroup_commit();
    if (x_rows.data != nullptr) {
      store_rows(x, out, lane, chunk.n, x_rows);
      x_rows.move(1);
    }
    warpgroup_wait<0>();
    pin(s);
    pin(o);
    barrier_arrive(barrier + 8 * kStages);
    pack_operand<kSteps>(s, a);
    pack_operand<4>(o, o_packed);
  }
  if (task.num_chunks > 0 && o_rows.data != nullptr)
    store_rows(o_packed, out, lane, task.chunk(task.first + task.num_chunks - 1).n, o_rows);
  store_state<K>(exit, p.V, value, t, s);
}

template <int K>
__global__ void __launch_bounds__(kScanThreads, 1)
    delta_rule_bwd_scan_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w, ScanPass pass) {
  using Layout = ScanLayout<K>;
  constexpr int kSteps = K / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const uint32_t base = dynamic_shared();
  const ScanTask task(p, w.segment);
  if (!task.exists()) return;
  const float* exit = nullptr;
  float* entry = nullptr;
  if (task.ends) {
    exit = state_of(p, p.d_final_state, p.leaving, task.document, task.head);
  } else if (pass == ScanPass::kResults) {
    exit = segment_state(p, w.starts, task.slot + 1, task.head);
  }
  if (pass != ScanPass::kResults) {
    entry = segment_state(p, w.starts, task.slot, task.head);
  } else if (task.starts) {
    entry = state_of(p, p.d_initial_state, p.entering, task.document, task.head);
  }
  if (p.dv.data == nullptr && entry == nullptr) return;  // nobody asks for anything of it
  start_scan<K>(base);
  if (warp == 4) {
    load_scan<K>(p, w, task, p.d_o, false, base, lane);
    return;
  }
  const int value = static_cast<int>(task.tile) * kValueTile + 16 * warp + lane / 4;
  const uint32_t out = base + Layout::kOut + warp * kChunk * kOutPitch;
  float ds[K / 8][4];
  load_state<K>(exit, p.V, value, t, ds);
  LaneRows dv_rows(p.dv.data, p.dv.stride, task.first_token(), task.head * p.V + task.tile * kValueTile + 16 * warp,
                   lane);
  dv_rows.move(task.num_chunks - 1);
  // Images of dS at the ends of the chunks, unless d_initial_state alone is wanted.
  const int64_t state_stride = p.HV * p.V * K / 8;  // uint4
  uint4* states = w.dstates == nullptr ? nullptr
                                       : reinterpret_cast<uint4*>(w.dstates) +
                                             (task.first_slot + task.first + task.num_chunks - 1) * state_stride +
                                             (task.head * p.V + task.tile * kValueTile) * K / 8 + warp * 128 + lane;
  uint32_t a[kSteps][4];
  for (int i = 0; i < task.num_chunks; ++i) {
    const Chunk chunk = task.chunk(task.first + task.num_chunks - 1 - i);
    const uint32_t stage = base + i % kStages * Layout::kStageBytes;
    const uint32_t barrier = base + Layout::kBarriers + 8 * (i % kStages);
    uint32_t d_o[4][4];
    pack_operand<kSteps>(ds, a);
    barrier_wait(barrier, static_cast<uint32_t>(i / kStages) % 2);
    load_rows_transposed(d_o, stage + Layout::kRows, warp, lane);
    decay_state<K>(stage + Layout::kDecay, t, ds);
    float y[8][4];
    pin(ds);
    warpgroup_fence();
    multiply_transposed<false, kSteps>(y, a, stage + Layout::kKt);
    multiply<1, 4>(y, d_o, stage + Layout::kAqk);
    warpgroup_commit();
    multiply<1, 4>(ds, d_o, stage + Layout::kQb);
    warpgroup_commit();
    if (states != nullptr) {
      if (i > 0 || !task.ends || p.d_final_state != nullptr)
        store_state_image<K>(a, base + Layout::kState, warp, lane, states);
      states -= state_stride;
    }
    warpgroup_wait<1>();
    pin(y);
    uint32_t x[4][4];
    pack_operand<4>(y, x);
    warpgroup_fence();
    multiply<1, 4>(y, x, stage + Layout::kM);
    warpgroup_commit();
    warpgroup_wait<0>();
    pin(y);
    pin(ds);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 beta = *shared_pointer<const float2>(stage + Layout::kBeta + 4 * (8 * j + 2 * t));
      y[j][0] *= beta.x;
      y[j][1] *= beta.y;
      y[j][2] *= beta.x;
      y[j][3] *= beta.y;
    }
    pack_operand<4>(y, x);
    warpgroup_fence();
    multiply<-1, 4>(ds, x, stage + Layout::kKb);
    warpgroup_commit();
    if (dv_rows.data != nullptr) {
      store_rows(x, out, lane, chunk.n, dv_rows);
      dv_rows.move(-1);
    }
    warpgroup_wait<0>();
    pin(ds);
    barrier_arrive(barrier + 8 * kStages);
  }
  store_state<K>(entry, p.V, value, t, ds);
}

// From the maps of segments the states between them, one after the other: forward S <- Phi S + b into `ends`, backward
// dS
// <- Phi^T dS + c into `starts`. A block has a document, a head and kFoldColumns value columns; thread (row, group)
// some of them of one channel. Where the states alone are wanted they go out from here.
constexpr int kFoldThreads = 256;
constexpr int kFoldColumns = 16;

template <int K>
__global__ void __launch_bounds__(kFoldThreads)
    delta_rule_fold_kernel(const DeltaRuleSm90 p, const DeltaRuleWorkspace w, bool forward) {
  constexpr int kOwn = kFoldColumns * K / kFoldThreads;
  const int thread = static_cast<int>(threadIdx.x), row = thread % K, first = thread / K * kOwn;
  const int64_t strips = p.V / kFoldColumns, column = blockIdx.x % strips * kFoldColumns + first;
  const int64_t head = blockIdx.x / strips % p.HV, document = blockIdx.x / strips / p.HV;
  const int64_t tokens = int64_t{kChunk} * w.segment, begin = p.offsets[document];
  const int64_t length = p.offsets[document + 1] - begin, slot = begin / tokens + document;
  const int num = length > tokens ? static_cast<int>((length + tokens - 1) / tokens) : 1;
  const bool alone = forward ? p.o.data == nullptr && w.x == nullptr : p.dq.data == nullptr;
  const int num_wanted = alone ? num : num - 1;
  float* state = shared_pointer<float>(dynamic_shared());  // [K, kFoldColumns]
  float own[kOwn] = {};
  for (int i = 0; i < num_wanted; ++i) {
    const int64_t at = slot + (forward ? i : num - 1 - i);
    float* between = segment_state(p, forward ? w.ends : w.starts, at, head) + row * p.V + column;
    const float* map = w.maps + (at * p.HV + head) * K * K;
    float sum[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) sum[c] = between[c];
    if (i > 0) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) state[row * kFoldColumns + first + c] = own[c];
      sync_block();
#pragma unroll 4
      for (int j = 0; j < K; ++j) {
        const float factor = forward ? map[row * K + j] : map[j * K + row];
#pragma unroll
        for (int c = 0; c < kOwn; ++c) sum[c] += factor * state[j * kFoldColumns + first + c];
      }
      sync_block();
    }
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      between[c] = sum[c];
      own[c] = sum[c];
    }
  }
  if (!alone) return;
  float* out = forward ? state_of(p, p.final_state, p.leaving, document, head)
                       : state_of(p, p.d_initial_state, p.entering, document, head);
  if (out == nullptr) return;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) out[row * p.V + column + c] = own[c];
}

}  // namespace palimpsest::cuda::sm90
