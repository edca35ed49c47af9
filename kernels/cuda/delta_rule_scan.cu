// The delta rule's scans over the chunks of a document, forward and in reverse.
//
// Grid: documents x value heads x tiles of V. A warp owns one unit of the [C, V tile] results and kStateUnits units of
// the state S (reverse: of its cotangent dS), all f32 in its registers; a rounded copy of the state lies in shared
// memory as an operand. What a chunk reads, Kb, Qb, Kt [C, K], M - I, Aqk [C, C] and rows of values [C, V tile], is
// copied there asynchronously: with two stages while the chunk before it is worked on, with one stage before it, and
// then Kb and Kt take turns in one place.
#include "kernels/cuda/delta_rule.cuh"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

namespace {

template <class T>
struct Stage {
  T *first_keys, *second_keys, *queries;  // [rows, key_row]: the keys used first and last in a chunk
  T *m, *aqk;                             // [rows, chunk_row]
  T *values, *x;                          // [rows, kRow]
  float *decay, *beta;                    // [Kp], [rows]
};

enum class Direction : uint8_t { kForward, kReverse };

// Shared memory of a scan.
template <class T, int kStages, Direction kDirection>
struct ScanMemory {
  static constexpr int kV = kValueTile<T>, kRow = kV + kRowPad<T>;
  static constexpr int kKeys = kStages == 1 ? 1 : 2;
  static constexpr bool kHasX = kDirection == Direction::kReverse && kStages > 1;  // else x is read where it lies
  T* state;                                                                        // [Kp, kRow]
  T* results;                                                                      // [rows, kRow]
  T* stages;
  int key_row, chunk_row, keys, matrix, values, stage_size;  // elements of T

  __host__ __device__ static int64_t stage_elements(int64_t Kp, int64_t rows) {
    return (1 + kKeys) * rows * (Kp + kRowPad<T>)+2 * rows * (rows + kRowPad<T>)+(kHasX ? 2 : 1) * rows * kRow +
           (Kp + rows) * static_cast<int64_t>(sizeof(float) / sizeof(T));
  }
  __host__ __device__ static int64_t bytes(int64_t Kp, int64_t rows) {
    return ((Kp + rows) * kRow + kStages * stage_elements(Kp, rows)) * static_cast<int64_t>(sizeof(T));
  }
  __device__ ScanMemory(unsigned char* shared, int Kp, int rows)
      : state(reinterpret_cast<T*>(shared)),
        results(state + Kp * kRow),
        stages(results + rows * kRow),
        key_row(Kp + kRowPad<T>),
        chunk_row(rows + kRowPad<T>),
        keys(rows * key_row),
        matrix(rows * chunk_row),
        values(rows * kRow),
        stage_size(static_cast<int>(stage_elements(Kp, rows))),
        decay_size_(Kp) {}
  __device__ Stage<T> stage(int64_t i) const {
    T* at = stages + i % kStages * stage_size;
    Stage<T> stage;
    stage.first_keys = at;
    stage.second_keys = kKeys == 1 ? at : at + keys;
    stage.queries = at + kKeys * keys;
    stage.m = stage.queries + keys;
    stage.aqk = stage.m + matrix;
    stage.values = stage.aqk + matrix;
    stage.x = stage.values + values;  // where kHasX
    stage.decay = reinterpret_cast<float*>(stage.values + (kHasX ? 2 : 1) * values);
    stage.beta = stage.decay + decay_size_;
    return stage;
  }

 private:
  int decay_size_;
};

// Which tensors have rows that move in packs.
struct Packed {
  bool values, x, m, aqk;
};

// What both scans do alike. Direction-specific operands: forward keys are Kb then Kt, values are V; reverse Kt then Kb,
// and dO.
template <class T, int kStages, int kStateUnits, Direction kDirection>
struct Scan {
  using Memory = ScanMemory<T, kStages, kDirection>;
  static constexpr bool kIsForward = kDirection == Direction::kForward;
  static constexpr int kV = Memory::kV, kRow = Memory::kRow, kUnits = kV / kUnitColumns;
  static constexpr int kWarps = kDeltaThreads / kWarp;

  const DeltaProblem<T>& p;
  const Rows<T>& values;
  Packed packed;
  Memory s;
  int64_t document, head, first_value;  // of the tile
  int rows, Kp, warp, unit_row, unit_column;
  bool owns_unit;
  Unit state[kStateUnits];

