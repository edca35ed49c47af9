// The delta rule's backward inside a chunk: the gradients of the normalised q and k and of the log decays g, from dO,
// dV = dR, X, the state S0 before the chunk and the cotangent dS of the one after it.
//
// Grid: x chunks x value heads, y tiles of kSlice key channels. A warp owns one unit of every [C, .] result.
// 1. Over tiles of V: dA, dP [C, C]; dQb, dKb, dKt [C, kSlice]; tot. Operands: dO, dR, X, S0, dS in shared memory.
// 2. The uses that reach the chunk's borders, then the levels from C / 2 down to 1. For h < 16 a level's pairs lie in
//    the blocks of 16 x 16 on the diagonal, which are copied with the other pairs zeroed.
// An array [C, kSlice] f32 holds in turn the factors of rows and, element by element in their place, what those add to
// dg; g is another. The tiles of part 1 lie where both are later.
#include "kernels/cuda/delta_rule_sums.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

namespace {

template <class T>
struct LocalMemory {
  static constexpr int kRow = kSlice + kRowPad<T>, kDiagonalRow = kUnitRows + kRowPad<T>;
  // part 1
  T *d_o, *dr, *x, *entry, *exit;  // [rows, kRow] three times, [kSlice, kRow] twice: S0, dS
  // part 2, in the same place
  float *g, *use;  // [rows, kSlice]
  // both
  T *q, *k;                // [rows, kRow]: raw
  T *q_level, *k_level;    // [rows, kRow]; at first the gate's logits
  T *da, *dp;              // [rows, kRow]
  T *da_block, *dp_block;  // [rows, kDiagonalRow]
  float *total, *q_factor, *k_factor, *room;

  __host__ __device__ static int64_t first_bytes(int64_t rows) {
    const int64_t tiles = (3 * rows + 2 * kSlice) * kRow * static_cast<int64_t>(sizeof(T)),
                  arrays = 2 * rows * kSlice * 4;
    return tiles > arrays ? tiles : arrays;
  }
  __host__ __device__ static int64_t bytes(int64_t rows) {
    return first_bytes(rows) + (6 * kRow + 2 * kDiagonalRow) * rows * static_cast<int64_t>(sizeof(T)) +
           (kSlice + 3 * kMaxChunk) * 4;
  }
  __device__ LocalMemory(unsigned char* shared, int rows) {
    d_o = reinterpret_cast<T*>(shared);
    dr = d_o + rows * kRow;
    x = dr + rows * kRow;
    entry = x + rows * kRow;
    exit = entry + kSlice * kRow;
    g = reinterpret_cast<float*>(shared);
    use = g + rows * kSlice;
    q = reinterpret_cast<T*>(shared + first_bytes(rows));
    k = q + rows * kRow;
    q_level = k + rows * kRow;
    k_level = q_level + rows * kRow;
    da = k_level + rows * kRow;
    dp = da + rows * kRow;
    da_block = dp + rows * kRow;
    dp_block = da_block + rows * kDiagonalRow;
    total = reinterpret_cast<float*>(dp_block + rows * kDiagonalRow);
    q_factor = total + kSlice;
    k_factor = q_factor + kMaxChunk;
    room = k_factor + kMaxChunk;
  }
};

// kSlice channels by kSlice values of S0 and dS as operands, and total += rowsum(S0 * dS). Null states are zero. Four
// neighbouring threads take a channel.
template <class T>
__device__ void load_states(const LocalMemory<T>& s, const float* entry, const float* exit, int64_t channels,
                            int64_t values, int64_t stride) {
  static_assert(kDeltaThreads == 4 * kSlice);
  constexpr int kEach = kSlice / 4;
  const int row = static_cast<int>(threadIdx.x) / 4, first = static_cast<int>(threadIdx.x) % 4 * kEach;
  float a[kEach], b[kEach], product = 0.0F;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool inside = row < channels && first + i < values;
    const int64_t at = row * stride + first + i;
    a[i] = inside && entry != nullptr ? entry[at] : 0.0F;
    b[i] = inside && exit != nullptr ? exit[at] : 0.0F;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    s.entry[row * LocalMemory<T>::kRow + first + i] = from_f32<T>(a[i]);
    s.exit[row * LocalMemory<T>::kRow + first + i] = from_f32<T>(b[i]);
    product += a[i] * b[i];
  }
  product += __shfl_xor_sync(kAllLanes, product, 1);
  product += __shfl_xor_sync(kAllLanes, product, 2);
  if (first == 0) s.total[row] += product;
}

