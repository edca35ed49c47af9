// The delta rule's scans over the chunks of a document, forward and in reverse.
//
// Grid: documents x value heads x tiles of V. A block keeps its columns of the state S (reverse: of its cotangent dS)
// in shared memory, f32 and, for bf16, rounded as an operand, and walks through the chunks. A warp owns one unit of the
// [C, V tile] results; those stay in its registers in f32 between the products that need them so.
// Operands Kb, Qb, Kt [C, K], M - I, Aqk [C, C], and the rows of values [C, V tile] pass through shared memory.
#include "kernels/cuda/delta_rule.cuh"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

namespace {

// Shared memory of both scans.
template <class T>
struct ScanMemory {
  static constexpr int kV = kValueTile<T>, kStateRow = kV + 4, kOperandRow = kV + kRowPad<T>;
  static constexpr bool kRounds = sizeof(T) < sizeof(float);
  static_assert(kRounds || kStateRow == kOperandRow);

  int key_row, chunk_row;  // elements
  float* state;            // [Kp, kStateRow]
  T* state_operand;        // [Kp, kOperandRow]; the state itself for f32
  T *keys, *queries;       // [rows, key_row]
  T *m, *aqk;              // [rows, chunk_row]
  T *values, *results;     // [rows, kOperandRow]
  float *decay, *beta;     // [Kp], [rows]

  __host__ __device__ static int64_t bytes(int64_t Kp, int64_t rows) {
    const int64_t t = sizeof(T);
    return Kp * kStateRow * 4 + (kRounds ? Kp * kOperandRow * t : 0) + 2 * rows * (Kp + kRowPad<T>)*t +
           2 * rows * (rows + kRowPad<T>)*t + 2 * rows * kOperandRow * t + (Kp + rows) * 4;
  }
  __device__ ScanMemory(unsigned char* shared, int Kp, int rows)
      : key_row(Kp + kRowPad<T>), chunk_row(rows + kRowPad<T>) {
    const auto take = [&](int64_t count, auto element) {
      auto* piece = reinterpret_cast<decltype(element)*>(shared);
      shared += count * static_cast<int64_t>(sizeof(element));
      return piece;
    };
    state = take(Kp * kStateRow, float{});
    state_operand = kRounds ? take(Kp * kOperandRow, T{}) : reinterpret_cast<T*>(state);
    keys = take(rows * key_row, T{});
    queries = take(rows * key_row, T{});
    m = take(rows * chunk_row, T{});
    aqk = take(rows * chunk_row, T{});
    values = take(rows * kOperandRow, T{});
    results = take(rows * kOperandRow, T{});
    decay = take(Kp, float{});
    beta = take(rows, float{});
  }

  __device__ void set(int row, int column, float value) {
    state[row * kStateRow + column] = value;
    if constexpr (kRounds) state_operand[row * kOperandRow + column] = from_f32<T>(value);
  }
};

template <class T>
struct Scan {
  static constexpr int kV = ScanMemory<T>::kV, kUnits = kV / kUnitColumns;

  const DeltaProblem<T>& p;
  ScanMemory<T> s;
  int64_t document, head, first_value;  // of the tile
  int rows, Kp, unit_row, unit_column;
  bool owns_unit;

  __device__ Scan(const DeltaProblem<T>& problem, unsigned char* shared)
      : p(problem), s(shared, static_cast<int>(problem.Kp), problem.chunks.rows) {
    const int64_t tiles = ceil_div(p.V, kV);
    first_value = blockIdx.x % tiles * kV;
    head = blockIdx.x / tiles % p.HV;
    document = blockIdx.x / tiles / p.HV;
    rows = p.chunks.rows;
    Kp = static_cast<int>(p.Kp);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    unit_row = warp / kUnits * kUnitRows;
    unit_column = warp % kUnits * kUnitColumns;
    owns_unit = unit_row < rows;
  }

  // This head's [K, V] in a tensor of states, or null.
  __device__ float* head_state(float* states, int64_t index) const {
    return states == nullptr ? nullptr : states + (index * p.HV + head) * p.state_size();
  }

  // The state from memory, zero for null and beyond K and V.
  __device__ void load_state(const float* from) {
    for (int i = static_cast<int>(threadIdx.x); i < Kp * kV; i += kDeltaThreads) {
      const int row = i / kV, column = i % kV;
      const bool inside = from != nullptr && row < p.K && first_value + column < p.V;
      s.set(row, column, inside ? from[row * p.V + first_value + column] : 0.0F);
    }
  }
  __device__ void store_state(float* to) const {
    if (to == nullptr) return;
    for (int i = static_cast<int>(threadIdx.x); i < p.K * kV; i += kDeltaThreads) {
      const int row = i / kV, column = i % kV;
      if (first_value + column < p.V)
        to[row * p.V + first_value + column] = s.state[row * ScanMemory<T>::kStateRow + column];
    }
  }

