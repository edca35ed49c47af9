// Causal attention, backward. With P = exp(scale q k^T - lse) and delta_i = d_o_i . o_i:
//   dv = P^T d_o      dS = P * (d_o v^T - delta) * scale      dq = dS k      dk = dS^T q
//
// Three kernels: delta (a warp a token and head); dk and dv, whose blocks keep kBlock keys and walk over the queries
// that see them, head after head of a group; dq, whose blocks keep kBlock queries and walk over their keys. P and dS
// are computed in both, so that every sum has one owner and a fixed order. The rows walked over come kWalk at a time;
// a warp owns one unit of S and dS, and every second unit of its rows of a result.
#include "kernels/attention.h"
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

template <class T>
constexpr int kWalk = sizeof(T) == 2 ? 64 : 32;  // rows

template <class T>
struct BackwardProblem {
  HeadRows<T> dq, dk, dv, d_o, q, k, v, o;
  const float* lse;
  float* delta;  // [N, H]
  float scale;
  int64_t N, H, group;
  int Kp, Vp;
  BlockList blocks;
};

// What a block keeps and what it walks over: keys (k, v) and queries (q, d_o), one way or the other.
template <class T>
struct BackwardMemory {
  // P and dS: rows of queries, each of so many keys. Queries are walked over and keys are kept, or the other way round.
  static constexpr int kWalkedRow = kBlock + kRowPad<T>, kKeptRow = kWalk<T> + kRowPad<T>;
  static constexpr int kScores = kWalk<T> * kWalkedRow > kBlock* kKeptRow ? kWalk<T>* kWalkedRow : kBlock* kKeptRow;
  T *kept_keys, *kept_values, *keys, *values;  // [kBlock or kWalk, key_row or value_row]
  T *p, *ds;
  int key_row, value_row;

  static int64_t bytes(int Kp, int Vp) {
    const int64_t rows = kBlock + kWalk<T>;
    return (rows * (Kp + kRowPad<T> + Vp + kRowPad<T>)+2 * kScores) * static_cast<int64_t>(sizeof(T));
  }
  __device__ BackwardMemory(unsigned char* shared, int Kp, int Vp)
      : key_row(Kp + kRowPad<T>), value_row(Vp + kRowPad<T>) {
    kept_keys = reinterpret_cast<T*>(shared);
    kept_values = kept_keys + kBlock * key_row;
    keys = kept_values + kBlock * value_row;
    values = keys + kWalk<T> * key_row;
    p = values + kWalk<T> * value_row;
    ds = p + kScores;
  }
};

template <class T>
__global__ void attention_delta_kernel(const __grid_constant__ BackwardProblem<T> p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (i >= p.N * p.H) return;
  const T *a = p.d_o.at(i / p.H, i % p.H), *b = p.o.at(i / p.H, i % p.H);
  float dot = 0.0F;
  for (int64_t c = lane; c < p.o.size; c += kWarp) dot += to_f32(a[c]) * to_f32(b[c]);
  dot = warp_sum(dot);
  if (lane == 0) p.delta[i] = dot;
}

// P and dS of one pair of blocks into shared memory. q, d_o: [queries, .]; k, v: [keys, .].
template <int kQueries, int kKeys, class T>
__device__ void compute_scores(const BackwardProblem<T>& p, const BackwardMemory<T>& s, const T* q, const T* d_o,
                               const T* k, const T* v, int64_t document_start, int64_t first_query, int64_t num_queries,
                               int64_t first_key, int64_t head) {
  constexpr int kAcross = kKeys / kUnitColumns, kScoreRow = kKeys + kRowPad<T>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int unit_row = warp / kAcross * kUnitRows, unit_column = warp % kAcross * kUnitColumns;
  if (unit_row >= kQueries) return;
  Unit scores, d_p;
  multiply<Along::kRow, Along::kRow>(scores, q + unit_row * s.key_row, s.key_row, k + unit_column * s.key_row,
                                     s.key_row, p.Kp);
  multiply<Along::kRow, Along::kRow>(d_p, d_o + unit_row * s.value_row, s.value_row, v + unit_column * s.value_row,
                                     s.value_row, p.Vp);
#pragma unroll
  for (int pair = 0; pair < Unit::kPairs; ++pair) {
    const int row = unit_row + Unit::row(pair);
    const int64_t query = first_query + row, at = (document_start + query) * p.H + head;
    const bool is_query = row < num_queries;
    const float lse = is_query ? p.lse[at] : 0.0F, delta = is_query ? p.delta[at] : 0.0F;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = unit_column + Unit::column(pair) + e;
      const bool sees = is_query && first_key + column <= query;
      const float probability = sees ? expf(p.scale * scores.value[pair][e] - lse) : 0.0F;
      s.p[row * kScoreRow + column] = from_f32<T>(probability);
      s.ds[row * kScoreRow + column] = from_f32<T>(probability * (d_p.value[pair][e] - delta) * p.scale);
    }
  }
}

