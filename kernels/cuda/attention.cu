// Causal attention, forward, in the manner of FlashAttention (Dao et al., 2022): a block keeps kBlock queries of a head
// and walks over the keys that they see with a running maximum and sum.
//
// Grid: x blocks of queries, the latest first, times query heads. Eight warps; in S = Q K^T a warp owns the unit at
// rows warp / 2 * 16 and columns warp % 2 * 32, in O every second unit of the same rows. Shared memory: Q, K, V, P as
// operands and the two column halves' maxima and sums. S, O and the statistics of rows are f32 in registers.
#include "kernels/attention.h"

#include "kernels/cuda/attention.cuh"

namespace palimpsest::cuda {

namespace {

template <class T>
struct ForwardProblem {
  HeadRows<T> o, q, k, v;
  float* lse;
  float scale;
  int64_t H, group;
  int Kp, Vp;
  BlockList queries;
  DocumentList keys;
};

template <class T>
struct ForwardMemory {
  static constexpr int kScoreRow = kBlock + kRowPad<T>;
  T *q, *k, *v, *p;      // [kBlock, key_row] twice, [kBlock, value_row], [kBlock, kScoreRow]
  float *maximum, *sum;  // [2, kBlock]
  int key_row, value_row;

  static int64_t bytes(int Kp, int Vp) {
    return kBlock * (2 * (Kp + kRowPad<T>)+(Vp + kRowPad<T>)+kScoreRow) * static_cast<int64_t>(sizeof(T)) +
           4 * kBlock * 4;
  }
  __device__ ForwardMemory(unsigned char* shared, int Kp, int Vp)
      : key_row(Kp + kRowPad<T>), value_row(Vp + kRowPad<T>) {
    q = reinterpret_cast<T*>(shared);
    k = q + kBlock * key_row;
    v = k + kBlock * key_row;
    p = v + kBlock * value_row;
    maximum = reinterpret_cast<float*>(p + kBlock * kScoreRow);
    sum = maximum + 2 * kBlock;
  }
};

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

template <class T>
__global__ void __launch_bounds__(kAttentionThreads) attention_fwd_kernel(const __grid_constant__ ForwardProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const ForwardMemory<T> s(shared, p.Kp, p.Vp);
  constexpr int kScoreRow = ForwardMemory<T>::kScoreRow;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int half = warp % 2, unit_row = warp / 2 * kUnitRows, unit_column = half * kUnitColumns;
  const int64_t head = blockIdx.x % p.H, kv_head = head / p.group;
  int64_t first = 0;
  const int64_t document = p.queries.find(p.queries.num_blocks - 1 - blockIdx.x / p.H, &first);
  const int64_t start = p.queries.documents.begin(document), length = p.queries.documents.length(document);
  const int64_t key_start = p.keys.begin(document), ahead = p.keys.length(document) - length;
  const int64_t n = min(static_cast<int64_t>(kBlock), length - first);
  const int64_t seen = first + n + ahead;  // keys that the last query sees
  p.q.load(s.q, s.key_row, kBlock, p.Kp, start + first, head, n);

  Unit o[kMaxUnits];
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // of the lane's two rows
  for (int64_t begin = 0; begin < seen; begin += kBlock) {
    __syncthreads();
    const int64_t width = min(static_cast<int64_t>(kBlock), seen - begin);
    p.k.load(s.k, s.key_row, kBlock, p.Kp, key_start + begin, kv_head, width);
    p.v.load(s.v, s.value_row, kBlock, p.Vp, key_start + begin, kv_head, width);
    __syncthreads();
    Unit scores;
    multiply<Along::kRow, Along::kRow>(scores, s.q + unit_row * s.key_row, s.key_row, s.k + unit_column * s.key_row,
                                       s.key_row, p.Kp);
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // Rows past the last query see what it sees.
        const int64_t row = min(static_cast<int64_t>(unit_row + Unit::row(pair)), n - 1);
        const int64_t key = begin + unit_column + Unit::column(pair) + e;
        float& score = scores.value[pair][e];
        score = key <= first + row + ahead ? score * p.scale : -INFINITY;
        highest[pair % 2] = fmaxf(highest[pair % 2], score);
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = quad_max(highest[r]);
      if (Unit::column(0) == 0) s.maximum[half * kBlock + unit_row + Unit::row(r)] = highest[r];
    }
    __syncthreads();
    float keep[2], added[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = unit_row + Unit::row(r);
      const float before = maximum[r];
      // Key 0 is seen by every query, so after the first keys the maximum is finite.
      maximum[r] = fmaxf(before, fmaxf(s.maximum[row], s.maximum[kBlock + row]));
      keep[r] = expf(before - maximum[r]);
    }
#pragma unroll
    for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float value = expf(scores.value[pair][e] - maximum[pair % 2]);
        added[pair % 2] += value;
        s.p[(unit_row + Unit::row(pair)) * kScoreRow + unit_column + Unit::column(pair) + e] = from_f32<T>(value);
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      added[r] = quad_sum(added[r]);
      if (Unit::column(0) == 0) s.sum[half * kBlock + unit_row + Unit::row(r)] = added[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = unit_row + Unit::row(r);
      sum[r] = sum[r] * keep[r] + s.sum[row] + s.sum[kBlock + row];
    }
#pragma unroll
    for (int unit = 0; unit < kMaxUnits; ++unit) {
      const int column = (2 * unit + half) * kUnitColumns;
      if (column >= p.Vp) continue;
#pragma unroll
      for (int pair = 0; pair < Unit::kPairs; ++pair) {
        o[unit].value[pair][0] *= keep[pair % 2];
        o[unit].value[pair][1] *= keep[pair % 2];
      }
      multiply<Along::kRow, Along::kColumn>(o[unit], s.p + unit_row * kScoreRow, kScoreRow, s.v + column, s.value_row,
                                            kBlock);
    }
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = unit_row + Unit::row(r);
    if (half == 0 && Unit::column(0) == 0 && row < n)
      p.lse[(start + first + row) * p.H + head] = maximum[r] + logf(sum[r]);
  }
#pragma unroll
  for (int unit = 0; unit < kMaxUnits; ++unit)
#pragma unroll
    for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = unit_row + Unit::row(pair);
        const int column = (2 * unit + half) * kUnitColumns + Unit::column(pair) + e;
        if (row < n && column < p.o.size)
          p.o.at(start + first + row, head)[column] = from_f32<T>(o[unit].value[pair][e] / sum[pair % 2]);
      }
}

}  // namespace

void attention_forward(Stream& stream, Tensor o, Tensor lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, const Documents& queries, const Documents& keys) {
  check_head_sizes(q, v);
  const Arena::Scope scope(stream.scratch());
  const BlockList blocks = make_blocks(stream, queries);
  const DocumentList key_documents = upload(stream, keys);
  with_float(q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const ForwardProblem<T> problem = {.o = HeadRows<T>(o),
                                       .q = HeadRows<T>(q),
                                       .k = HeadRows<T>(k),
                                       .v = HeadRows<T>(v),
                                       .lse = lse.data<float>(),
                                       .scale = static_cast<float>(scale),
                                       .H = q.dim(1),
                                       .group = q.dim(1) / k.dim(1),
                                       .Kp = padded_size(q.dim(2)),
                                       .Vp = padded_size(v.dim(2)),
                                       .queries = blocks,
                                       .keys = key_documents};
    launch(stream, attention_fwd_kernel<T>,
           {.grid_x = blocks.num_blocks * problem.H,
            .threads = kAttentionThreads,
            .shared_bytes = ForwardMemory<T>::bytes(problem.Kp, problem.Vp)},
           problem);
  });
}

}  // namespace palimpsest::cuda