  __device__ void load_keys(T* to, const T* from, const ChunkList::Chunk& chunk) const {
    load_tile(to, s.key_row, rows, Kp, from + (chunk.start * p.HV + head) * p.Kp, p.HV * p.Kp, chunk.n, p.Kp, true);
  }
  __device__ void load_matrix(T* to, const Rows<T>& from, const ChunkList::Chunk& chunk, bool packed) const {
    load_tile(to, s.chunk_row, rows, rows, from[chunk.start] + head * p.chunks.C, from.stride, chunk.n, p.chunks.C,
              packed);
  }
  __device__ void load_values(T* to, const Rows<T>& from, const ChunkList::Chunk& chunk, bool packed) const {
    load_tile(to, ScanMemory<T>::kOperandRow, rows, kV, from[chunk.start] + head * p.V + first_value, from.stride,
              chunk.n, p.V - first_value, packed);
  }
  __device__ void load_numbers(const ChunkList::Chunk& chunk) const {
    for (int i = static_cast<int>(threadIdx.x); i < Kp; i += kDeltaThreads)
      s.decay[i] = p.chunk_decay[(p.decay_slot(chunk) * p.HV + head) * p.Kp + i];
    for (int i = static_cast<int>(threadIdx.x); i < rows; i += kDeltaThreads)
      s.beta[i] = i < chunk.n ? p.beta(chunk.start + i, head) : 0.0F;
  }

  // The unit's elements into an operand.
  __device__ void store_unit(T* to, Unit& unit) const {
    for_each_pair(unit, unit_row, unit_column, [&](int row, int column, const float(&value)[2]) {
      for (int e = 0; e < 2; ++e) to[row * ScanMemory<T>::kOperandRow + column + e] = from_f32<T>(value[e]);
    });
  }
  // ... and into rows of a tensor [N, HV, V], times `factor`.
  __device__ void store_unit(const Rows<T>& to, Unit& unit, const ChunkList::Chunk& chunk, float factor) const {
    if (to.data == nullptr) return;
    for_each_pair(unit, unit_row, unit_column, [&](int row, int column, const float(&value)[2]) {
      if (row >= chunk.n) return;
      T* values = to[chunk.start + row] + head * p.V + first_value;
      for (int e = 0; e < 2; ++e)
        if (first_value + column + e < p.V) values[column + e] = from_f32<T>(factor * value[e]);
    });
  }