  __device__ Scan(const DeltaProblem<T>& problem, const Rows<T>& value_rows, Packed packed_rows_of,
                  unsigned char* shared)
      : p(problem),
        values(value_rows),
        packed(packed_rows_of),
        s(shared, static_cast<int>(problem.Kp), problem.chunks.rows),
        rows(problem.chunks.rows),
        Kp(static_cast<int>(problem.Kp)),
        warp(static_cast<int>(threadIdx.x) / kWarp) {
    const int64_t tiles = ceil_div(p.V, kV);
    first_value = blockIdx.x % tiles * kV;
    head = blockIdx.x / tiles % p.HV;
    document = blockIdx.x / tiles / p.HV;
    unit_row = warp / kUnits * kUnitRows;
    unit_column = warp % kUnits * kUnitColumns;
    owns_unit = unit_row < rows;
  }

  // This head's [K, V] in a tensor of states, or null.
  template <class Float>
  __device__ Float* head_state(Float* states, int64_t index) const {
    return states == nullptr || index < 0 ? nullptr : states + (index * p.HV + head) * p.state_size();
  }

  // Calls body(unit, row, column) for the units of the state that this warp owns.
  template <class Body>
  __device__ void for_each_state_unit(Body body) {
#pragma unroll
    for (int i = 0; i < kStateUnits; ++i) {
      const int unit = warp + i * kWarps;
      if (unit < Kp / kUnitRows * kUnits) body(state[i], unit / kUnits * kUnitRows, unit % kUnits * kUnitColumns);
    }
  }
  // The rounded copy of a unit.
  __device__ void publish(Unit& unit, int first_row, int first_column) const {
    for_each_pair(unit, first_row, first_column, [&](int row, int column, const float(&value)[2]) {
      for (int e = 0; e < 2; ++e) s.state[row * kRow + column + e] = from_f32<T>(value[e]);
    });
  }
  // The state from memory, zero for null and beyond K and V.
  __device__ void load_state(const float* from) {
    for_each_state_unit([&](Unit& unit, int first_row, int first_column) {
      for_each_pair(unit, first_row, first_column, [&](int row, int column, float(&value)[2]) {
        for (int e = 0; e < 2; ++e) {
          const int64_t at = first_value + column + e;
          value[e] = from != nullptr && row < p.K && at < p.V ? from[row * p.V + at] : 0.0F;
        }
      });
      publish(unit, first_row, first_column);
    });
  }
  __device__ void store_state(float* to) {
    if (to == nullptr) return;
    for_each_state_unit([&](Unit& unit, int first_row, int first_column) {
      for_each_pair(unit, first_row, first_column, [&](int row, int column, const float(&value)[2]) {
        for (int e = 0; e < 2; ++e) {
          const int64_t at = first_value + column + e;
          if (row < p.K && at < p.V) to[row * p.V + at] = value[e];
        }
      });
    });
  }