struct PackedValues {
  bool d_o, dv, x;
};

template <class T>
__global__ void __launch_bounds__(kDeltaThreads, 2)
    delta_rule_local_kernel(const __grid_constant__ DeltaProblem<T> p, const __grid_constant__ LocalGradients<T> out,
                            PackedValues packed) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Memory = LocalMemory<T>;
  constexpr int kRow = Memory::kRow, kDiagonalRow = Memory::kDiagonalRow;
  const int rows = p.chunks.rows;
  const Memory s(shared, rows);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int unit_row = warp / 2 * kUnitRows, unit_column = warp % 2 * kUnitColumns;
  const bool owns_unit = unit_row < rows, owns_score = owns_unit && unit_column < rows;
  const ChunkList::Chunk chunk = p.chunks.find(blockIdx.x / p.HV);
  const int64_t head = blockIdx.x % p.HV, key_head = p.key_head(head);
  const int first_channel = static_cast<int>(blockIdx.y) * kSlice;

  // 1. products over V
  const int64_t state_offset = head * p.state_size() + first_channel * p.V, all_states = p.HV * p.state_size();
  const float *entry = nullptr, *exit = nullptr;
  if (chunk.number > 0)
    entry = p.states + p.chunks.state_slot(chunk, chunk.number) * all_states + state_offset;
  else if (const int64_t row = p.chunks.documents.entering(chunk.document); p.initial_state != nullptr && row >= 0)
    entry = p.initial_state + row * all_states + state_offset;
  if (!chunk.last)
    exit = out.d_states + p.chunks.state_slot(chunk, chunk.number + 1) * all_states + state_offset;
  else if (const int64_t row = p.chunks.documents.leaving(chunk.document); out.d_final_state != nullptr && row >= 0)
    exit = out.d_final_state + row * all_states + state_offset;
  for (int i = static_cast<int>(threadIdx.x); i < kSlice; i += kDeltaThreads) s.total[i] = 0.0F;
  for (int i = static_cast<int>(threadIdx.x); i < rows; i += kDeltaThreads) {
    const int64_t at = (chunk.start + i) * p.H + key_head;
    s.q_factor[i] = i < chunk.n ? p.q_factor[at] : 0.0F;
    s.k_factor[i] = i < chunk.n ? p.k_factor[at] : 0.0F;
  }
  copy_key_rows(p, chunk, head, first_channel, kSlice, s.q, s.k, kRow);
  copy_gate_rows(p, chunk, head, first_channel, s.q_level, kRow);
  Unit da, dp, dq_entry, dk_entry, dk_exit;
  for (int64_t first_value = 0; first_value < p.V; first_value += kSlice) {
    __syncthreads();
    const int64_t column = head * p.V + first_value, values = p.V - first_value;
    load_tile(s.d_o, kRow, rows, kSlice, out.d_o[chunk.start] + column, out.d_o.stride, chunk.n, values, packed.d_o);
    load_tile(s.dr, kRow, rows, kSlice, out.dv[chunk.start] + column, out.dv.stride, chunk.n, values, packed.dv);
    load_tile(s.x, kRow, rows, kSlice, p.x[chunk.start] + column, p.x.stride, chunk.n, values, packed.x);
    load_states(s, entry == nullptr ? nullptr : entry + first_value, exit == nullptr ? nullptr : exit + first_value,
                p.K - first_channel, values, p.V);
    commit_copies();
    wait_for_copies();
    __syncthreads();
    if (!owns_unit) continue;
    const T *d_o = s.d_o + unit_row * kRow, *dr = s.dr + unit_row * kRow, *x = s.x + unit_row * kRow;
    if (owns_score) multiply<Along::kRow, Along::kRow>(da, d_o, kRow, s.x + unit_column * kRow, kRow, kSlice);
    if (owns_score && p.delta) multiply<Along::kRow, Along::kRow>(dp, dr, kRow, s.x + unit_column * kRow, kRow, kSlice);
    multiply<Along::kRow, Along::kRow>(dq_entry, d_o, kRow, s.entry + unit_column * kRow, kRow, kSlice);
    if (p.delta) multiply<Along::kRow, Along::kRow>(dk_entry, dr, kRow, s.entry + unit_column * kRow, kRow, kSlice);
    multiply<Along::kRow, Along::kRow>(dk_exit, x, kRow, s.exit + unit_column * kRow, kRow, kSlice);
  }
  if (owns_score) {
    for_each_pair(da, unit_row, unit_column, [&](int row, int column, const float(&value)[2]) {
      for (int e = 0; e < 2; ++e)
        s.da[row * kRow + column + e] = from_f32<T>(column + e <= row ? p.scale * value[e] : 0.0F);
    });
    for_each_pair(dp, unit_row, unit_column, [&](int row, int column, const float(&value)[2]) {
      for (int e = 0; e < 2; ++e) s.dp[row * kRow + column + e] = from_f32<T>(column + e < row ? -value[e] : 0.0F);
    });
  }
  __syncthreads();  // the tiles are no longer needed

  // 2. the borders
  activate_gate(p, chunk, head, first_channel, s.q_level, kRow, s.room, s.g);
  __syncthreads();
  const KeyRows<T> keys = {s.q, s.k, kRow, s.q_factor, s.k_factor};
  const ChannelRun run;
  const bool runs = run.first < rows;
  const auto write_factors = [&](const float(&sums)[kRun]) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) s.use[(run.first + i) * kSlice + run.channel] = expf(sums[i]);
  };
  float dg[kRun];
  if (runs) {
    float sums[kRun], whole = 0.0F;
    for (int row = 0; row < rows; ++row) whole += s.g[row * kSlice + run.channel];
#pragma unroll
    for (int i = 0; i < kRun; ++i) dg[i] = expf(whole) * s.total[run.channel];
    sums_from(s.g, run, 0, sums);
    write_factors(sums);
  }
  __syncthreads();
  Unit dq, dk;
  // Calls body(row, column, pair, e, use) for the elements of this warp's unit: in `use` the factor of the row, to
  // become what the element adds to dg.
  const auto for_each_use = [&](auto body) {
    if (!owns_unit) return;
#pragma unroll
    for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = unit_row + Unit::row(pair), column = unit_column + Unit::column(pair) + e;
        body(row, column, pair, e, s.use[row * kSlice + column]);
      }
  };
  for_each_use([&](int row, int column, int pair, int e, float& use) {
    const float q = keys.q_at(row, column), k = keys.k_at(row, column);
    const float diagonal = to_f32(s.da[row * kRow + row]);
    const float q_entry = p.scale * dq_entry.value[pair][e] * use, k_entry = -dk_entry.value[pair][e] * use;
    dq.value[pair][e] = q_entry + diagonal * k;
    dk.value[pair][e] = k_entry + diagonal * q;
    use = q * q_entry + k * k_entry;
  });
  __syncthreads();
  if (runs) add_uses_from(s.use, run, rows, dg);
  __syncthreads();
  if (runs) {
    float sums[kRun];
    sums_to(s.g, run, rows, sums);
    write_factors(sums);
  }
  __syncthreads();
  for_each_use([&](int row, int column, int pair, int e, float& use) {
    const float k_exit = dk_exit.value[pair][e] * use;
    dk.value[pair][e] += k_exit;
    use = keys.k_at(row, column) * k_exit;
  });
  __syncthreads();
  if (runs) add_uses_before(s.use, run, 0, dg);

  // 3. the levels
  for (int h = p.chunks.C / 2; h > 0; h /= 2) {
    __syncthreads();
    if (runs) {
      float sums[kRun];
      level_sums(s.g, run, h, sums);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int row = run.first + i;
        const float factor = expf(sums[i]);
        s.use[row * kSlice + run.channel] = factor;
        s.q_level[row * kRow + run.channel] = from_f32<T>(keys.q_at(row, run.channel) * factor);
        s.k_level[row * kRow + run.channel] = from_f32<T>(keys.k_at(row, run.channel) * factor);
      }
    }
    if (h < kUnitRows)
      for (int i = static_cast<int>(threadIdx.x); i < rows * kUnitRows; i += kDeltaThreads) {
        const int row = i / kUnitRows, column = row / kUnitRows * kUnitRows + i % kUnitRows;
        const bool meets = meet_at(row, column, h);
        const int to = row * kDiagonalRow + i % kUnitRows;
        s.da_block[to] = meets ? s.da[row * kRow + column] : from_f32<T>(0.0F);
        s.dp_block[to] = meets ? s.dp[row * kRow + column] : from_f32<T>(0.0F);
      }
    __syncthreads();
    if (owns_unit) {
      Unit by_a, by_p, as_key;  // shares of q and k as queries, before their factor; of k as a key
      const T *q_column = s.q_level + unit_column, *k_column = s.k_level + unit_column;
      if (h < kUnitRows) {
        const T *a = s.da_block + unit_row * kDiagonalRow, *b = s.dp_block + unit_row * kDiagonalRow;
        multiply<Along::kRow, Along::kColumn>(by_a, a, kDiagonalRow, k_column + unit_row * kRow, kRow, kUnitRows);
        multiply<Along::kColumn, Along::kColumn>(as_key, a, kDiagonalRow, q_column + unit_row * kRow, kRow, kUnitRows);
        if (p.delta) {
          multiply<Along::kRow, Along::kColumn>(by_p, b, kDiagonalRow, k_column + unit_row * kRow, kRow, kUnitRows);
          multiply<Along::kColumn, Along::kColumn>(as_key, b, kDiagonalRow, k_column + unit_row * kRow, kRow,
                                                   kUnitRows);
        }
      } else if ((unit_row & h) != 0) {
        const int first = unit_row / (2 * h) * 2 * h;
        multiply<Along::kRow, Along::kColumn>(by_a, s.da + unit_row * kRow + first, kRow, k_column + first * kRow, kRow,
                                              h);
        if (p.delta)
          multiply<Along::kRow, Along::kColumn>(by_p, s.dp + unit_row * kRow + first, kRow, k_column + first * kRow,
                                                kRow, h);
      } else {
        const int second = unit_row / (2 * h) * 2 * h + h;
        if (second < rows) {
          multiply<Along::kColumn, Along::kColumn>(as_key, s.da + second * kRow + unit_row, kRow,
                                                   q_column + second * kRow, kRow, h);
          if (p.delta)
            multiply<Along::kColumn, Along::kColumn>(as_key, s.dp + second * kRow + unit_row, kRow,
                                                     k_column + second * kRow, kRow, h);
        }
      }
      for_each_use([&](int row, int column, int pair, int e, float& use) {
        const float factor = use;
        // the operands as they were multiplied
        const float q = to_f32(s.q_level[row * kRow + column]), k = to_f32(s.k_level[row * kRow + column]);
        if ((row & h) != 0) {
          dq.value[pair][e] += factor * by_a.value[pair][e];
          dk.value[pair][e] += factor * by_p.value[pair][e];
          use = q * by_a.value[pair][e] + k * by_p.value[pair][e];
        } else {
          dk.value[pair][e] += factor * as_key.value[pair][e];
          use = k * as_key.value[pair][e];
        }
      });
    }
    __syncthreads();
    if (runs) add_level_uses(s.use, run, h, dg);
  }

  // 4. out
  const auto store = [&](float* to, Unit& unit) {
    for_each_pair(unit, unit_row, first_channel + unit_column, [&](int row, int column, const float(&value)[2]) {
      if (row >= chunk.n || column >= p.Kp) return;
      float* at = to + ((chunk.start + row) * p.HV + head) * p.Kp + column;
      at[0] = value[0];
      at[1] = value[1];
    });
  };
  if (owns_unit) {
    store(out.dq, dq);
    store(out.dk, dk);
  }
  if (out.dg == nullptr) return;
  if (p.gate.vector) {
    if (runs && first_channel + run.channel < p.Kp)
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (run.first + i < chunk.n)
          out.dg[((chunk.start + run.first + i) * p.HV + head) * p.Kp + first_channel + run.channel] = dg[i];
    return;
  }
  __syncthreads();
  if (runs)
