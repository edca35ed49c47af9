// Embedding. Forward: a block copies the row of one token.
//
// Backward without atomics: the block of a token that is the first of its id in the batch adds the gradients of all
// tokens with that id, in their order, to the row of the table; the blocks of the others have nothing to do. Blocks
// look through the list of tokens, which the second-level cache holds.
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

template <int kPack, class T>
__global__ void embedding_bwd_kernel(Rows<float> dtable, Rows<T> dx, const int32_t* tokens, int64_t N, int64_t D,
                                     int64_t begin, int64_t num_rows) {
  __shared__ int64_t found[kThreads];
  const int64_t n = blockIdx.x;
  const int32_t id = tokens[n];
  const int64_t row = id - begin;
  if (row < 0 || row >= num_rows) return;
  // 1. Is there an earlier token with this id?
  for (int64_t first = 0; first < n; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    if (__syncthreads_or(i < n && tokens[i] == id)) return;
  }
  // 2. This and later tokens, kThreads at a time; those with the id are counted off in order.
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  __shared__ int counts[kThreads / kWarp];
  for (int64_t first = n; first < N; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const bool match = i < N && tokens[i] == id;
    const unsigned ballot = __ballot_sync(kAllLanes, match);
    if (lane == 0) counts[warp] = __popc(ballot);
    __syncthreads();
    int before = __popc(ballot & ((1U << lane) - 1)), total = 0;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) before += counts[w];
      total += counts[w];
    }
    if (match) found[before] = i;
    __syncthreads();
    for (int64_t c = static_cast<int64_t>(threadIdx.x) * kPack; total > 0 && c < D; c += kThreads * kPack) {
      float sum[kPack], gradient[kPack];
      load(dtable[row] + c, sum);
      for (int j = 0; j < total; ++j) {
        load(dx[found[j]] + c, gradient);
#pragma unroll
        for (int e = 0; e < kPack; ++e) sum[e] += gradient[e];
      }
      store(dtable[row] + c, sum);
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
  with_float(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    with_pack({&dx, &dtable}, dx.dim(1), [&](auto pack) {
      launch(stream, embedding_bwd_kernel<decltype(pack)::value, T>, {.grid_x = dx.dim(0), .threads = kThreads},
             Rows<float>(dtable), Rows<T>(dx), tokens.data<int32_t>(), dx.dim(0), dx.dim(1), range.begin,
             dtable.dim(0));
    });
  });
}

}  // namespace palimpsest::cuda