  __device__ void copy_keys(T* to, const T* from, const ChunkList::Chunk& chunk) const {
    load_tile(to, s.key_row, rows, Kp, from + (chunk.start * p.HV + head) * p.Kp, p.HV * p.Kp, chunk.n, p.Kp, true);
  }
  __device__ void copy_matrix(T* to, const Rows<T>& from, const ChunkList::Chunk& chunk, bool is_packed) const {
    load_tile(to, s.chunk_row, rows, rows, from[chunk.start] + head * p.chunks.C, from.stride, chunk.n, p.chunks.C,
              is_packed);
  }
  __device__ void copy_values(T* to, const Rows<T>& from, const ChunkList::Chunk& chunk, bool is_packed) const {
    load_tile(to, kRow, rows, kV, from[chunk.start] + head * p.V + first_value, from.stride, chunk.n, p.V - first_value,
              is_packed);
  }
  // The keys of the second part of a chunk.
  __device__ void copy_second_keys(const Stage<T>& stage, const ChunkList::Chunk& chunk) const {
    if (kIsForward || p.delta) copy_keys(stage.second_keys, kIsForward ? p.Kt : p.Kb, chunk);
  }
  __device__ float x_at(const Stage<T>& stage, const ChunkList::Chunk& chunk, int row, int column) const {
    if constexpr (Memory::kHasX) return to_f32(stage.x[row * kRow + column]);
    const int64_t at = first_value + column;
    return row < chunk.n && at < p.V ? to_f32(p.x[chunk.start + row][head * p.V + at]) : 0.0F;
  }
  // Starts the copies of a chunk: one group.
  __device__ void start_copies(const Stage<T>& stage, int64_t number) const {
    const ChunkList::Chunk chunk = p.chunks.at(document, number);
    if (!kIsForward || p.delta) copy_keys(stage.first_keys, kIsForward ? p.Kb : p.Kt, chunk);
    if (kStages > 1) copy_second_keys(stage, chunk);
    copy_keys(stage.queries, p.Qb, chunk);
    if (p.delta) copy_matrix(stage.m, p.m, chunk, packed.m);
    copy_matrix(stage.aqk, p.aqk, chunk, packed.aqk);
    copy_values(stage.values, values, chunk, packed.values);
    if (Memory::kHasX && p.delta) copy_values(stage.x, p.x, chunk, packed.x);
    const float* decay = p.chunk_decay + (p.decay_slot(chunk) * p.HV + head) * p.Kp;
    for (int i = static_cast<int>(threadIdx.x); i < Kp; i += kDeltaThreads)
      copy_async(stage.decay + i, decay + i, true);
    for (int i = static_cast<int>(threadIdx.x); i < rows; i += kDeltaThreads) {
      const bool inside = i < chunk.n;
      copy_async(stage.beta + i, p.betas + (inside ? (chunk.start + i) * p.HV + head : 0), inside);
    }
    commit_copies();
  }
  // Calls body(stage, chunk) for every chunk in order, with its operands there.
  template <class Body>
  __device__ void for_each_chunk(Body body) {
    const int64_t num_chunks = ceil_div(p.chunks.documents.length(document), p.chunks.C);
    const auto number_at = [&](int64_t i) { return kIsForward ? i : num_chunks - 1 - i; };
    if (kStages > 1 && num_chunks > 0) start_copies(s.stage(0), number_at(0));
    for (int64_t i = 0; i < num_chunks; ++i) {
      const Stage<T> stage = s.stage(i);
      __syncthreads();  // nobody reads what is written over now
      if (kStages == 1) {
        start_copies(stage, number_at(i));
        wait_for_copies();
      } else if (i + 1 < num_chunks) {
        start_copies(s.stage(i + 1), number_at(i + 1));
        wait_for_copies<1>();
      } else {
        wait_for_copies();
      }
      __syncthreads();
      body(stage, p.chunks.at(document, number_at(i)));
    }
    __syncthreads();
  }
  // With one stage: the second keys in the place of the first, which everybody is done with.
  __device__ void exchange_keys(const Stage<T>& stage, const ChunkList::Chunk& chunk) const {
    if (kStages > 1) return;
    copy_second_keys(stage, chunk);
    commit_copies();
    wait_for_copies();
  }

  // The unit's elements into an operand.
  __device__ void store_unit(T* to, Unit& unit) const {
    for_each_pair(unit, unit_row, unit_column, [&](int row, int column, const float(&value)[2]) {
      for (int e = 0; e < 2; ++e) to[row * kRow + column + e] = from_f32<T>(value[e]);
    });
  }
  // ... and into rows of a tensor [N, HV, V], times `factor`.
  __device__ void store_unit(const Rows<T>& to, Unit& unit, const ChunkList::Chunk& chunk, float factor) const {
    if (to.data == nullptr) return;
    for_each_pair(unit, unit_row, unit_column, [&](int row, int column, const float(&value)[2]) {
      if (row >= chunk.n) return;
      T* at = to[chunk.start + row] + head * p.V + first_value;
      for (int e = 0; e < 2; ++e)
        if (first_value + column + e < p.V) at[column + e] = from_f32<T>(factor * value[e]);
    });
  }
};

template <class T, int kStages, int kStateUnits>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_rule_scan_kernel(const __grid_constant__ DeltaProblem<T> p, const __grid_constant__ ScanOutputs<T> out,
                           Packed packed) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Forward = Scan<T, kStages, kStateUnits, Direction::kForward>;
  constexpr int kRow = Forward::kRow;
  Forward scan(p, p.v, packed, shared);
  const auto& s = scan.s;
  const int row = scan.unit_row, column = scan.unit_column, rows = scan.rows;
  scan.load_state(scan.head_state(p.initial_state, p.chunks.documents.entering(scan.document)));
  scan.for_each_chunk([&](const Stage<T>& stage, const ChunkList::Chunk& chunk) {
    if (chunk.number > 0 && out.states != nullptr)
      scan.store_state(scan.head_state(out.states, p.chunks.state_slot(chunk, chunk.number)));
    // 1. bR = diag(beta) (V - Kb S), in the place of V
    Unit x;
    if (scan.owns_unit && p.delta) {
      multiply<Along::kRow, Along::kColumn>(x, stage.first_keys + row * s.key_row, s.key_row, s.state + column, kRow,
                                            scan.Kp);
      for_each_pair(x, row, column, [&](int i, int j, float(&value)[2]) {
        T* v = stage.values + i * kRow + j;
        for (int e = 0; e < 2; ++e) {
          value[e] = stage.beta[i] * (to_f32(v[e]) - value[e]);
          v[e] = from_f32<T>(value[e]);
        }
      });
    }
    __syncthreads();
    // 2. X = bR + (M - I) bR; without the delta rule V
    if (scan.owns_unit) {
      if (p.delta)
        multiply<Along::kRow, Along::kColumn>(x, stage.m + row * s.chunk_row, s.chunk_row, stage.values + column, kRow,
                                              rows);
      else
        for_each_pair(x, row, column, [&](int i, int j, float(&value)[2]) {
          for (int e = 0; e < 2; ++e) value[e] = to_f32(stage.values[i * kRow + j + e]);
        });
      scan.store_unit(s.results, x);
      scan.store_unit(out.x, x, chunk, 1.0F);
    }
    scan.exchange_keys(stage, chunk);
    __syncthreads();
    // 3. O = scale (Qb S + Aqk X)
    if (scan.owns_unit && out.o.data != nullptr) {
      Unit o;
      multiply<Along::kRow, Along::kColumn>(o, stage.queries + row * s.key_row, s.key_row, s.state + column, kRow,
                                            scan.Kp);
      multiply<Along::kRow, Along::kColumn>(o, stage.aqk + row * s.chunk_row, s.chunk_row, s.results + column, kRow,
                                            rows);
      scan.store_unit(out.o, o, chunk, p.scale);
    }
    // 4. S = Diag(exp G_C) S + Kt^T X
    scan.for_each_state_unit([&](Unit& unit, int first_row, int first_column) {
      for_each_pair(unit, first_row, first_column, [&](int i, int, float(&value)[2]) {
        value[0] *= stage.decay[i];
        value[1] *= stage.decay[i];
      });
      multiply<Along::kColumn, Along::kColumn>(unit, stage.second_keys + first_row, s.key_row, s.results + first_column,
                                               kRow, rows);
    });
    __syncthreads();  // the old state has been read
    scan.for_each_state_unit(
        [&](Unit& unit, int first_row, int first_column) { scan.publish(unit, first_row, first_column); });
  });
  scan.store_state(scan.head_state(out.final_state, p.chunks.documents.leaving(scan.document)));
}

