// The delta rule's chunks, each by itself: l2 norms, gates, the matrices Aqk and M - I, and Qb, Kb, Kt.
//
// Grid: chunks x value heads. A block takes kSlice key channels at a time. For each level h it writes q and k times the
// level's factors as operands, and each warp multiplies the unit of Aqk and P that it owns, keeping the pairs that meet
// at this level. Shared memory: q, k, g of the slice and two operands; then L and M - I over q, k, g.
#include "kernels/cuda/delta_rule_sums.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kMatrixRow = kMaxChunk + 4;  // f32 matrices of a chunk
static_assert(2 * kMatrixRow <= 3 * kSlice);

template <class T>
constexpr int kOperandRow = kSlice + kRowPad<T>;

int64_t shared_bytes(int rows, int64_t element) {
  return rows * (3 * kSlice * 4 + 2 * (kSlice + 16 / element) * element) + 3 * kMaxChunk * 4;
}

// Whether any pair of a unit's rows and columns meets at level h.
__device__ inline bool unit_meets(int row, int column, int h) {
  if (h >= kUnitRows && (row & h) == 0) return false;
  const int first = row / (2 * h) * 2 * h, last = first + max(h, kUnitRows);
  return first < column + kUnitColumns && column < last;
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads, 2)
    delta_rule_prepare_kernel(const __grid_constant__ DeltaProblem<T> p, bool matrices) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int rows = p.chunks.rows;
  float* q = reinterpret_cast<float*>(shared);
  float *k = q + rows * kSlice, *g = k + rows * kSlice;
  T* q_operand = reinterpret_cast<T*>(g + rows * kSlice);
  T* k_operand = q_operand + rows * kOperandRow<T>;
  float* q_factor = reinterpret_cast<float*>(k_operand + rows * kOperandRow<T>);
  float *k_factor = q_factor + kMaxChunk, *beta = k_factor + kMaxChunk;

  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const ChunkList::Chunk chunk = p.chunks.find(blockIdx.x / p.HV);
  const int64_t head = blockIdx.x % p.HV, key_head = p.key_head(head);
  const float rate = p.gate.rate(head);

  for (int row = warp; row < rows; row += kDeltaThreads / kWarp) {
    float q_square = 0.0F, k_square = 0.0F;
    const int64_t token = chunk.start + row;
    if (row < chunk.n && p.l2norm)
      for (int64_t c = lane; c < p.K; c += kWarp) {
        const float q_value = to_f32(p.q[token][key_head * p.K + c]), k_value = to_f32(p.k[token][key_head * p.K + c]);
        q_square += q_value * q_value;
        k_square += k_value * k_value;
      }
    q_square = warp_sum(q_square);
    k_square = warp_sum(k_square);
    if (lane != 0) continue;
    q_factor[row] = p.l2norm ? 1.0F / sqrtf(q_square + p.l2norm_eps) : 1.0F;
    k_factor[row] = p.l2norm ? 1.0F / sqrtf(k_square + p.l2norm_eps) : 1.0F;
    beta[row] = row < chunk.n ? p.beta(token, head) : 0.0F;
    if (row < chunk.n) p.betas[token * p.HV + head] = beta[row];
    if (row < chunk.n && head % (p.HV / p.H) == 0) {
      p.q_factor[token * p.H + key_head] = q_factor[row];
      p.k_factor[token * p.H + key_head] = k_factor[row];
    }
  }
  __syncthreads();

  const ChannelRun run;
  const bool runs = run.first < rows;
  const int unit_row = warp / 2 * kUnitRows, unit_column = warp % 2 * kUnitColumns;
  const bool owns_unit = unit_row < rows && unit_column < rows;
  Unit aqk, scores;  // scores: P
  for (int first_channel = 0; first_channel < p.Kp; first_channel += kSlice) {
    load_channels(p, chunk, head, first_channel, q_factor, k_factor, rate, q, k, g);
    __syncthreads();
    if (runs && first_channel + run.channel < p.Kp) {
      float prefix[kRun], suffix[kRun];
      sums_from(g, run, 0, prefix);
      sums_to(g, run, rows, suffix);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int row = run.first + i, at = row * kSlice + run.channel;
        if (row == rows - 1)
          p.chunk_decay[(p.decay_slot(chunk) * p.HV + head) * p.Kp + first_channel + run.channel] = expf(prefix[i]);
        if (row >= chunk.n) continue;
        const int64_t to = ((chunk.start + row) * p.HV + head) * p.Kp + first_channel + run.channel;
        const float entry = expf(prefix[i]);
        p.Qb[to] = from_f32<T>(q[at] * entry);
        p.Kb[to] = from_f32<T>(k[at] * entry);
        p.Kt[to] = from_f32<T>(k[at] * expf(suffix[i]));
      }
    }
    if (!matrices) {
      __syncthreads();
      continue;
    }
    for (int h = 0; h < p.chunks.C; h = h == 0 ? 1 : 2 * h) {  // h = 0: the diagonal of Aqk, without decay
      if (runs) {
        float sums[kRun] = {};
        if (h > 0) level_sums(g, run, h, sums);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          const int row = run.first + i, at = row * kSlice + run.channel;
          const float factor = expf(sums[i]);
          q_operand[row * kOperandRow<T> + run.channel] = from_f32<T>(q[at] * factor);
          k_operand[row * kOperandRow<T> + run.channel] = from_f32<T>(k[at] * factor);
        }
      }
      __syncthreads();
      if (owns_unit &&
          (h == 0 ? unit_row / kUnitColumns * kUnitColumns == unit_column : unit_meets(unit_row, unit_column, h))) {
        Unit q_part, k_part;
        const T *q_rows = q_operand + unit_row * kOperandRow<T>, *k_rows = k_operand + unit_row * kOperandRow<T>;
        const T* columns = k_operand + unit_column * kOperandRow<T>;
        multiply<Along::kRow, Along::kRow>(q_part, q_rows, kOperandRow<T>, columns, kOperandRow<T>, kSlice);
        if (p.delta && h > 0)
          multiply<Along::kRow, Along::kRow>(k_part, k_rows, kOperandRow<T>, columns, kOperandRow<T>, kSlice);
#pragma unroll
        for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = unit_row + Unit::row(pair), j = unit_column + Unit::column(pair) + e;
            if (h == 0 ? i != j : !meet_at(i, j, h)) continue;
            aqk.value[pair][e] += q_part.value[pair][e];
            scores.value[pair][e] += k_part.value[pair][e];
          }
      }
      __syncthreads();
    }
  }
  if (!matrices) return;

  float *lower = q, *inverse = q + rows * kMatrixRow;  // L and M - I, [rows, kMatrixRow]
  if (owns_unit)
    for_each_pair(aqk, unit_row, unit_column, [&](int row, int column, const float(&value)[2]) {
      if (row >= chunk.n) return;
      T* to = p.aqk[chunk.start + row] + head * p.chunks.C;
      for (int e = 0; e < 2; ++e)
        if (column + e < p.chunks.C) to[column + e] = from_f32<T>(value[e]);
    });
  if (!p.delta) return;
  if (owns_unit)
    for_each_pair(scores, unit_row, unit_column, [&](int row, int column, const float(&value)[2]) {
      for (int e = 0; e < 2; ++e) lower[row * kMatrixRow + column + e] = beta[row] * value[e];
    });
  __syncthreads();
  // Row i of (I + L)(I + N) = I is N_i = -(L_i + sum_{j<i} L_ij N_j). A thread solves a column.
  const int column = static_cast<int>(threadIdx.x);
  if (column < rows) {
    for (int i = 0; i < rows; ++i) {
      const float *row = lower + i * kMatrixRow, *above = inverse + column;
      float sum[4] = {row[column], 0.0F, 0.0F, 0.0F};  // four chains of sums, to hide their latency
      int j = 0;
      for (; j + 4 <= i; j += 4)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += row[j + c] * above[(j + c) * kMatrixRow];
      for (; j < i; ++j) sum[0] += row[j] * above[j * kMatrixRow];
      inverse[i * kMatrixRow + column] = column < i ? -((sum[0] + sum[1]) + (sum[2] + sum[3])) : 0.0F;
    }
  }
  __syncthreads();
  const auto C = p.chunks.C;
  for (int i = static_cast<int>(threadIdx.x); i < chunk.n * C; i += kDeltaThreads)
    p.m[chunk.start + i / C][head * C + i % C] = from_f32<T>(inverse[i / C * kMatrixRow + i % C]);
}

}  // namespace

template <class T>
void launch_prepare(const Stream& stream, const DeltaProblem<T>& p, Keep matrices) {
  launch(stream, delta_rule_prepare_kernel<T>,
         {.grid_x = p.chunks.num_chunks * p.HV,
          .threads = kDeltaThreads,
          .shared_bytes = shared_bytes(p.chunks.rows, sizeof(T))},
         p, matrices == Keep::kYes);
}

template void launch_prepare(const Stream&, const DeltaProblem<float>&, Keep);
template void launch_prepare(const Stream&, const DeltaProblem<bf16>&, Keep);

}  // namespace palimpsest::cuda