  // Calls body(row, column) with the first row and column of each unit of the state that this warp updates.
  template <class Body>
  __device__ void for_each_state_unit(Body body) const {
    for (int unit = static_cast<int>(threadIdx.x) / kWarp; unit < Kp / kUnitRows * kUnits;
         unit += kDeltaThreads / kWarp)
      body(unit / kUnits * kUnitRows, unit % kUnits * kUnitColumns);
  }
};

// Which user tensors have rows that move in packs.
struct Packed {
  bool values, matrices;
};

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_rule_scan_kernel(const __grid_constant__ DeltaProblem<T> p, const __grid_constant__ ScanOutputs<T> out,
                           Packed packed) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Memory = ScanMemory<T>;
  Scan<T> scan(p, shared);
  Memory& s = scan.s;
  const int rows = scan.rows, Kp = scan.Kp;
  constexpr int kRow = Memory::kOperandRow;
  const float* initial =
      p.initial_state == nullptr ? nullptr : p.initial_state + (scan.document * p.HV + scan.head) * p.state_size();
  scan.load_state(initial);
  const int64_t num_chunks = ceil_div(p.chunks.documents.length(scan.document), p.chunks.C);
  for (int64_t number = 0; number < num_chunks; ++number) {
    const ChunkList::Chunk chunk = p.chunks.at(scan.document, number);
    __syncthreads();
    if (number > 0 && out.states != nullptr)
      scan.store_state(scan.head_state(out.states, p.chunks.state_slot(chunk, number)));
    if (p.delta) {
      scan.load_keys(s.keys, p.Kb, chunk);
      scan.load_matrix(s.m, p.m, chunk, packed.matrices);
    }
    scan.load_keys(s.queries, p.Qb, chunk);
    scan.load_matrix(s.aqk, p.aqk, chunk, packed.matrices);
    scan.load_values(s.values, p.v, chunk, packed.values);
    scan.load_numbers(chunk);
    __syncthreads();
    // 1. bR = diag(beta) (V - Kb S), in the place of V
    Unit x;
    if (scan.owns_unit && p.delta) {
      multiply<Along::kRow, Along::kColumn>(x, s.keys + scan.unit_row * s.key_row, s.key_row,
                                            s.state_operand + scan.unit_column, kRow, Kp);
      for_each_pair(x, scan.unit_row, scan.unit_column, [&](int row, int column, float(&value)[2]) {
        T* v = s.values + row * kRow + column;
        for (int e = 0; e < 2; ++e) {
          value[e] = s.beta[row] * (to_f32(v[e]) - value[e]);
          v[e] = from_f32<T>(value[e]);
        }
      });
    }
    __syncthreads();
    // 2. X = bR + (M - I) bR; without the delta rule V
    scan.load_keys(s.keys, p.Kt, chunk);
    if (scan.owns_unit && p.delta) {
      multiply<Along::kRow, Along::kColumn>(x, s.m + scan.unit_row * s.chunk_row, s.chunk_row,
                                            s.values + scan.unit_column, kRow, rows);
      scan.store_unit(s.results, x);
      scan.store_unit(out.x, x, chunk, 1.0F);
    } else if (scan.owns_unit) {
      for_each_pair(x, scan.unit_row, scan.unit_column, [&](int row, int column, float(&value)[2]) {
        for (int e = 0; e < 2; ++e) value[e] = to_f32(s.values[row * kRow + column + e]);
      });
      scan.store_unit(s.results, x);
      scan.store_unit(out.x, x, chunk, 1.0F);
    }
    __syncthreads();
    // 3. O = scale (Qb S + Aqk X)
    if (scan.owns_unit && out.o.data != nullptr) {
      Unit o;
      multiply<Along::kRow, Along::kColumn>(o, s.queries + scan.unit_row * s.key_row, s.key_row,
                                            s.state_operand + scan.unit_column, kRow, Kp);
      multiply<Along::kRow, Along::kColumn>(o, s.aqk + scan.unit_row * s.chunk_row, s.chunk_row,
                                            s.results + scan.unit_column, kRow, rows);
      scan.store_unit(out.o, o, chunk, p.scale);
    }
    __syncthreads();
    // 4. S = Diag(exp G_C) S + Kt^T X
    scan.for_each_state_unit([&](int first_row, int first_column) {
      Unit update;
      multiply<Along::kColumn, Along::kColumn>(update, s.keys + first_row, s.key_row, s.results + first_column, kRow,
                                               rows);
      for_each_pair(update, first_row, first_column, [&](int row, int column, const float(&value)[2]) {
        for (int e = 0; e < 2; ++e)
          s.set(row, column + e, s.decay[row] * s.state[row * Memory::kStateRow + column + e] + value[e]);
      });
    });
  }
  __syncthreads();
  scan.store_state(scan.head_state(out.final_state, scan.document));
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_rule_reverse_kernel(const __grid_constant__ DeltaProblem<T> p, const __grid_constant__ ReverseScan<T> r,
                              Packed packed) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Memory = ScanMemory<T>;
  Scan<T> scan(p, shared);
  Memory& s = scan.s;
  const int rows = scan.rows, Kp = scan.Kp;
  constexpr int kRow = Memory::kOperandRow;
  const float* d_final =
      r.d_final_state == nullptr ? nullptr : r.d_final_state + (scan.document * p.HV + scan.head) * p.state_size();
  scan.load_state(d_final);
  const int64_t num_chunks = ceil_div(p.chunks.documents.length(scan.document), p.chunks.C);
  for (int64_t number = num_chunks - 1; number >= 0; --number) {
    const ChunkList::Chunk chunk = p.chunks.at(scan.document, number);
    __syncthreads();
    if (!chunk.last) scan.store_state(scan.head_state(r.d_states, p.chunks.state_slot(chunk, number + 1)));
    scan.load_keys(s.keys, p.Kt, chunk);
    scan.load_keys(s.queries, p.Qb, chunk);
    if (p.delta) scan.load_matrix(s.m, p.m, chunk, packed.matrices);
    scan.load_matrix(s.aqk, p.aqk, chunk, packed.matrices);
    scan.load_values(s.values, r.d_o, chunk, packed.values);
    scan.load_numbers(chunk);
    __syncthreads();
    // 1. dX = scale Aqk^T dO + Kt dS
    Unit y;
    if (scan.owns_unit) {
      multiply<Along::kColumn, Along::kColumn>(y, s.aqk + scan.unit_row, s.chunk_row, s.values + scan.unit_column, kRow,
                                               rows);
      for_each_pair(y, 0, 0, [&](int, int, float(&value)[2]) {
        value[0] *= p.scale;
        value[1] *= p.scale;
      });
      multiply<Along::kRow, Along::kColumn>(y, s.keys + scan.unit_row * s.key_row, s.key_row,
                                            s.state_operand + scan.unit_column, kRow, Kp);
      scan.store_unit(s.results, y);
    }
    __syncthreads();
    // 2. Y = dX + (M - I)^T dX;  dR = diag(beta) Y = dV;  the share of dbeta
    if (p.delta) {
      scan.load_keys(s.keys, p.Kb, chunk);
      if (scan.owns_unit) {
        multiply<Along::kColumn, Along::kColumn>(y, s.m + scan.unit_row, s.chunk_row, s.results + scan.unit_column,
                                                 kRow, rows);
        float dot[2] = {};  // of the lane's two rows
#pragma unroll
        for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = scan.unit_row + Unit::row(pair);
            const int64_t at = scan.first_value + scan.unit_column + Unit::column(pair) + e;
            if (row < chunk.n && at < p.V)
              dot[pair % 2] += y.value[pair][e] * to_f32(p.x[chunk.start + row][scan.head * p.V + at]);
            y.value[pair][e] *= s.beta[row];
          }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          dot[half] += __shfl_xor_sync(kAllLanes, dot[half], 1);
          dot[half] += __shfl_xor_sync(kAllLanes, dot[half], 2);
          const int row = scan.unit_row + Unit::row(half);
          const int64_t share = (scan.first_value + scan.unit_column) / kUnitColumns;
          if (Unit::column(0) == 0 && row < chunk.n && share < ceil_div(p.V, kUnitColumns))
            r.dbeta_shares[(share * p.N + chunk.start + row) * p.HV + scan.head] = dot[half];
        }
      }
      __syncthreads();
      if (scan.owns_unit) scan.store_unit(s.results, y);
    }
    if (scan.owns_unit) scan.store_unit(r.dv, y, chunk, 1.0F);
    __syncthreads();
    // 3. dS = Diag(exp G_C) dS + scale Qb^T dO - Kb^T dR
    scan.for_each_state_unit([&](int first_row, int first_column) {
      Unit read, write;
      multiply<Along::kColumn, Along::kColumn>(read, s.queries + first_row, s.key_row, s.values + first_column, kRow,
                                               rows);
      if (p.delta)
        multiply<Along::kColumn, Along::kColumn>(write, s.keys + first_row, s.key_row, s.results + first_column, kRow,
                                                 rows);
#pragma unroll
      for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = first_row + Unit::row(pair), column = first_column + Unit::column(pair) + e;
          s.set(row, column,
                s.decay[row] * s.state[row * Memory::kStateRow + column] + p.scale * read.value[pair][e] -
                    write.value[pair][e]);
        }
    });
  }
  __syncthreads();
  scan.store_state(scan.head_state(r.d_initial, scan.document));
}