#pragma unroll
    for (int i = 0; i < kRun; ++i) s.use[(run.first + i) * kSlice + run.channel] = dg[i];
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int row = warp; row < chunk.n; row += kDeltaThreads / kWarp) {
    float sum = 0.0F;
    for (int c = lane; c < kSlice; c += kWarp) sum += s.use[row * kSlice + c];
    sum = warp_sum(sum);
    if (lane == 0) out.dg[(blockIdx.y * p.N + chunk.start + row) * p.HV + head] = sum;
  }
}

}  // namespace

template <class T>
void launch_local(const Stream& stream, const DeltaProblem<T>& p, const LocalGradients<T>& g) {
  launch(stream, delta_rule_local_kernel<T>,
         {.grid_x = p.chunks.num_chunks * p.HV,
          .grid_y = ceil_div(p.Kp, kSlice),
          .threads = kDeltaThreads,
          .shared_bytes = LocalMemory<T>::bytes(p.chunks.rows)},
         p, g, PackedValues{packed_rows(g.d_o, p.V), packed_rows(g.dv, p.V), packed_rows(p.x, p.V)});
}

template void launch_local(const Stream&, const DeltaProblem<float>&, const LocalGradients<float>&);
template void launch_local(const Stream&, const DeltaProblem<bf16>&, const LocalGradients<bf16>&);

}  // namespace palimpsest::cuda
