// Embedding. Forward: a block copies the row of one token.
//
// Backward without atomics, in three launches:
//   1. Keys (row of the table, token) of kChunk neighbouring tokens are sorted, a block a chunk.
//   2. The place of a key among all is the number of smaller ones in every chunk, which a thread looks up: tokens of a
//      row are neighbours then, in their order.
//   3. A warp looks at one place. If a row begins there, the warp adds the gradients of the row's tokens, in their
//      order; a row of more tokens than a warp has lanes is left to all warps of the block, each for an equal part.
//      Blocks of y take strips of columns.
#include "kernels/embedding.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 256;

template <int kPack, class T>
__global__ void embedding_fwd_kernel(Rows<T> x, const int32_t* tokens, Rows<float> table, int64_t D, int64_t begin,
                                     int64_t num_rows) {
  const int64_t n = blockIdx.x, row = tokens[n] - begin;
  const bool here = row >= 0 && row < num_rows;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kPack; i < D; i += kThreads * kPack) {
    float values[kPack] = {};
    if (here) load(table[row] + i, values);
    store(x[n] + i, values);
  }
}

// The row of the table above, the token below; tokens of rows that are not here come last, as does what fills up a
// chunk.
using Key = unsigned long long;
constexpr Key kNoRow = 0xffffffffU;

__device__ inline unsigned row_of(Key key) {
  return static_cast<unsigned>(key >> 32);
}
__device__ inline unsigned token_of(Key key) {
  return static_cast<unsigned>(key);
}

constexpr int kChunk = 2048, kSortThreads = 1024;

// keys [N] of chunk blockIdx.x, by bitonic merges.
__global__ __launch_bounds__(kSortThreads) void sort_chunks_kernel(Key* keys, const int32_t* tokens, int64_t N,
                                                                   int64_t begin, int64_t num_rows) {
  __shared__ Key own[kChunk];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kChunk;
  for (int i = static_cast<int>(threadIdx.x); i < kChunk; i += kSortThreads) {
    const int64_t n = first + i, row = n < N ? tokens[n] - begin : -1;
    own[i] = (row >= 0 && row < num_rows ? static_cast<Key>(row) : kNoRow) << 32 | static_cast<Key>(n);
  }
  for (int size = 2; size <= kChunk; size *= 2)
    for (int distance = size / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < kChunk / 2; i += kSortThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const bool ascending = (low & size) == 0;
        const Key a = own[low], b = own[high];
        if ((a > b) == ascending) {
          own[low] = b;
          own[high] = a;
        }
      }
    }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kChunk && first + i < N; i += kSortThreads) keys[first + i] = own[i];
}

constexpr int kAtOnce = 4;  // chunks that a thread looks into, so that their loads are on their way together

// sorted [N], of keys [N] sorted in chunks.
__global__ void merge_chunks_kernel(Key* sorted, const Key* keys, int64_t N) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= N) return;
  const Key key = keys[i];
  int64_t place = 0;
  for (int64_t first = 0; first < N; first += kAtOnce * kChunk) {
    int smaller[kAtOnce] = {};  // keys of each chunk that are known to be smaller
    for (int step = kChunk; step > 0; step /= 2) {
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const int64_t last = first + c * kChunk + smaller[c] + step - 1;  // of those that may be
        const Key other = keys[min(last, N - 1)];
        if (smaller[c] + step <= kChunk && last < N && other < key) smaller[c] += step;
      }
    }
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) place += smaller[c];
  }
  sorted[place] = key;
}

constexpr int kWarps = kThreads / kWarp;

// sum += dx of the tokens of sorted[0], ..., sorted[count - 1], of this lane's columns.
template <int kPack, class T>
__device__ inline void add_tokens(float (&sum)[kPack], const Rows<T>& dx, int64_t column, const Key* sorted,
                                  int64_t count) {
#pragma unroll 4
  for (int64_t j = 0; j < count; ++j) {
    float gradient[kPack];
    load(dx[token_of(sorted[j])] + column, gradient);
#pragma unroll
    for (int c = 0; c < kPack; ++c) sum[c] += gradient[c];
  }
}