template <class T>
LaunchShape scan_shape(const DeltaProblem<T>& p) {
  return {.grid_x = p.chunks.documents.count * p.HV * ceil_div(p.V, kValueTile<T>),
          .threads = kDeltaThreads,
          .shared_bytes = ScanMemory<T>::bytes(p.Kp, p.chunks.rows)};
}

}  // namespace

template <class T>
void launch_scan(const Stream& stream, const DeltaProblem<T>& p, const ScanOutputs<T>& out) {
  const Packed packed = {packed_rows(p.v, p.V), packed_rows(p.aqk, p.chunks.C) && packed_rows(p.m, p.chunks.C)};
  launch(stream, delta_rule_scan_kernel<T>, scan_shape(p), p, out, packed);
}

template <class T>
void launch_reverse_scan(const Stream& stream, const DeltaProblem<T>& p, const ReverseScan<T>& r) {
  const Packed packed = {packed_rows(r.d_o, p.V), packed_rows(p.aqk, p.chunks.C) && packed_rows(p.m, p.chunks.C)};
  launch(stream, delta_rule_reverse_kernel<T>, scan_shape(p), p, r, packed);
}

template void launch_scan(const Stream&, const DeltaProblem<float>&, const ScanOutputs<float>&);
template void launch_scan(const Stream&, const DeltaProblem<bf16>&, const ScanOutputs<bf16>&);
template void launch_reverse_scan(const Stream&, const DeltaProblem<float>&, const ReverseScan<float>&);
template void launch_reverse_scan(const Stream&, const DeltaProblem<bf16>&, const ReverseScan<bf16>&);

}  // namespace palimpsest::cuda
