// The chunkwise delta rule on GPUs: what its kernels share. The equations, with the exponents as sums over the segments
// that they span, stand in kernels/cpu/delta_rule_chunk.h (forward) and kernels/cpu/delta_rule_chunkwise_backward.cpp.
//
// Forward:   prepare  (chunks x value heads)                   Aqk, M - I; Qb, Kb, Kt, exp G_C into workspace
//            scan     (documents x value heads x value tiles)  X, O, states, chunk after chunk
// Backward:  prepare, and scan for what forward did not keep
//            reverse scan (as scan)                            dV, the cotangents of states, shares of dbeta
//            local    (chunks x value heads x key tiles)       gradients of the normalised q and k, and of g
//            finish   (tokens)                                 gate, beta and l2 norm; sums of the gate's parameters
//
// These kernels take every size at run time and both dtypes. Operands of products are T, everything else is f32:
// states, exponents, sums. A chunk computes on kMaxChunk rows at most; rows past the document's end are zero.
#pragma once

#include "kernels/cuda/documents.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/delta_rule.h"

namespace palimpsest::cuda {

constexpr int kMaxChunk = 64;
constexpr int kSlice = 64;          // key channels that prepare and local work on at once
constexpr int kDeltaThreads = 256;  // of every kernel of the scans and of local: a unit of a 64 x 64 product a warp
constexpr float kSmallestBeta = 0x1p-40F;

// Where chunks lie. Chunk number c of all documents is number c - first_chunk[d] of its document d.
struct ChunkList {
  DocumentList documents;
  const int64_t* first_chunk = nullptr;  // [documents + 1]
  int64_t num_chunks = 0;
  int C = 0;     // tokens
  int rows = 0;  // that are computed on: C, at least a unit's columns

  struct Chunk {
    int64_t document, number, start;  // start: first token
    int64_t n;                        // tokens
    bool last;                        // of its document
  };
  __device__ Chunk find(int64_t c) const {
    int64_t low = 0, high = documents.count - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_chunk[middle] <= c)
        low = middle;
      else
        high = middle - 1;
    }
    return at(low, c - first_chunk[low]);
  }
  __device__ Chunk at(int64_t document, int64_t number) const {
    const int64_t start = documents.begin(document) + number * C, left = documents.end(document) - start;
    return {document, number, start, min(left, static_cast<int64_t>(C)), left <= C};
  }
  // The slot of a state between two chunks, before chunk `number` >= 1 (see DeltaRuleSaved::states).
  __device__ int64_t state_slot(const Chunk& chunk, int64_t number) const {
    return documents.begin(chunk.document) / C + number - 1;
  }
};

// Log decays from raw logits.
template <class T>
struct DecayGate {
  enum class Kind : uint8_t { kNone, kFixed, kSoftplus, kBounded };
  Kind kind = Kind::kNone;
  bool vector = false;
  int64_t W = 0;  // channels: K or 1; 0 without decay
  float lower_bound = 0;
  int64_t first_value_head = 0;
  Rows<T> logit;                   // [N, HV * W]
  const float* A_log = nullptr;    // [HV]
  const float* dt_bias = nullptr;  // [HV, W]

  __host__ __device__ bool has_gradient() const { return kind == Kind::kSoftplus || kind == Kind::kBounded; }
  __device__ float rate(int64_t head) const { return has_gradient() ? expf(A_log[head]) : 0.0F; }
  // logit + dt_bias
  __device__ float shifted(int64_t token, int64_t head, int64_t channel) const {
    const int64_t i = head * W + (vector ? channel : 0);
    return to_f32(logit[token][i]) + dt_bias[i];
  }
  // From the shifted logit, for the gates that have one.
  __device__ float activate(float y, float rate_of_head) const {
    if (kind == Kind::kBounded) return lower_bound * sigmoid(rate_of_head * y);
    return -rate_of_head * (y > 20.0F ? y : log1pf(expf(y)));
  }
  __device__ float log_decay(int64_t token, int64_t head, int64_t channel, float rate_of_head) const {
    if (kind == Kind::kNone) return 0.0F;
    if (kind == Kind::kFixed) return log1pf(-exp2f(-5.0F - static_cast<float>(first_value_head + head)));
    return activate(shifted(token, head, channel), rate_of_head);
  }
};

