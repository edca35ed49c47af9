// The delta rule's chunks, each by itself: l2 norms, gates, the matrices Aqk and M - I, and Qb, Kb, Kt.
//
// Grid: chunks x value heads. A block takes kSlice key channels at a time. For each level h it writes q and k times the
// level's factors as operands, and each warp multiplies the unit of Aqk and P that it owns, keeping the pairs that meet
// at this level.
#include "kernels/cuda/delta_rule_sums.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kMatrixRow = kMaxChunk + 8;  // f32 matrices of a chunk: a warp's columns and parts lie in other banks
constexpr int kParts = kDeltaThreads / kMaxChunk;  // threads that share a column of M

template <class T>
constexpr int kOperandRow = kSlice + kRowPad<T>;

// Raw q and k [rows, Kp]; g [rows, kSlice] f32; q and k times factors as operands, where a slice's gate logits come
// first; at the end L and M - I over all that.
template <class T>
struct PrepareMemory {
  T *q, *k;
  float* g;
  T *q_operand, *k_operand;
  float *q_factor, *k_factor, *beta, *room;  // [kMaxChunk]
  float *lower, *inverse;                    // [rows, kMatrixRow]
  int key_row;

  __host__ __device__ static int64_t tile_bytes(int64_t Kp, int64_t rows) {
    const int64_t tiles =
        2 * rows * (Kp + kRowPad<T> + kOperandRow<T>)*static_cast<int64_t>(sizeof(T)) + rows * kSlice * 4;
    const int64_t matrices = 2 * rows * kMatrixRow * 4;
    return tiles > matrices ? tiles : matrices;
  }
  __host__ __device__ static int64_t bytes(int64_t Kp, int64_t rows) {
    return tile_bytes(Kp, rows) + 4 * kMaxChunk * 4;
  }
  __device__ PrepareMemory(unsigned char* shared, int Kp, int rows) : key_row(Kp + kRowPad<T>) {
    q = reinterpret_cast<T*>(shared);
    k = q + rows * key_row;
    g = reinterpret_cast<float*>(k + rows * key_row);
    q_operand = reinterpret_cast<T*>(g + rows * kSlice);
    k_operand = q_operand + rows * kOperandRow<T>;
    q_factor = reinterpret_cast<float*>(shared + tile_bytes(Kp, rows));
    k_factor = q_factor + kMaxChunk;
    beta = k_factor + kMaxChunk;
    room = beta + kMaxChunk;
    lower = reinterpret_cast<float*>(shared);
    inverse = lower + rows * kMatrixRow;
  }
};

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
  const PrepareMemory<T> s(shared, static_cast<int>(p.Kp), rows);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const ChunkList::Chunk chunk = p.chunks.find(blockIdx.x / p.HV);
  const int64_t head = blockIdx.x % p.HV, key_head = p.key_head(head);

  copy_key_rows(p, chunk, head, 0, static_cast<int>(p.Kp), s.q, s.k, s.key_row);
  copy_gate_rows(p, chunk, head, 0, s.q_operand, kOperandRow<T>);
  commit_copies();
  if (threadIdx.x < rows) {
    const int row = static_cast<int>(threadIdx.x);
    const int64_t token = chunk.start + row;
    s.beta[row] = row < chunk.n ? p.beta(token, head) : 0.0F;
    if (row < chunk.n) p.betas[token * p.HV + head] = s.beta[row];
  }
  wait_for_copies();
  __syncthreads();
  for (int row = warp; row < rows; row += kDeltaThreads / kWarp) {
    float q_square = 0.0F, k_square = 0.0F;
    for (int c = lane; c < p.Kp; c += kWarp) {
      const float q_value = to_f32(s.q[row * s.key_row + c]), k_value = to_f32(s.k[row * s.key_row + c]);
      q_square += q_value * q_value;
      k_square += k_value * k_value;
    }
    q_square = warp_sum(q_square);
    k_square = warp_sum(k_square);
    if (lane != 0) continue;
    s.q_factor[row] = p.l2norm ? 1.0F / sqrtf(q_square + p.l2norm_eps) : 1.0F;
    s.k_factor[row] = p.l2norm ? 1.0F / sqrtf(k_square + p.l2norm_eps) : 1.0F;
    if (row < chunk.n && head % (p.HV / p.H) == 0) {
      p.q_factor[(chunk.start + row) * p.H + key_head] = s.q_factor[row];
      p.k_factor[(chunk.start + row) * p.H + key_head] = s.k_factor[row];
    }
  }

  const ChannelRun run;
  const bool runs = run.first < rows;
  const int unit_row = warp / 2 * kUnitRows, unit_column = warp % 2 * kUnitColumns;
  const bool owns_unit = unit_row < rows && unit_column < rows;
  Unit aqk, scores;  // scores: P
  const int num_channels = static_cast<int>(p.Kp);
  for (int first_channel = 0; first_channel < num_channels; first_channel += kSlice) {
    if (first_channel > 0) {
      copy_gate_rows(p, chunk, head, first_channel, s.q_operand, kOperandRow<T>);
      commit_copies();
      wait_for_copies();
      __syncthreads();
    }
    activate_gate(p, chunk, head, first_channel, s.q_operand, kOperandRow<T>, s.room, s.g);
    __syncthreads();
    const KeyRows<T> keys = {s.q + first_channel, s.k + first_channel, s.key_row, s.q_factor, s.k_factor};
    const bool is_channel = first_channel + run.channel < num_channels;
    if (runs && is_channel) {
      float prefix[kRun], suffix[kRun];
      sums_from(s.g, run, 0, prefix);
      sums_to(s.g, run, rows, suffix);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int row = run.first + i;
        if (row == rows - 1)
          p.chunk_decay[(p.decay_slot(chunk) * p.HV + head) * p.Kp + first_channel + run.channel] = expf(prefix[i]);
        if (row >= chunk.n) continue;
        const int64_t to = ((chunk.start + row) * p.HV + head) * p.Kp + first_channel + run.channel;
        const float entry = expf(prefix[i]);
        const float key = keys.k_at(row, run.channel);
        p.Qb[to] = from_f32<T>(keys.q_at(row, run.channel) * entry);
        p.Kb[to] = from_f32<T>(key * entry);
        p.Kt[to] = from_f32<T>(key * expf(suffix[i]));
      }
    }
    if (!matrices) {
      __syncthreads();
      continue;
    }
    for (int h = 0; h < p.chunks.C; h = h == 0 ? 1 : 2 * h) {  // h = 0: the diagonal of Aqk, without decay
      if (runs) {
        float sums[kRun] = {};
        if (h > 0) level_sums(s.g, run, h, sums);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          const int row = run.first + i, to = row * kOperandRow<T> + run.channel;
          const float factor = expf(sums[i]);
          s.q_operand[to] = from_f32<T>(is_channel ? keys.q_at(row, run.channel) * factor : 0.0F);
          s.k_operand[to] = from_f32<T>(is_channel ? keys.k_at(row, run.channel) * factor : 0.0F);
        }
      }
      __syncthreads();
      if (owns_unit &&
          (h == 0 ? unit_row / kUnitColumns * kUnitColumns == unit_column : unit_meets(unit_row, unit_column, h))) {
        Unit q_part, k_part;
        const T *q_rows = s.q_operand + unit_row * kOperandRow<T>, *k_rows = s.k_operand + unit_row * kOperandRow<T>;
        const T* columns = s.k_operand + unit_column * kOperandRow<T>;
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
      for (int e = 0; e < 2; ++e) s.lower[row * kMatrixRow + column + e] = s.beta[row] * value[e];
    });
  __syncthreads();
  // Row i of (I + L)(I + N) = I is N_i = -(L_i + sum_{j<i} L_ij N_j). kParts neighbouring threads solve a column, each
  // taking every kParts-th row above.
  const int column = static_cast<int>(threadIdx.x) / kParts, part = static_cast<int>(threadIdx.x) % kParts;
  for (int i = 0; i < rows && column < rows; ++i) {
    const float *row = s.lower + i * kMatrixRow, *above = s.inverse + column;
    float sum = part == 0 ? row[column] : 0.0F;
#pragma unroll 4
    for (int j = part; j < i; j += kParts) sum += row[j] * above[j * kMatrixRow];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    if (part == 0) s.inverse[i * kMatrixRow + column] = column < i ? -sum : 0.0F;
    __syncwarp();
  }
  __syncthreads();
  const auto C = p.chunks.C;
  for (int i = static_cast<int>(threadIdx.x); i < chunk.n * C; i += kDeltaThreads)
    p.m[chunk.start + i / C][head * C + i % C] = from_f32<T>(s.inverse[i / C * kMatrixRow + i % C]);
}

}  // namespace

template <class T>
void launch_prepare(const Stream& stream, const DeltaProblem<T>& p, Keep matrices) {
  launch(stream, delta_rule_prepare_kernel<T>,
         {.grid_x = p.chunks.num_chunks * p.HV,
          .threads = kDeltaThreads,
          .shared_bytes = PrepareMemory<T>::bytes(p.Kp, p.chunks.rows)},
         p, matrices == Keep::kYes);
}

template void launch_prepare(const Stream&, const DeltaProblem<float>&, Keep);
template void launch_prepare(const Stream&, const DeltaProblem<bf16>&, Keep);

}  // namespace palimpsest::cuda
