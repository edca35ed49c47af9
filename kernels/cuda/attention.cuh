// What the kernels of attention share: blocks of queries or keys, counted from a document's start, and heads of
// tensors. A block has four warps; a warp owns 16 rows, and keeps its scores and results of them in registers.
#pragma once

#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/documents.cuh"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

constexpr int kAttentionThreads = 128;
constexpr int kBlock = 64;  // rows of a resident block

// Blocks of kBlock rows of every document.
struct BlockList {
  DocumentList documents;
  const int64_t* first_block = nullptr;  // [documents + 1]
  int64_t num_blocks = 0;

  // The document of a block; first: the block's first row in it.
  __device__ int64_t find(int64_t block, int64_t* first) const {
    int64_t low = 0, high = documents.count - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_block[middle] <= block)
        low = middle;
      else
        high = middle - 1;
    }
    *first = (block - first_block[low]) * kBlock;
    return low;
  }
};

// Documents that others have taken have none.
inline BlockList make_blocks(const Stream& stream, const Documents& documents, const std::vector<bool>& taken) {
  std::vector<int64_t> first_block = {0};
  for (int64_t document = 0; document < documents.count(); ++document) {
    const bool is_taken = !taken.empty() && taken[static_cast<size_t>(document)];
    first_block.push_back(first_block.back() + (is_taken ? 0 : ceil_div(documents.length(document), kBlock)));
  }
  if (first_block.back() == 0) return {};
  return {upload(stream, documents), upload_numbers(stream, first_block), first_block.back()};
}

// One head of a [tokens, heads, size] tensor.
template <class T>
struct HeadRows {
  Rows<T> rows;
  int64_t size = 0;
  bool packed = false;

  HeadRows() = default;
  explicit HeadRows(const Tensor& tensor)
      : rows(tensor), size(tensor.dim(2)), packed(packed_rows(rows, tensor.dim(2))) {}
  __device__ T* at(int64_t token, int64_t head) const { return rows[token] + head * size; }
  // Starts copying rows of a head into shared memory, zero past n and beyond the size.
  __device__ void copy(T* to, int ld, int num_rows, int columns, int64_t token, int64_t head, int64_t n) const {
    load_tile(to, ld, num_rows, columns, at(token, head), rows.stride, n, size, packed);
  }
};

inline int padded_size(int64_t size) {
  return static_cast<int>(ceil_div(size, kUnitColumns)) * kUnitColumns;
}

// A head size as a number of units, at compile time: kernels are made for these.
template <int kKeys, int kValues>
struct HeadUnits {
  static constexpr int kKeyUnits = kKeys, kValueUnits = kValues;
};

// Calls body(T{}, HeadUnits{}) with the smallest units that hold these sizes.
template <class Body>
void with_head_units(DType dtype, int64_t key_size, int64_t value_size, Body body) {
  static_assert(8 * kUnitColumns == kMaxHeadOnGpus);
  if (dtype == DType::kF32)
    body(float{}, HeadUnits<8, 8>{});
  else if (key_size <= 128 && value_size <= 128)
    body(bf16{}, HeadUnits<4, 4>{});
  else if (key_size <= 192 && value_size <= 128)
    body(bf16{}, HeadUnits<6, 4>{});
  else
    body(bf16{}, HeadUnits<8, 8>{});
}

constexpr int kWalk = kUnitColumns;  // rows that most kernels walk over at a time

// What a block keeps and what it walks over, in shared memory: kBlock kept rows of two sizes, or of the first alone,
// and stages of kRows rows of both, in bf16 two, so that one is filled while the other is worked on.
template <class T, int kRows>
struct WalkMemory {
  static constexpr int kStages = sizeof(T) == 2 ? 2 : 1;

  T *first, *second, *stages;  // [kBlock, key_row], [kBlock, value_row]
  int key_row, value_row;

  static int64_t bytes(int Kp, int Vp, bool has_second) {
    const int64_t keys = Kp + kRowPad<T>, values = Vp + kRowPad<T>;
    return (kBlock * (keys + (has_second ? values : 0)) + kStages * kRows * (keys + values)) *
           static_cast<int64_t>(sizeof(T));
  }
  __device__ WalkMemory(unsigned char* shared, int Kp, int Vp, bool has_second)
      : first(reinterpret_cast<T*>(shared)), key_row(Kp + kRowPad<T>), value_row(Vp + kRowPad<T>) {
    second = first + kBlock * key_row;
    stages = has_second ? second + kBlock * value_row : second;
  }
  __device__ T* keys(int64_t i) const { return stages + i % kStages * kRows * (key_row + value_row); }
  __device__ T* values(int64_t i) const { return keys(i) + kRows * key_row; }

  // copy(i) starts the copies of step i, work(i) uses them.
  template <class Copy, class Work>
  __device__ void walk(int64_t count, Copy copy, Work work) const {
    constexpr bool kAhead = kStages == 2;
    if (kAhead && count > 0) copy(0);
    for (int64_t i = 0; i < count; ++i) {
      __syncthreads();  // nobody reads what is written over now
      if (!kAhead) copy(i);
      if (kAhead && i + 1 < count) {
        copy(i + 1);
        wait_for_copies<1>();
      } else {
        wait_for_copies();
      }
      __syncthreads();
      work(i);
    }
  }
};

// Over the four lanes that share two rows of a unit.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Calls body(pair, e) for the elements of a unit that a lane holds.
template <class Body>
__device__ inline void for_each_element(Body body) {
#pragma unroll
  for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
    for (int e = 0; e < 2; ++e) body(pair, e);
}

