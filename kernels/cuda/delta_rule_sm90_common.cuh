// What the Hopper kernels of the delta rule share: chunks, workspace, the images of tiles, and the gate.
//
// Names are those of kernels/cpu/delta_rule_chunk.h, with the scale of the read inside q. C = 64 tokens a chunk. A tile
// image is the tile as it lies in shared memory for the tensor cores: rows of 64 numbers, 128 bytes, the 16-byte piece
// p of row r at piece p ^ (r % 8). A chunk of n < C tokens keeps n rows of each image.
#pragma once

#include <type_traits>

#include "kernels/cuda/delta_rule_sm90.h"
#include "kernels/cuda/sm90.cuh"

namespace palimpsest::cuda::sm90 {

constexpr int kChunk = 64;
constexpr int kTileBytes = kChunk * 128;
constexpr float kLog2e = 1.4426950408889634F;
constexpr float kSmallestBeta = 9.094947e-13F;  // 2^-40: dbeta divides by beta

struct DeltaRuleWorkspace {
  __nv_bfloat16 *qb, *kb, *kt;          // N HV K each: K/64 images a chunk and head
  float* decay;                         // [slots, HV, K] exp(G_C)
  float* beta;                          // [slots, HV, C]
  float* totals;                        // [slots, HV, 4, K] exp of the sums of g over 16 rows; vector decay, backward
  float* norms;                         // [slots, HV, 2, C] factors of the l2 norms of q and k; backward
  __nv_bfloat16 *m, *aqk, *x, *states;  // saved, or recomputed by backward
  __nv_bfloat16* dstates;               // slots HV K V: images of dS^T at each chunk's end
  __nv_bfloat16 *dq, *dk;               // [N, HV, K] of each value head, when several share a key head
  float* partials;                      // [slots, HV, W + 1] sums for ddt_bias and dA_log

  // Where scans go by segments: of each, Phi of the map of its state; what it leaves; backward, of what it begins with.
  int segment;              // chunks; 0: scans go through whole documents
  float* maps;              // [segments, HV, K, K]
  float *ends, *starts;     // [segments, HV, K, V]
  __nv_bfloat16* no_value;  // [HV, K] zeros
};

// The scans go chunk after chunk, and few long documents leave most of the GPU idle. Then segments of documents go at
// once: first from nothing, for the maps of their states, and once their first states are known, again. Forward that is
// two scans, backward three, so it takes more segments to gain by them.
inline int segment_of(const DeltaRuleSm90& p, bool backward) {
  constexpr int64_t kProcessors = 132, kShortest = 8;
  const int64_t fewest = backward ? 6 : 4;
  const int64_t scans = p.num_documents * p.HV * (p.V / 64);
  if (p.segment >= 0 || scans == 0) return p.segment > 0 ? p.segment : 0;
  const int64_t chunks = p.N / kChunk / p.num_documents;  // of a document, on average
  const int64_t most = chunks / kShortest, idle = kProcessors / scans, segments = most < idle ? most : idle;
  return segments < fewest ? 0 : static_cast<int>((chunks + segments - 1) / segments);
}

// Segments have slots as chunks have: segment s of document d, which begins at token b, has b / tokens of one + d + s.
__host__ __device__ inline int64_t num_segments(const DeltaRuleSm90& p, int segment) {
  return segment == 0 ? p.num_documents : p.N / (int64_t{kChunk} * segment) + p.num_documents;
}

// Chunks have slots: chunk c of the document d that begins at token b has slot b / C + d + c. Some slots stay empty.
__host__ __device__ inline int64_t num_slots(const DeltaRuleSm90& p) {
  return p.N / kChunk + p.num_documents;
}

// Cuts a workspace into its arrays; over a null block it only counts. Returns the bytes.
inline int64_t carve_workspace(const DeltaRuleSm90& p, bool backward, void* block, DeltaRuleWorkspace& w) {
  int64_t used = 0;
  const auto take = [&](auto*& array, int64_t count) {
    array = block == nullptr
                ? nullptr
                : reinterpret_cast<std::remove_reference_t<decltype(array)>>(static_cast<uint8_t*>(block) + used);
    used += (count * static_cast<int64_t>(sizeof(*array)) + 1023) / 1024 * 1024;
  };
  const int64_t slots = num_slots(p), rows = p.N * p.HV;
  w = {};
  take(w.qb, rows * p.K);
  take(w.kb, rows * p.K);
  take(w.kt, rows * p.K);
  take(w.decay, slots * p.HV * p.K);
  take(w.beta, slots * p.HV * kChunk);
  w.m = p.m;
  w.aqk = p.aqk;
  w.x = p.x;
  w.states = p.states;
  if (p.m == nullptr) take(w.m, rows * kChunk);
  if (p.aqk == nullptr) take(w.aqk, rows * kChunk);
  w.segment = segment_of(p, backward);
  const int64_t segments = w.segment == 0 ? 0 : num_segments(p, w.segment);
  take(w.maps, segments * p.HV * p.K * p.K);
  take(w.no_value, p.HV * p.K);
  if (!backward || p.x == nullptr || p.states == nullptr) take(w.ends, segments * p.HV * p.K * p.V);
  if (!backward) return used;
  take(w.starts, segments * p.HV * p.K * p.V);
  take(w.totals, slots * p.HV * 4 * p.K);
  take(w.norms, slots * p.HV * 2 * kChunk);
  if (p.dq.data == nullptr) return used;
  if (p.x == nullptr) take(w.x, rows * p.V);
  if (p.states == nullptr) take(w.states, (p.N > 0 ? p.N - 1 : 0) / kChunk * p.HV * p.K * p.V);
  take(w.dstates, slots * p.HV * p.K * p.V);
  take(w.partials, slots * p.HV * (p.K + 1));
  if (p.HV > p.H) {
    take(w.dq, rows * p.K);
    take(w.dk, rows * p.K);
  }
  return used;
}

struct Chunk {
  int64_t document, first;  // its first token
  int64_t length;           // of the document
  int index, n;             // of the chunk in the document; its tokens, 0 for an empty slot