template <class T, int kStages, int kStateUnits>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_rule_reverse_kernel(const __grid_constant__ DeltaProblem<T> p, const __grid_constant__ ReverseScan<T> r,
                              Packed packed) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Reverse = Scan<T, kStages, kStateUnits, Direction::kReverse>;
  constexpr int kRow = Reverse::kRow;
  Reverse scan(p, r.d_o, packed, shared);
  const auto& s = scan.s;
  const int row = scan.unit_row, column = scan.unit_column, rows = scan.rows;
  scan.load_state(scan.head_state(r.d_final_state, p.chunks.documents.leaving(scan.document)));
  scan.for_each_chunk([&](const Stage<T>& stage, const ChunkList::Chunk& chunk) {
    if (!chunk.last) scan.store_state(scan.head_state(r.d_states, p.chunks.state_slot(chunk, chunk.number + 1)));
    // 1. dX = scale Aqk^T dO + Kt dS
    Unit y;
    if (scan.owns_unit) {
      multiply<Along::kColumn, Along::kColumn>(y, stage.aqk + row, s.chunk_row, stage.values + column, kRow, rows);
      for_each_pair(y, 0, 0, [&](int, int, float(&value)[2]) {
        value[0] *= p.scale;
        value[1] *= p.scale;
      });
      multiply<Along::kRow, Along::kColumn>(y, stage.first_keys + row * s.key_row, s.key_row, s.state + column, kRow,
                                            scan.Kp);
      scan.store_unit(s.results, y);
    }
    __syncthreads();
    // 2. Y = dX + (M - I)^T dX;  dR = diag(beta) Y = dV;  the share of dbeta
    if (p.delta) {
      scan.exchange_keys(stage, chunk);
      if (scan.owns_unit) {
        multiply<Along::kColumn, Along::kColumn>(y, stage.m + row, s.chunk_row, s.results + column, kRow, rows);
        float dot[2] = {};  // of the lane's two rows
#pragma unroll
        for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = row + Unit::row(pair);
            dot[pair % 2] += y.value[pair][e] * scan.x_at(stage, chunk, i, column + Unit::column(pair) + e);
            y.value[pair][e] *= stage.beta[i];
          }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          dot[half] += __shfl_xor_sync(kAllLanes, dot[half], 1);
          dot[half] += __shfl_xor_sync(kAllLanes, dot[half], 2);
          const int i = row + Unit::row(half);
          const int64_t share = (scan.first_value + column) / kUnitColumns;
          if (Unit::column(0) == 0 && i < chunk.n && share < ceil_div(p.V, kUnitColumns))
            r.dbeta_shares[(share * p.N + chunk.start + i) * p.HV + scan.head] = dot[half];
        }
      }
      __syncthreads();
      if (scan.owns_unit) scan.store_unit(s.results, y);
    }
    if (scan.owns_unit) scan.store_unit(r.dv, y, chunk, 1.0F);
    __syncthreads();
    // 3. dS = Diag(exp G_C) dS + scale Qb^T dO - Kb^T dR
    scan.for_each_state_unit([&](Unit& unit, int first_row, int first_column) {
      Unit read, write;
      multiply<Along::kColumn, Along::kColumn>(read, stage.queries + first_row, s.key_row, stage.values + first_column,
                                               kRow, rows);
      if (p.delta)
        multiply<Along::kColumn, Along::kColumn>(write, stage.second_keys + first_row, s.key_row,
                                                 s.results + first_column, kRow, rows);
#pragma unroll
      for (int pair = 0; pair < Unit::kPairs; ++pair)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          unit.value[pair][e] = stage.decay[first_row + Unit::row(pair)] * unit.value[pair][e] +
                                p.scale * read.value[pair][e] - write.value[pair][e];
      scan.publish(unit, first_row, first_column);
    });
  });
  scan.store_state(scan.head_state(r.d_initial, p.chunks.documents.entering(scan.document)));
}

