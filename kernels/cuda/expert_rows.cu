// Tokens as rows sorted by expert, and what is done row by row. The sort is a counting sort in three kernels: counts of
// each run of choices, where each run's rows of each expert begin, and the rows. The others have a block a row (or a
// token), whose threads take its columns.
#include "kernels/expert_rows.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kScanThreads = 1024;
constexpr int64_t kRun = 512;  // choices that a block sorts

// ---- the sort ----

// The choices of all tokens in order: number i is choice i % k of token i / k.
struct Choices {
  Rows<int32_t> experts;
  int64_t count, k, E;
  __device__ int32_t operator[](int64_t i) const { return experts[i / k][i % k]; }
};

// counts [runs, E]. Counts of whole numbers do not depend on their order.
__global__ void count_kernel(int32_t* counts, Choices choices) {
  extern __shared__ int32_t own[];
  for (int64_t e = threadIdx.x; e < choices.E; e += kThreads) own[e] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * kRun;
  for (int64_t i = begin + threadIdx.x; i < min(choices.count, begin + kRun); i += kThreads)
    atomicAdd(own + choices[i], 1);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < choices.E; e += kThreads) counts[blockIdx.x * choices.E + e] = own[e];
}

// One block. counts become the rows at which a run's choices of an expert begin.
__global__ void begin_kernel(int32_t* offsets, int32_t* counts, int64_t runs, int64_t E) {
  __shared__ int32_t room[kScanThreads];
  const int thread = static_cast<int>(threadIdx.x);
  int32_t before = 0;  // rows of the experts before this strip
  for (int64_t strip = 0; strip < E; strip += kScanThreads) {
    const int64_t e = strip + thread;
    int32_t total = 0;
    if (e < E)
      for (int64_t run = 0; run < runs; ++run) total += counts[run * E + e];
    room[thread] = total;
    for (int distance = 1; distance < kScanThreads; distance *= 2) {
      __syncthreads();
      const int32_t left = thread >= distance ? room[thread - distance] : 0;
      __syncthreads();
      room[thread] += left;
    }
    __syncthreads();
    int32_t row = before + room[thread] - total;
    before += room[kScanThreads - 1];
    __syncthreads();
    if (e >= E) continue;
    offsets[e] = row;
    for (int64_t run = 0; run < runs; ++run) {
      const int32_t count = counts[run * E + e];
      counts[run * E + e] = row;
      row += count;
    }
  }
  if (thread == 0) offsets[E] = before;
}

// A warp a run, a choice a lane: of equal experts in a warp's 32 choices the lower lanes come first.
__global__ void place_kernel(int32_t* row_of, int32_t* token_of, const int32_t* begins, Choices choices) {
  extern __shared__ int32_t next[];
  const int lane = static_cast<int>(threadIdx.x);
  for (int64_t e = lane; e < choices.E; e += kWarp) next[e] = begins[blockIdx.x * choices.E + e];
  __syncwarp();
  const int64_t begin = blockIdx.x * kRun, end = min(choices.count, begin + kRun);
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t i = first + lane;
    const int32_t e = i < end ? choices[i] : -1;
    const unsigned same = __match_any_sync(kAllLanes, e);
    const int before = __popc(same & ((1U << lane) - 1));
    const int32_t row = e >= 0 ? next[e] + before : 0;
    __syncwarp();
    if (e >= 0) {
      row_of[i] = row;
      token_of[row] = static_cast<int32_t>(i / choices.k);
      if (before == 0) next[e] += __popc(same);
    }
    __syncwarp();
  }
}

// ---- rows ----

// Calls body(first column) for the packs of a row of `size` columns.
template <int kPack, class Body>
__device__ inline void for_each_pack(int64_t size, Body body) {
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kPack; i < size; i += kThreads * kPack) body(i);
}

template <int kPack, class T>
__global__ void gather_kernel(Rows<T> rows, Rows<T> x, const int32_t* token_of, int64_t D) {
  const int64_t row = blockIdx.x, token = token_of[row];
  for_each_pack<kPack>(D, [&](int64_t i) {
    float values[kPack];
    load(x[token] + i, values);
    store(rows[row] + i, values);
  });
}