// The tensors of one call and its workspace.
template <class T>
struct DeltaProblem {
  int64_t N, H, HV, K, V;
  int64_t Kp;  // K as a multiple of kUnitColumns
  bool delta;  // delta rule on
  bool l2norm;
  float l2norm_eps, scale, beta_scale;
  ChunkList chunks;
  DecayGate<T> gate;
  Rows<T> q, k, v, beta_logit;
  bool q_packed, k_packed, gate_packed;  // whether rows of q, k and of a vector gate's logits move in packs
  const float* initial_state;            // [states, HV, K, V] or null

  // Workspace, all contiguous.
  T *Qb, *Kb, *Kt;             // [N, HV, Kp], zero beyond K
  float* chunk_decay;          // [decay slots, HV, Kp] exp G_C
  float *q_factor, *k_factor;  // [N, H] of the l2 norm
  float* betas;                // [N, HV]

  // Saved or workspace.
  Rows<T> m, aqk;  // [N, HV, C]
  Rows<T> x;       // [N, HV, V]
  float* states;   // [slots, HV, K, V]

  __device__ int64_t key_head(int64_t value_head) const { return value_head / (HV / H); }
  // Every chunk has a slot: those of a document begin after all that earlier documents can use.
  __device__ int64_t decay_slot(const ChunkList::Chunk& chunk) const {
    return chunks.documents.begin(chunk.document) / chunks.C + chunk.document + chunk.number;
  }
  __device__ float beta(int64_t token, int64_t head) const {
    return delta ? fmaxf(beta_scale * sigmoid(to_f32(beta_logit[token][head])), kSmallestBeta) : 1.0F;
  }
  __device__ int64_t state_size() const { return K * V; }
};

enum class Keep : uint8_t { kNo, kYes };

// Fills Qb, Kb, Kt, chunk_decay and the factors; with Keep::kYes also m and aqk.
template <class T>
void launch_prepare(const Stream& stream, const DeltaProblem<T>& p, Keep matrices);

// What the scan writes beside S: any may be absent.
template <class T>
struct ScanOutputs {
  Rows<T> o;           // [N, HV, V]
  Rows<T> x;           // [N, HV, V]
  float* states;       // [slots, HV, K, V]
  float* final_state;  // [states, HV, K, V]
};
template <class T>
void launch_scan(const Stream& stream, const DeltaProblem<T>& p, const ScanOutputs<T>& out);

template <class T>
struct ReverseScan {
  Rows<T> dv;                  // [N, HV, V], overwritten
  float* d_states;             // [slots, HV, K, V]: cotangent of the state before every chunk but a document's first
  float* d_initial;            // [states, HV, K, V] or null
  float* dbeta_shares;         // [V / kUnitColumns, N, HV]: Y . X over so many values each; unused without delta rule
  Rows<T> d_o;                 // [N, HV, V]
  const float* d_final_state;  // [states, HV, K, V] or null
};
template <class T>
void launch_reverse_scan(const Stream& stream, const DeltaProblem<T>& p, const ReverseScan<T>& r);

template <class T>
struct LocalGradients {
  float *dq, *dk;  // [N, HV, Kp] of the normalised q and k
  float* dg;       // [N, HV, Kp] (vector), or [Kp / kSlice rounded up, N, HV] (scalar) shares; null without a gate
  Rows<T> d_o, dv;
  const float* d_states;       // from the reverse scan
  const float* d_final_state;  // or null
};
template <class T>
void launch_local(const Stream& stream, const DeltaProblem<T>& p, const LocalGradients<T>& g);

template <class T>
struct FinishGradients {
  Rows<T> dq, dk, dbeta_logit, dgate_logit;
  float *dA_log, *ddt_bias;  // accumulated
  const float *dq_normalised, *dk_normalised, *dg, *dbeta_shares;
};
template <class T>
void launch_finish(Stream& stream, const DeltaProblem<T>& p, const FinishGradients<T>& f);

// Columns of the scans' tiles of V.
template <class T>
constexpr int kValueTile = sizeof(T) == 2 ? 64 : 32;

}  // namespace palimpsest::cuda