// The units of a [kBlock, size] result that a warp owns: row warp / 2 * 16, columns (2 * unit + warp % 2) * 32.
template <class T>
__device__ void store_units(const HeadRows<T>& to, const Unit (&units)[kMaxUnits], int64_t token, int64_t head,
                            int64_t n) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int unit = 0; unit < kMaxUnits; ++unit)
#pragma unroll
    for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = warp / 2 * kUnitRows + Unit::row(pair);
        const int column = (2 * unit + warp % 2) * kUnitColumns + Unit::column(pair) + e;
        if (row < n && column < to.size) to.at(token + row, head)[column] = from_f32<T>(units[unit].value[pair][e]);
      }
}

template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_bwd_keys_kernel(const __grid_constant__ BackwardProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const BackwardMemory<T> s(shared, p.Kp, p.Vp);
  constexpr int kScoreRow = BackwardMemory<T>::kWalkedRow;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t kv_heads = p.H / p.group, kv_head = blockIdx.x % kv_heads;
  int64_t first_key = 0;
  const int64_t document = p.blocks.find(blockIdx.x / kv_heads, &first_key);
  const int64_t start = p.blocks.documents.begin(document), length = p.blocks.documents.length(document);
  const int64_t num_keys = min(static_cast<int64_t>(kBlock), length - first_key);
  p.k.load(s.kept_keys, s.key_row, kBlock, p.Kp, start + first_key, kv_head, num_keys);
  p.v.load(s.kept_values, s.value_row, kBlock, p.Vp, start + first_key, kv_head, num_keys);
  Unit dk[kMaxUnits], dv[kMaxUnits];
  for (int64_t head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head)
    for (int64_t query = first_key; query < length; query += kWalk<T>) {
      const int64_t n = min(static_cast<int64_t>(kWalk<T>), length - query);
      __syncthreads();
      p.q.load(s.keys, s.key_row, kWalk<T>, p.Kp, start + query, head, n);
      p.d_o.load(s.values, s.value_row, kWalk<T>, p.Vp, start + query, head, n);
      __syncthreads();
      compute_scores<kWalk<T>, kBlock>(p, s, s.keys, s.values, s.kept_keys, s.kept_values, start, query, n, first_key,
                                       head);
      __syncthreads();
#pragma unroll
      for (int unit = 0; unit < kMaxUnits; ++unit) {
        const int row = warp / 2 * kUnitRows, column = (2 * unit + warp % 2) * kUnitColumns;
        if (column < p.Vp)
          multiply<Along::kColumn, Along::kColumn>(dv[unit], s.p + row, kScoreRow, s.values + column, s.value_row,
                                                   kWalk<T>);
        if (column < p.Kp)
          multiply<Along::kColumn, Along::kColumn>(dk[unit], s.ds + row, kScoreRow, s.keys + column, s.key_row,
                                                   kWalk<T>);
      }
    }
  store_units(p.dk, dk, start + first_key, kv_head, num_keys);
  store_units(p.dv, dv, start + first_key, kv_head, num_keys);
}