template <int kPack, class T>
__global__ void sum_kernel(Rows<T> y, Rows<T> rows, Rows<int32_t> row_of, int64_t D, int64_t k, bool accumulate) {
  const int64_t n = blockIdx.x;
  for_each_pack<kPack>(D, [&](int64_t i) {
    float sum[kPack] = {}, value[kPack];
    if (accumulate) load(y[n] + i, sum);
    for (int64_t j = 0; j < k; ++j) {
      load(rows[row_of[n][j]] + i, value);
#pragma unroll
      for (int c = 0; c < kPack; ++c) sum[c] += value[c];
    }
    store(y[n] + i, sum);
  });
}

// to = factor * from; may be the same row.
template <int kPack, class T>
__device__ inline void scale_row(T* to, const T* from, float factor, int64_t size) {
  for_each_pack<kPack>(size, [&](int64_t i) {
    float value[kPack];
    load(from + i, value);
#pragma unroll
    for (int c = 0; c < kPack; ++c) value[c] *= factor;
    store(to + i, value);
  });
}

// The same, and from . other of the row, in every thread.
template <int kPack, class T>
__device__ inline float scale_row_and_dot(T* to, const T* from, const T* other, float factor, int64_t size) {
  __shared__ float room[kWarp];
  float dot = 0.0F;
  for_each_pack<kPack>(size, [&](int64_t i) {
    float value[kPack], b[kPack];
    load(from + i, value);
    load(other + i, b);
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      dot += value[c] * b[c];
      value[c] *= factor;
    }
    store(to + i, value);
  });
  return block_sum(dot, room);
}

// A block a choice.
template <int kPack, class T>
__global__ void scale_fwd_kernel(Rows<T> y, Rows<T> x, Rows<float> weights, Rows<int32_t> row_of, int64_t F,
                                 int64_t k) {
  const int64_t n = blockIdx.x / k, j = blockIdx.x % k, row = row_of[n][j];
  scale_row<kPack>(y[row], x[row], weights[n][j], F);
}

template <int kPack, class T>
__global__ void scale_bwd_kernel(Rows<T> dx, Rows<float> d_weights, Rows<T> dy, Rows<T> x, Rows<float> weights,
                                 Rows<int32_t> row_of, int64_t F, int64_t k) {
  const int64_t n = blockIdx.x / k, j = blockIdx.x % k, row = row_of[n][j];
  const float dot = scale_row_and_dot<kPack>(dx[row], dy[row], x[row], weights[n][j], F);
  if (threadIdx.x == 0) d_weights[n][j] = dot;
}

template <int kPack, class T>
__global__ void token_gate_fwd_kernel(Rows<T> y, Rows<T> x, Rows<T> z, int64_t D) {
  const int64_t n = blockIdx.x;
  scale_row<kPack>(y[n], x[n], sigmoid(to_f32(z[n][0])), D);
}

template <int kPack, class T>
__global__ void token_gate_bwd_kernel(Rows<T> dx, Rows<T> dz, Rows<T> dy, Rows<T> x, Rows<T> z, int64_t D) {
  const int64_t n = blockIdx.x;
  const float open = sigmoid(to_f32(z[n][0]));
  const float dot = scale_row_and_dot<kPack>(dx[n], dy[n], x[n], open, D);
  if (threadIdx.x == 0) dz[n][0] = from_f32<T>(open * (1.0F - open) * dot);
}

// Calls body(pack, T{}) for rows of `size` columns.
template <class Body>
void with_rows(std::initializer_list<const Tensor*> tensors, int64_t size, Body body) {
  with_float((*tensors.begin())->dtype(),
             [&](auto zero) { with_pack(tensors, size, [&](auto pack) { body(pack, zero); }); });
}

}  // namespace

