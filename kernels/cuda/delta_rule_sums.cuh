// Sums of one key channel over segments of a chunk's rows, for the kernels prepare and local. A thread owns a channel
// and kRun rows; a matrix is [rows, kSlice] f32 in shared memory. Every sum starts at its segment's own end.
//
// At level h a row of an odd block of h rows ("second half") takes the sum from the block's first row to itself, a row
// of an even block ("first half") the sum from the row after it to the block's last row.
#pragma once

#include "kernels/cuda/delta_rule.cuh"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

constexpr int kRun = 16;  // rows of a thread
static_assert(kDeltaThreads == kSlice * kMaxChunk / kRun);

struct ChannelRun {
  int channel = static_cast<int>(threadIdx.x) % kSlice;
  int first = static_cast<int>(threadIdx.x) / kSlice * kRun;  // row
};

// Rows begin .. row of x, for each row of the run.
__device__ inline void sums_from(const float* x, const ChannelRun& run, int begin, float (&sums)[kRun]) {
  float sum = 0.0F;
  for (int row = begin; row < run.first; ++row) sum += x[row * kSlice + run.channel];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    sum += x[(run.first + i) * kSlice + run.channel];
    sums[i] = sum;
  }
}

// Rows row + 1 .. end - 1.
__device__ inline void sums_to(const float* x, const ChannelRun& run, int end, float (&sums)[kRun]) {
  float sum = 0.0F;
  for (int row = end - 1; row >= run.first + kRun; --row) sum += x[row * kSlice + run.channel];
#pragma unroll
  for (int i = kRun - 1; i >= 0; --i) {
    sums[i] = sum;
    sum += x[(run.first + i) * kSlice + run.channel];
  }
}

__device__ inline void level_sums(const float* x, const ChannelRun& run, int h, float (&sums)[kRun]) {
  if (h >= kRun) {
    const int begin = run.first / h * h;
    if ((run.first & h) != 0)
      sums_from(x, run, begin, sums);
    else
      sums_to(x, run, begin + h, sums);
    return;
  }
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    sum = (i & (h - 1)) == 0 ? 0.0F : sum;
    sum += x[(run.first + i) * kSlice + run.channel];
    if ((i & h) != 0) sums[i] = sum;
  }
  sum = 0.0F;
#pragma unroll
  for (int i = kRun - 1; i >= 0; --i) {
    sum = (i & (h - 1)) == h - 1 ? 0.0F : sum;
    if ((i & h) == 0) sums[i] = sum;
    sum += x[(run.first + i) * kSlice + run.channel];
  }
}

// The transposed sums: adds to total[row] what segments of x hold that row: rows >= row of a second half's block, rows
// < row of a first half's.
__device__ inline void add_uses_from(const float* x, const ChannelRun& run, int end, float (&total)[kRun]) {
  float sum = 0.0F;
  for (int row = end - 1; row >= run.first + kRun; --row) sum += x[row * kSlice + run.channel];
#pragma unroll
  for (int i = kRun - 1; i >= 0; --i) {
    sum += x[(run.first + i) * kSlice + run.channel];
    total[i] += sum;
  }
}
__device__ inline void add_uses_before(const float* x, const ChannelRun& run, int begin, float (&total)[kRun]) {
  float sum = 0.0F;
  for (int row = begin; row < run.first; ++row) sum += x[row * kSlice + run.channel];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    total[i] += sum;
    sum += x[(run.first + i) * kSlice + run.channel];
  }
}
__device__ inline void add_level_uses(const float* x, const ChannelRun& run, int h, float (&total)[kRun]) {
  if (h >= kRun) {
    const int begin = run.first / h * h;
    if ((run.first & h) != 0)
      add_uses_from(x, run, begin + h, total);
    else
      add_uses_before(x, run, begin, total);
    return;
  }
  float sum = 0.0F;
#pragma unroll
  for (int i = kRun - 1; i >= 0; --i) {
    sum = (i & (h - 1)) == h - 1 ? 0.0F : sum;
    sum += x[(run.first + i) * kSlice + run.channel];
    if ((i & h) != 0) total[i] += sum;
  }
  sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    sum = (i & (h - 1)) == 0 ? 0.0F : sum;
    if ((i & h) == 0) total[i] += sum;
    sum += x[(run.first + i) * kSlice + run.channel];
  }
}

// Whether rows i and j (i > j) meet at level h.
__device__ inline bool meet_at(int i, int j, int h) {
  return (i & h) != 0 && (j & h) == 0 && i / (2 * h) == j / (2 * h);
}

// Raw rows of q and k in shared memory, and the normalised numbers from them.
template <class T>
struct KeyRows {
  const T *q, *k;  // [rows, row_size]
  int row_size;
  const float *q_factor, *k_factor;  // [rows]

  __device__ float q_at(int row, int channel) const { return to_f32(q[row * row_size + channel]) * q_factor[row]; }
  __device__ float k_at(int row, int channel) const { return to_f32(k[row * row_size + channel]) * k_factor[row]; }
};

// Starts copying `columns` channels of q and k, zero past the chunk and beyond K.
template <class T>
__device__ inline void copy_key_rows(const DeltaProblem<T>& p, const ChunkList::Chunk& chunk, int64_t head,
                                     int first_channel, int columns, T* q, T* k, int row_size) {
  const int64_t at = p.key_head(head) * p.K + first_channel, left = p.K - first_channel;
  load_tile(q, row_size, p.chunks.rows, columns, p.q[chunk.start] + at, p.q.stride, chunk.n, left, p.q_packed);
  load_tile(k, row_size, p.chunks.rows, columns, p.k[chunk.start] + at, p.k.stride, chunk.n, left, p.k_packed);
}

// Starts copying the logits of kSlice channels of a vector gate.
template <class T>
__device__ inline void copy_gate_rows(const DeltaProblem<T>& p, const ChunkList::Chunk& chunk, int64_t head,
                                      int first_channel, T* logits, int row_size) {
  if (!p.gate.vector) return;
  load_tile(logits, row_size, p.chunks.rows, kSlice, p.gate.logit[chunk.start] + head * p.K + first_channel,
            p.gate.logit.stride, chunk.n, p.K - first_channel, p.gate_packed);
}

// g [rows, kSlice]: the log decays, zero past the chunk and beyond K, from the logits that were copied. `room` [rows].
template <class T>
__device__ inline void activate_gate(const DeltaProblem<T>& p, const ChunkList::Chunk& chunk, int64_t head,
                                     int first_channel, const T* logits, int row_size, float* room, float* g) {
  const int thread = static_cast<int>(threadIdx.x), rows = p.chunks.rows;
  const int channel = thread % kSlice, step = kDeltaThreads / kSlice;
  const float rate = p.gate.rate(head);
  if (p.gate.vector) {
    const bool inside = first_channel + channel < p.K;
    const float bias = inside ? p.gate.dt_bias[head * p.K + first_channel + channel] : 0.0F;
    for (int row = thread / kSlice; row < rows; row += step)
      g[row * kSlice + channel] =
          inside && row < chunk.n ? p.gate.activate(to_f32(logits[row * row_size + channel]) + bias, rate) : 0.0F;
    return;
  }
  if (thread < rows) room[thread] = thread < chunk.n ? p.gate.log_decay(chunk.start + thread, head, 0, rate) : 0.0F;
  __syncthreads();
  for (int row = thread / kSlice; row < rows; row += step)
    g[row * kSlice + channel] = first_channel + channel < p.K ? room[row] : 0.0F;
}

}  // namespace palimpsest::cuda