template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_bwd_queries_kernel(const __grid_constant__ BackwardProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const BackwardMemory<T> s(shared, p.Kp, p.Vp);
  constexpr int kScoreRow = BackwardMemory<T>::kKeptRow;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t head = blockIdx.x % p.H, kv_head = head / p.group;
  int64_t first_query = 0;
  const int64_t document = p.blocks.find(p.blocks.num_blocks - 1 - blockIdx.x / p.H, &first_query);
  const int64_t start = p.blocks.documents.begin(document), length = p.blocks.documents.length(document);
  const int64_t num_queries = min(static_cast<int64_t>(kBlock), length - first_query);
  p.q.load(s.kept_keys, s.key_row, kBlock, p.Kp, start + first_query, head, num_queries);
  p.d_o.load(s.kept_values, s.value_row, kBlock, p.Vp, start + first_query, head, num_queries);
  Unit dq[kMaxUnits];
  const int64_t seen = first_query + num_queries;
  for (int64_t key = 0; key < seen; key += kWalk<T>) {
    const int64_t n = min(static_cast<int64_t>(kWalk<T>), seen - key);
    __syncthreads();
    p.k.load(s.keys, s.key_row, kWalk<T>, p.Kp, start + key, kv_head, n);
    p.v.load(s.values, s.value_row, kWalk<T>, p.Vp, start + key, kv_head, n);
    __syncthreads();
    compute_scores<kBlock, kWalk<T>>(p, s, s.kept_keys, s.kept_values, s.keys, s.values, start, first_query,
                                     num_queries, key, head);
    __syncthreads();
#pragma unroll
    for (int unit = 0; unit < kMaxUnits; ++unit) {
      const int column = (2 * unit + warp % 2) * kUnitColumns;
      if (column < p.Kp)
        multiply<Along::kRow, Along::kColumn>(dq[unit], s.ds + warp / 2 * kUnitRows * kScoreRow, kScoreRow,
                                              s.keys + column, s.key_row, kWalk<T>);
    }
  }
  store_units(p.dq, dq, start + first_query, head, num_queries);
}

}  // namespace

void attention_backward(Stream& stream, const AttentionBackwardArgs& args, const Documents& documents) {
  check_head_sizes(args.q, args.v);
  const Arena::Scope scope(stream.scratch());
  const BlockList blocks = make_blocks(stream, documents);
  const Tensor delta = stream.scratch().allocate(DType::kF32, args.lse.shape());
  with_float(args.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const BackwardProblem<T> problem = {.dq = HeadRows<T>(args.dq),
                                        .dk = HeadRows<T>(args.dk),
                                        .dv = HeadRows<T>(args.dv),
                                        .d_o = HeadRows<T>(args.d_o),
                                        .q = HeadRows<T>(args.q),
                                        .k = HeadRows<T>(args.k),
                                        .v = HeadRows<T>(args.v),
                                        .o = HeadRows<T>(args.o),
                                        .lse = args.lse.data<float>(),
                                        .delta = delta.data<float>(),
                                        .scale = static_cast<float>(args.scale),
                                        .N = args.q.dim(0),
                                        .H = args.q.dim(1),
                                        .group = args.q.dim(1) / args.k.dim(1),
                                        .Kp = padded_size(args.q.dim(2)),
                                        .Vp = padded_size(args.v.dim(2)),
                                        .blocks = blocks};
    constexpr int kDeltaThreads = 256;
    launch(stream, attention_delta_kernel<T>,
           {.grid_x = ceil_div(problem.N * problem.H, kDeltaThreads / kWarp), .threads = kDeltaThreads}, problem);
    const auto shape = [&](int64_t heads) {
      return LaunchShape{.grid_x = blocks.num_blocks * heads,
                         .threads = kAttentionThreads,
                         .shared_bytes = BackwardMemory<T>::bytes(problem.Kp, problem.Vp)};
    };
    launch(stream, attention_bwd_keys_kernel<T>, shape(problem.H / problem.group), problem);
    launch(stream, attention_bwd_queries_kernel<T>, shape(problem.H), problem);
  });
}

}  // namespace palimpsest::cuda