  __device__ bool is_last() const { return (index + 1) * int64_t{kChunk} >= length; }
  // Where the state at its start is kept; not for the first chunk of a document.
  __device__ int64_t state_slot() const { return (first - index * int64_t{kChunk}) / kChunk + index - 1; }
};

__device__ inline Chunk find_chunk(const DeltaRuleSm90& p, int64_t slot) {
  int64_t low = 0, high = p.num_documents - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (p.offsets[middle] / kChunk + middle <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  // One document needs no look at memory, whose latency a persistent block would see with every chunk.
  const bool only = p.num_documents == 1;
  const int64_t begin = only ? 0 : p.offsets[low], length = only ? p.N : p.offsets[low + 1] - begin;
  Chunk chunk;
  chunk.document = low;
  chunk.index = static_cast<int>(slot - begin / kChunk - low);
  chunk.first = begin + chunk.index * int64_t{kChunk};
  chunk.length = length;
  const int64_t left = length - chunk.index * int64_t{kChunk};
  chunk.n = left <= 0 ? 0 : left < kChunk ? static_cast<int>(left) : kChunk;
  return chunk;
}

// A head's [K, V] in a tensor of states, in a document's row: null where there is none.
template <class Float>
__device__ inline Float* state_of(const DeltaRuleSm90& p, Float* states, const int64_t* rows, int64_t document,
                                  int64_t head) {
  if (states == nullptr) return nullptr;
  const int64_t row = rows == nullptr ? document : rows[document];
  return row < 0 ? nullptr : states + (row * p.HV + head) * p.K * p.V;
}

// A head's [K, V] of a segment.
__device__ inline float* segment_state(const DeltaRuleSm90& p, float* states, int64_t slot, int64_t head) {
  return states + (slot * p.HV + head) * p.K * p.V;
}

// First number of the images of a chunk and head in an array that holds `size` numbers a token and head.
__device__ inline int64_t image_offset(const DeltaRuleSm90& p, const Chunk& chunk, int64_t head, int size) {
  return (chunk.first * p.HV + head * chunk.n) * size;
}

template <class T>
__device__ inline T* row_of(const DeltaRows<T>& rows, int64_t token, int64_t head, int64_t size) {
  return rows.data + token * rows.stride + head * size;
}

// Asks for kColumns numbers of each token of a chunk, whose row in shared memory begins at place(row), by the kThreads
// threads of a block. Rows past the end are 0.
template <int kColumns, int kThreads, class Place>
__device__ inline void copy_token_rows(const __nv_bfloat16* rows, int64_t stride, int n, Place place) {
  constexpr int kPieces = kColumns / 8, kRows = kThreads / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
  for (int i = 0; i < kChunk / kRows; ++i) {
    const int row = static_cast<int>(threadIdx.x) / kPieces + i * kRows;
    async_copy(place(row) + 16 * piece, rows + (row < n ? row : 0) * stride + 8 * piece, row < n);
  }
}

// Eight numbers times a factor.
__device__ inline uint4 scaled(const uint4& x, float factor) {
  const auto pair = [&](uint32_t y) { return pack_bf16(low_of(y) * factor, high_of(y) * factor); };
  return make_uint4(pair(x.x), pair(x.y), pair(x.z), pair(x.w));
}

// The factor of an l2 norm from the sum of squares.
__device__ inline float l2_factor(const DeltaRuleSm90& p, float sum) {
  return p.l2norm_qk ? reciprocal_root(sum + p.l2norm_eps) : 1.0F;
}

// From a channel's decays over each 16 rows of a chunk, [4] `stride` apart: those over all rows before block b, after
// it, between it and the middle of the chunk, and over all.
struct BlockDecays {
  float before, after, middle, all;
};
__device__ inline BlockDecays decays_around(const float* totals, int stride, int b) {
  const float t0 = totals[0], t1 = totals[stride], t2 = totals[2 * stride], t3 = totals[3 * stride];
  return {b == 0   ? 1.0F
          : b == 1 ? t0
          : b == 2 ? t0 * t1
                   : t0 * t1 * t2,
          b == 3   ? 1.0F
          : b == 2 ? t3
          : b == 1 ? t2 * t3
                   : t1 * t2 * t3,
          b == 0   ? t1
          : b == 3 ? t2
                   : 1.0F,
          t0 * t1 * t2 * t3};
}

// 16-byte piece of an image's row.
__device__ inline uint32_t image_piece(int row, int piece) {
  return static_cast<uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
}

__device__ inline float sigmoid_fast(float x) {
  return reciprocal_fast(1.0F + exp2_fast(-kLog2e * x));
}

// log2(1 + e^x)
__device__ inline float softplus2(float x) {
  const float x2 = x * kLog2e;
  return x2 > 24.0F ? x2 : log2_fast(1.0F + exp2_fast(x2));
}

// The gate of one head.
struct HeadGate {
  DeltaGateKind kind;
  float rate;      // exp(A_log)
  float bound;     // lower bound, kBounded
  float constant;  // decay, kConstant

  __device__ HeadGate(const DeltaRuleSm90& p, int64_t head)
      : kind(p.gate), rate(1.0F), bound(p.gate_lower_bound), constant(1.0F) {
    if (kind == DeltaGateKind::kConstant) {
      if (p.constant_decays) constant = 1.0F - exp2_fast(-5.0F - static_cast<float>(p.first_value_head + head));
    } else {
      rate = exp2_fast(kLog2e * p.A_log[head]);
    }
  }
  // Decays exp(g) of y = logit + dt_bias. Several at once: the kind is asked for once.
  template <int n>
  __device__ void decays(const float (&y)[n], float (&decay)[n]) const {
    if (kind == DeltaGateKind::kSoftplus) {
#pragma unroll
      for (int i = 0; i < n; ++i) decay[i] = exp2_fast(-rate * softplus2(y[i]));
    } else if (kind == DeltaGateKind::kBounded) {
#pragma unroll
      for (int i = 0; i < n; ++i) decay[i] = exp2_fast(kLog2e * bound * sigmoid_fast(rate * y[i]));
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) decay[i] = constant;
    }
  }
  // From dg (of the natural logarithm) dy, in place; adds to the sum of dA_log.
  template <int n>
  __device__ void backward(const float (&y)[n], float (&dg)[n], float& dA_log) const {
    if (kind == DeltaGateKind::kSoftplus) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        dA_log -= dg[i] * rate * softplus2(y[i]) * (1.0F / kLog2e);
        dg[i] *= -rate * sigmoid_fast(y[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float z = sigmoid_fast(rate * y[i]);
        dg[i] *= bound * z * (1.0F - z) * rate;
        dA_log += dg[i] * y[i];
      }
    }
  }
};

}  // namespace palimpsest::cuda::sm90