// Softmax over keys that come in blocks, for a lane's two rows: their maximum so far, and the lane's share of the sum.
struct RunningSoftmax {
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  // Scores become exp(score - maximum); results so far follow the maximum, which is finite after every block.
  template <int kScores, int kResults>
  __device__ void absorb(Unit (&scores)[kScores], Unit (&results)[kResults]) {
    float highest[2] = {maximum[0], maximum[1]}, keep[2];
#pragma unroll
    for (int unit = 0; unit < kScores; ++unit)
      for_each_element(
          [&](int pair, int e) { highest[pair % 2] = fmaxf(highest[pair % 2], scores[unit].value[pair][e]); });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = quad_max(highest[r]);
      keep[r] = expf(maximum[r] - highest[r]);
      maximum[r] = highest[r];
      sum[r] *= keep[r];
    }
#pragma unroll
    for (int unit = 0; unit < kScores; ++unit)
      for_each_element([&](int pair, int e) {
        float& score = scores[unit].value[pair][e];
        score = __expf(score - maximum[pair % 2]);
        sum[pair % 2] += score;
      });
#pragma unroll
    for (int unit = 0; unit < kResults; ++unit)
      for_each_element([&](int pair, int e) { results[unit].value[pair][e] *= keep[pair % 2]; });
  }

  // Writes the lse of a warp's rows from first_row of n, which are `stride` numbers apart; norm: results times it are
  // the output.
  __device__ void finish(float* lse, int64_t stride, int first_row, int64_t n, float (&norm)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float all = quad_sum(sum[r]);
      norm[r] = 1.0F / all;
      const int row = first_row + Unit::row(r);
      if (Unit::column(0) == 0 && row < n) lse[row * stride] = maximum[r] + logf(all);
    }
  }
};

// a [16, ..] b^T [.., kWalk] of rows in shared memory.
template <class T>
__device__ inline void multiply_rows(Unit& unit, const T* a, const T* b, int row_size, int depth) {
  multiply<Along::kRow, Along::kRow>(unit, a, row_size, b, row_size, depth);
}

// From scores q k^T and d_p = d_o v^T of one query and key: P and dS in their places.
__device__ inline void differentiate(float& score, float& d_p, bool is_pair, float scale, float lse, float delta) {
  score = is_pair ? __expf(scale * score - lse) : 0.0F;
  d_p = score * (d_p - delta) * scale;
}

// lse and delta of one head, of rows that are `stride` numbers apart.
struct RowStatistics {
  const float *lse, *delta;
  int64_t stride;
};

// The same of a unit whose rows are keys and whose columns are queries, of which there are n; sees(key, query) says
// which pairs there are, counted from the first of each.
template <class Sees>
__device__ inline void differentiate_keys(Unit& scores, Unit& d_p, const RowStatistics& queries, int64_t n, float scale,
                                          Sees sees) {
#pragma unroll
  for (int column = 0; column < Unit::kPairs; column += 2)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = Unit::column(column) + e;
      const bool is_query = query < n;
      const int64_t at = query * queries.stride;
      const float lse = is_query ? queries.lse[at] : 0.0F, delta = is_query ? queries.delta[at] : 0.0F;
#pragma unroll
      for (int pair = column; pair < column + 2; ++pair)
        differentiate(scores.value[pair][e], d_p.value[pair][e], is_query && sees(Unit::row(pair), query), scale, lse,
                      delta);
    }
}

// Of a warp's queries, which are rows, from first_row of the block's n; with the statistics of the lane's two.
class QueryRows {
 public:
  __device__ QueryRows(const RowStatistics& queries, int first_row, int64_t n) : first_row_(first_row), n_(n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + Unit::row(r);
      lse_[r] = row < n ? queries.lse[row * queries.stride] : 0.0F;
      delta_[r] = row < n ? queries.delta[row * queries.stride] : 0.0F;
    }
  }
  // Columns are keys; sees(query, key).
  template <class Sees>
  __device__ void differentiate_queries(Unit& scores, Unit& d_p, float scale, Sees sees) const {
    for_each_element([&](int pair, int e) {
      const int row = first_row_ + Unit::row(pair);
      differentiate(scores.value[pair][e], d_p.value[pair][e], row < n_ && sees(row, Unit::column(pair) + e), scale,
                    lse_[pair % 2], delta_[pair % 2]);
    });
  }

 private:
  int first_row_;
  int64_t n_;
  float lse_[2], delta_[2];
};

// delta [N, H] f32 in scratch memory: d_o . o.
Tensor attention_delta(const Stream& stream, const AttentionBackwardArgs& args);

// results [16, 32 * kCount] of a warp: += A B, with A [16, 32] in registers, B along columns in shared memory. Units
// beyond `size` columns are left out.
template <int kCount, class T>
__device__ inline void multiply_held(Unit (&results)[kCount], const Unit& a, const T* b, int ldb, int size) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i * kUnitColumns < size) multiply_held(results[i], a, b + i * kUnitColumns, ldb);
}

// A warp's rows into a head's, from `first_row` of the block, times a factor for each of the lane's two rows.
template <int kCount, class T>
__device__ inline void store_rows(const HeadRows<T>& to, const Unit (&units)[kCount], int64_t token, int64_t head,
                                  int first_row, int64_t n, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = first_row + Unit::row(pair), column = i * kUnitColumns + Unit::column(pair) + e;
        if (row < n && column < to.size)
          to.at(token + row, head)[column] = from_f32<T>(factor[pair % 2] * units[i].value[pair][e]);
      }
}

}  // namespace palimpsest::cuda