void sort_by_expert(Stream& stream, const ExpertRows& rows, const Tensor& experts) {
  const Arena::Scope scope(stream.scratch());
  const Choices choices = {
      .experts = Rows<int32_t>(experts), .count = experts.numel(), .k = experts.dim(1), .E = rows.offsets.dim(0) - 1};
  const int64_t runs = ceil_div(choices.count, kRun), bytes = choices.E * static_cast<int64_t>(sizeof(int32_t));
  const Tensor counts = stream.scratch().allocate(DType::kI32, {runs, choices.E});
  launch(stream, count_kernel, {.grid_x = runs, .threads = kThreads, .shared_bytes = bytes}, counts.data<int32_t>(),
         choices);
  launch(stream, begin_kernel, {.threads = kScanThreads}, rows.offsets.data<int32_t>(), counts.data<int32_t>(), runs,
         choices.E);
  launch(stream, place_kernel, {.grid_x = runs, .threads = kWarp, .shared_bytes = bytes}, rows.row_of.data<int32_t>(),
         rows.token_of.data<int32_t>(), counts.data<int32_t>(), choices);
}

void gather_expert_rows(Stream& stream, Tensor rows, const Tensor& x, const Tensor& token_of) {
  with_rows({&rows, &x}, x.dim(1), [&](auto pack, auto zero) {
    using T = decltype(zero);
    launch(stream, gather_kernel<decltype(pack)::value, T>, {.grid_x = rows.dim(0), .threads = kThreads}, Rows<T>(rows),
           Rows<T>(x), token_of.data<int32_t>(), x.dim(1));
  });
}

void sum_expert_rows(Stream& stream, Tensor y, const Tensor& rows, const Tensor& row_of, Write write) {
  with_rows({&y, &rows}, y.dim(1), [&](auto pack, auto zero) {
    using T = decltype(zero);
    launch(stream, sum_kernel<decltype(pack)::value, T>, {.grid_x = y.dim(0), .threads = kThreads}, Rows<T>(y),
           Rows<T>(rows), Rows<int32_t>(row_of), y.dim(1), row_of.dim(1), write == Write::kAccumulate);
  });
}

void scale_expert_rows_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& weights, const Tensor& row_of) {
  with_rows({&y, &x}, x.dim(1), [&](auto pack, auto zero) {
    using T = decltype(zero);
    launch(stream, scale_fwd_kernel<decltype(pack)::value, T>, {.grid_x = row_of.numel(), .threads = kThreads},
           Rows<T>(y), Rows<T>(x), Rows<float>(weights), Rows<int32_t>(row_of), x.dim(1), row_of.dim(1));
  });
}

void scale_expert_rows_backward(Stream& stream, Tensor dx, Tensor d_weights, const Tensor& dy, const Tensor& x,
                                const Tensor& weights, const Tensor& row_of) {
  with_rows({&dx, &dy, &x}, dy.dim(1), [&](auto pack, auto zero) {
    using T = decltype(zero);
    launch(stream, scale_bwd_kernel<decltype(pack)::value, T>, {.grid_x = row_of.numel(), .threads = kThreads},
           Rows<T>(dx), Rows<float>(d_weights), Rows<T>(dy), Rows<T>(x), Rows<float>(weights), Rows<int32_t>(row_of),
           dy.dim(1), row_of.dim(1));
  });
}

void token_gate_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& z) {
  with_rows({&y, &x}, x.dim(1), [&](auto pack, auto zero) {
    using T = decltype(zero);
    launch(stream, token_gate_fwd_kernel<decltype(pack)::value, T>, {.grid_x = x.dim(0), .threads = kThreads},
           Rows<T>(y), Rows<T>(x), Rows<T>(z), x.dim(1));
  });
}

void token_gate_backward(Stream& stream, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z) {
  with_rows({&dx, &dy, &x}, dy.dim(1), [&](auto pack, auto zero) {
    using T = decltype(zero);
    launch(stream, token_gate_bwd_kernel<decltype(pack)::value, T>, {.grid_x = dy.dim(0), .threads = kThreads},
           Rows<T>(dx), Rows<T>(dz), Rows<T>(dy), Rows<T>(x), Rows<T>(z), dy.dim(1));
  });
}

}  // namespace palimpsest::cuda