// Two stages where they fit: bf16 with keys of at most 128.
constexpr int64_t kStagedKeys = 128;
constexpr int kWarps = kDeltaThreads / kWarp;

constexpr int state_units(int64_t Kp, int value_tile) {
  return static_cast<int>(Kp / kUnitRows * (value_tile / kUnitColumns) + kWarps - 1) / kWarps;
}

template <class T, int kStages, Direction kDirection>
LaunchShape scan_shape(const DeltaProblem<T>& p) {
  return {.grid_x = p.chunks.documents.count * p.HV * ceil_div(p.V, kValueTile<T>),
          .threads = kDeltaThreads,
          .shared_bytes = ScanMemory<T, kStages, kDirection>::bytes(p.Kp, p.chunks.rows)};
}

template <class T>
Packed packed_tensors(const DeltaProblem<T>& p, const Rows<T>& values) {
  return {packed_rows(values, p.V), packed_rows(p.x, p.V), packed_rows(p.m, p.chunks.C),
          packed_rows(p.aqk, p.chunks.C)};
}

}  // namespace

template <class T>
void launch_scan(const Stream& stream, const DeltaProblem<T>& p, const ScanOutputs<T>& out) {
  constexpr int kMost = state_units(kMaxKeySize, kValueTile<T>);
  const Packed packed = packed_tensors(p, p.v);
  if constexpr (std::is_same_v<T, bf16>) {
    if (p.Kp <= kStagedKeys) {
      launch(stream, delta_rule_scan_kernel<T, 2, state_units(kStagedKeys, kValueTile<T>)>,
             scan_shape<T, 2, Direction::kForward>(p), p, out, packed);
      return;
    }
  }
  launch(stream, delta_rule_scan_kernel<T, 1, kMost>, scan_shape<T, 1, Direction::kForward>(p), p, out, packed);
}

template <class T>
void launch_reverse_scan(const Stream& stream, const DeltaProblem<T>& p, const ReverseScan<T>& r) {
  constexpr int kMost = state_units(kMaxKeySize, kValueTile<T>);
  const Packed packed = packed_tensors(p, r.d_o);
  if constexpr (std::is_same_v<T, bf16>) {
    if (p.Kp <= kStagedKeys) {
      launch(stream, delta_rule_reverse_kernel<T, 2, state_units(kStagedKeys, kValueTile<T>)>,
             scan_shape<T, 2, Direction::kReverse>(p), p, r, packed);
      return;
    }
  }
  launch(stream, delta_rule_reverse_kernel<T, 1, kMost>, scan_shape<T, 1, Direction::kReverse>(p), p, r, packed);
}

template void launch_scan(const Stream&, const DeltaProblem<float>&, const ScanOutputs<float>&);
template void launch_scan(const Stream&, const DeltaProblem<bf16>&, const ScanOutputs<bf16>&);
template void launch_reverse_scan(const Stream&, const DeltaProblem<float>&, const ReverseScan<float>&);
template void launch_reverse_scan(const Stream&, const DeltaProblem<bf16>&, const ReverseScan<bf16>&);

}  // namespace palimpsest::cuda
