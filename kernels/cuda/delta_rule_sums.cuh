// Sums of one key channel over segments of a chunk's rows, for the kernels prepare and local. A thread owns a channel
// and kRun rows; a matrix is [rows, kSlice] f32 in shared memory. Every sum starts at its segment's own end.
//
// At level h a row of an odd block of h rows ("second half") takes the sum from the block's first row to itself, a row
// of an even block ("first half") the sum from the row after it to the block's last row.
#pragma once

#include "kernels/cuda/delta_rule.cuh"

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

// The normalised q and k and the log decays of kSlice channels of a chunk, zero past the chunk and beyond K.
template <class T>
__device__ inline void load_channels(const DeltaProblem<T>& p, const ChunkList::Chunk& chunk, int64_t head,
                                     int first_channel, const float* q_factor, const float* k_factor, float rate,
                                     float* q, float* k, float* g) {
  const int64_t key_head = p.key_head(head);
  for (int i = static_cast<int>(threadIdx.x); i < p.chunks.rows * kSlice; i += kDeltaThreads) {
    const int row = i / kSlice, channel = first_channel + i % kSlice;
    const bool inside = row < chunk.n && channel < p.K;
    const int64_t token = chunk.start + row;
    q[i] = inside ? to_f32(p.q[token][key_head * p.K + channel]) * q_factor[row] : 0.0F;
    k[i] = inside ? to_f32(p.k[token][key_head * p.K + channel]) * k_factor[row] : 0.0F;
    g[i] = inside ? p.gate.log_decay(token, head, channel, rate) : 0.0F;
  }
}

}  // namespace palimpsest::cuda