template <int kPack, class T>
__global__ __launch_bounds__(kThreads) void embedding_bwd_kernel(Rows<float> dtable, Rows<T> dx, const Key* sorted,
                                                                 int64_t N, int64_t D) {
  __shared__ float parts[kWarps][kWarp * kPack];
  __shared__ int64_t long_begin[kWarps], long_count[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kWarp + lane) * kPack;
  const bool has_column = column < D;
  // How many tokens of the row that begins here follow: no more are seen than there are lanes.
  const unsigned row = place < N ? row_of(sorted[place]) : static_cast<unsigned>(kNoRow);
  const bool begins = row != kNoRow && (place == 0 || row_of(sorted[place - 1]) != row);
  const int64_t next = place + 1 + lane;
  const unsigned same = __ballot_sync(kAllLanes, begins && next < N && row_of(sorted[min(next, N - 1)]) == row);
  const bool is_long = begins && same == kAllLanes;
  if (begins && !is_long && has_column) {
    float sum[kPack];
    load(dtable[row] + column, sum);
    add_tokens(sum, dx, column, sorted + place, __popc(same) + 1);
    store(dtable[row] + column, sum);
  }
  if (lane == 0) {
    int64_t end = place + 1;
    if (is_long) {  // the first place behind the row
      int64_t behind = N;
      while (end < behind) {
        const int64_t middle = (end + behind) / 2;
        if (row_of(sorted[middle]) == row)
          end = middle + 1;
        else
          behind = middle;
      }
    }
    long_begin[warp] = place;
    long_count[warp] = is_long ? end - place : 0;
  }
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    const int64_t begin = long_begin[w], count = long_count[w], each = ceil_div(count, kWarps);
    if (count == 0) continue;
    float sum[kPack] = {};
    if (has_column)
      add_tokens(sum, dx, column, sorted + begin + warp * each, max(min(each, count - warp * each), int64_t{0}));
#pragma unroll
    for (int c = 0; c < kPack; ++c) parts[warp][c * kWarp + lane] = sum[c];
    __syncthreads();
    if (warp == 0 && has_column) {
      float* to = dtable[row_of(sorted[begin])] + column;
      load(to, sum);
      for (int part = 0; part < kWarps; ++part)
#pragma unroll
        for (int c = 0; c < kPack; ++c) sum[c] += parts[part][c * kWarp + lane];
      store(to, sum);
    }
    __syncthreads();
  }
}

}  // namespace

void embedding_forward(Stream& stream, Tensor x, const Tensor& tokens, const Tensor& table, const VocabRange& range) {
  with_float(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack({&x, &table}, x.dim(1), [&](auto pack) {
      launch(stream, embedding_fwd_kernel<decltype(pack)::value, T>, {.grid_x = x.dim(0), .threads = kThreads},
             Rows<T>(x), tokens.data<int32_t>(), Rows<float>(table), x.dim(1), range.begin, table.dim(0));
    });
  });
}

void embedding_backward(Stream& stream, Tensor dtable, const Tensor& dx, const Tensor& tokens,
                        const VocabRange& range) {
  const Arena::Scope scope(stream.scratch());
  const int64_t N = dx.dim(0), D = dx.dim(1);
  const auto keys_of_all = [&] { return static_cast<Key*>(stream.scratch().allocate(DType::kI64, {N}).raw()); };
  Key *keys = keys_of_all(), *sorted = keys_of_all();
  launch(stream, sort_chunks_kernel, {.grid_x = ceil_div(N, kChunk), .threads = kSortThreads}, keys,
         tokens.data<int32_t>(), N, range.begin, dtable.dim(0));
  launch(stream, merge_chunks_kernel, {.grid_x = ceil_div(N, kThreads), .threads = kThreads}, sorted, keys, N);
  with_float(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack<kWidestPack<T>>({&dx, &dtable}, D, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      launch(stream, embedding_bwd_kernel<kPack, T>,
             {.grid_x = ceil_div(N, kWarps), .grid_y = ceil_div(D, kWarp * kPack), .threads = kThreads},
             Rows<float>(dtable), Rows<T>(dx), sorted, N, D);
    });
  });
}

}  // namespace palimpsest::cuda
