// RMSNorm and its gated kind. A warp takes a row (one head of one token), its lanes packs of neighbours. The gated norm
// of bf16 has kernels of its own: its rows are so short that kLanes lanes take one, and they load several ahead.
//
// With n = x * rstd and dn = dy * w:   dx = rstd * (dn - n * mean(dn * n)),   dw = sum over tokens of dy * n.
// The gated norm has y = w * n * phi(z), so dn = dy * w * phi(z), dw gains phi(z), and dz = dy * w * n * phi'(z).
// dw: every warp sums its rows in shared memory, the block's warps are added into a row of `sums`, and these at last.
#include "kernels/rms_norm.h"

#include <algorithm>
#include <limits>

#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kProcessors = 132;  // of an H200
// Of backward, whose blocks go through many rows each: as many as there is room for at a time.
constexpr int kSumBlocks = 3 * kProcessors, kHeldBlocks = 2 * kProcessors;

struct NormShape {
  explicit NormShape(const Tensor& x) : N(x.dim(0)), H(x.num_dims() == 3 ? x.dim(1) : 1), D(x.dim(-1)) {
    CHECK(num_rows() <= std::numeric_limits<int>::max(), "norm of ", num_rows(), " rows");
  }
  __host__ __device__ int64_t num_rows() const { return N * H; }
  int64_t N, H, D;
};

// Row r of [N, H, D]: head r % H of token r / H.
template <class T>
__device__ inline T* head_row(const Rows<T>& rows, const NormShape& shape, int64_t r) {
  const int row = static_cast<int>(r), H = static_cast<int>(shape.H);
  return rows[row / H] + row % H * shape.D;
}

// phi(z) and phi'(z), of z and open = sigmoid(z).
template <GateActivation kActivation>
__device__ inline float gate_of(float z, float open) {
  return kActivation == GateActivation::kSigmoid ? open : z * open;
}
template <GateActivation kActivation>
__device__ inline float gate_slope(float z, float open) {
  return kActivation == GateActivation::kSigmoid ? open * (1.0F - open) : open * (1.0F + z * (1.0F - open));
}

// The plain norm reads no z.
struct NoGate {
  static constexpr bool kGated = false;
};
template <GateActivation kKind>
struct Gated {
  static constexpr bool kGated = true;
  static constexpr GateActivation kActivation = kKind;
};

// R: the type of x, where that is the residual stream. At most one of kept and rounded is there: a copy of x.
template <int kPack, class T, class R, class Gate>
__global__ void norm_fwd_kernel(NormShape shape, Rows<T> y, float* rstd, Rows<R> x, Rows<T> z, const float* w,
                                float centre, float eps, Rows<R> kept, Rows<T> rounded) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t r = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (r >= shape.num_rows()) return;
  const R* from = head_row(x, shape, r);
  float square = 0.0F;
  for (int64_t i = lane * kPack; i < shape.D; i += kWarp * kPack) {
    float value[kPack];
    load(from + i, value);
#pragma unroll
    for (int c = 0; c < kPack; ++c) square += value[c] * value[c];
  }
  const float factor = 1.0F / sqrtf(warp_sum(square) / static_cast<float>(shape.D) + eps);
  if (lane == 0) rstd[r] = factor;
  T* to = head_row(y, shape, r);
  for (int64_t i = lane * kPack; i < shape.D; i += kWarp * kPack) {
    float value[kPack], weight[kPack];
    load(from + i, value);
    load(w + i, weight);
    if constexpr (!Gate::kGated) {
      if (kept.data != nullptr) store(head_row(kept, shape, r) + i, value);
      if (rounded.data != nullptr) store(head_row(rounded, shape, r) + i, value);
    }
#pragma unroll
    for (int c = 0; c < kPack; ++c) value[c] = (weight[c] + centre) * (value[c] * factor);
    if constexpr (Gate::kGated) {
      float gate[kPack];
      load(head_row(z, shape, r) + i, gate);
#pragma unroll
      for (int c = 0; c < kPack; ++c) value[c] *= gate_of<Gate::kActivation>(gate[c], sigmoid_for<T>(gate[c]));
    }
    store(to + i, value);
  }
}

// In bf16 rows of at most kHeldElements are read once and held in registers.
constexpr int kHeldPack = kWidestPack<bf16>, kHeldElements = 1024;
constexpr int kHeldChunks = kHeldElements / (kWarp * kHeldPack);  // packs of a lane

template <int kPack, int kChunks, class R>
__global__ __launch_bounds__(256) void norm_fwd_held_kernel(NormShape shape, Rows<bf16> y, float* rstd, Rows<R> x,
                                                            const float* w, float centre, float eps, Rows<R> kept,
                                                            Rows<bf16> rounded) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, D = static_cast<int>(shape.D);
  const int64_t r = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (r >= shape.num_rows()) return;
  const auto column = [&](int k) { return (k * kWarp + lane) * kPack; };
  const R* from = head_row(x, shape, r);
  Pack<kPack, R> values[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) values[k] = load_pack<kPack>(from + min(column(k), D - kPack));
  float square = 0.0F;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    float value[kPack];
    values[k].unpack(value);
#pragma unroll
    for (int c = 0; c < kPack; ++c) square += column(k) < D ? value[c] * value[c] : 0.0F;
  }
  const float factor = 1.0F / sqrtf(warp_sum(square) / static_cast<float>(D) + eps);
  if (lane == 0) rstd[r] = factor;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (column(k) >= D) continue;
    float value[kPack], weight[kPack];
    values[k].unpack(value);
    load(w + column(k), weight);
    if (kept.data != nullptr) store(head_row(kept, shape, r) + column(k), value);
    if (rounded.data != nullptr) store(head_row(rounded, shape, r) + column(k), value);
#pragma unroll
    for (int c = 0; c < kPack; ++c) value[c] = (weight[c] + centre) * (value[c] * factor);
    store(head_row(y, shape, r) + column(k), value);
  }
}

// A pack of 16 bytes of each row that a lane takes part in; rows are heads of at most kLanes packs.
constexpr int kShortPack = kWidestPack<bf16>;
constexpr int kShortRows = 4, kShortBackwardRows = 1;  // of a group of kLanes lanes at a time

// Where this lane is in the rows: a warp has kRows times as many neighbouring rows as it has groups of lanes.
template <int kLanes, int kRows>
struct ShortPlace {
  static constexpr int kRowsOfWarp = kWarp / kLanes * kRows;

  __device__ explicit ShortPlace(const NormShape& shape)
      : group(static_cast<int>(threadIdx.x) % kWarp / kLanes),
        column(static_cast<int>(threadIdx.x) % kLanes * kShortPack),
        inside(column < static_cast<int>(shape.D)),
        loaded(min(column, static_cast<int>(shape.D) - kShortPack)) {}
  __device__ int row(int first, int j) const { return first + j * (kWarp / kLanes) + group; }

  int group, column;
  bool inside;  // the row
  int loaded;   // column that is loaded: what lies beyond the row is not read
};

template <int kLanes, class Gate>
__global__ __launch_bounds__(256) void short_fwd_kernel(NormShape shape, Rows<bf16> y, float* rstd, Rows<bf16> x,
                                                        Rows<bf16> z, const float* w, float eps) {
  constexpr int kRows = kShortRows, kPack = kShortPack;
  const ShortPlace<kLanes, kRows> place(shape);
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / kWarp);
  const int first = warp * place.kRowsOfWarp, num_rows = static_cast<int>(shape.num_rows());
  Pack<kPack, bf16> values[kRows], gates[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int r = min(place.row(first, j), num_rows - 1);
    values[j] = load_pack<kPack>(head_row(x, shape, r) + place.loaded);
    gates[j] = load_pack<kPack>(head_row(z, shape, r) + place.loaded);
  }
  float weight[kPack];
  load(w + place.loaded, weight);
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int r = place.row(first, j);
    float value[kPack], gate[kPack], square = 0.0F;
    values[j].unpack(value);
    gates[j].unpack(gate);
#pragma unroll
    for (int c = 0; c < kPack; ++c) square += value[c] * value[c];
    square = warp_sum<kLanes>(place.inside ? square : 0.0F);
    const float factor = 1.0F / sqrtf(square / static_cast<float>(shape.D) + eps);
    if (r >= num_rows || !place.inside) continue;
    if (place.column == 0) rstd[r] = factor;
#pragma unroll
    for (int c = 0; c < kPack; ++c)
      value[c] = weight[c] * (value[c] * factor) * gate_of<Gate::kActivation>(gate[c], rough_sigmoid(gate[c]));
    store(head_row(y, shape, r) + place.column, value);
  }
}

// sums [blocks, D]: this block's row, of the sums [warps, D] of its warps.
__device__ inline void add_warp_sums(float* sums, const float* warp_sums, int64_t D) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < D; i += blockDim.x) {
    float sum = 0.0F;
    for (int other = 0; other < num_warps; ++other) sum += warp_sums[other * D + i];
    sums[static_cast<int64_t>(blockIdx.x) * D + i] = sum;
  }
}

// Shared memory: [warps, D] f32, the warps' sums of dw.
template <int kPack, class T, class R, class Gate>
__global__ void norm_bwd_kernel(NormShape shape, Rows<T> dx, Rows<T> dz, float* sums, Rows<T> dy, Rows<R> x, Rows<T> z,
                                const float* w, const float* rstd, float centre, Write write, Rows<T> y) {
  extern __shared__ float warp_sums[];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  const int64_t D = shape.D;
  float* own = warp_sums + warp * D;
  for (int64_t i = lane * kPack; i < D; i += kWarp * kPack)
    for (int c = 0; c < kPack; ++c) own[i + c] = 0.0F;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * num_warps + warp; r < shape.num_rows();
       r += static_cast<int64_t>(gridDim.x) * num_warps) {
    const R* from = head_row(x, shape, r);
    const T* gradient = head_row(dy, shape, r);
    const float factor = rstd[r];
    float dot = 0.0F;
    for (int64_t i = lane * kPack; i < D; i += kWarp * kPack) {
      float value[kPack], d[kPack], weight[kPack];
      load(from + i, value);
      load(gradient + i, d);
      load(w + i, weight);
      if constexpr (Gate::kGated) {
        float gate[kPack];
        load(head_row(z, shape, r) + i, gate);
#pragma unroll
        for (int c = 0; c < kPack; ++c) d[c] *= gate_of<Gate::kActivation>(gate[c], sigmoid_for<T>(gate[c]));
      }
#pragma unroll
      for (int c = 0; c < kPack; ++c) dot += d[c] * (weight[c] + centre) * value[c];
    }
    const float mean = warp_sum(dot) * factor / static_cast<float>(D);
    T* to = head_row(dx, shape, r);
    for (int64_t i = lane * kPack; i < D; i += kWarp * kPack) {
      float value[kPack], d[kPack], weight[kPack], result[kPack];
      load(from + i, value);
      load(gradient + i, d);
      load(w + i, weight);
#pragma unroll
      for (int c = 0; c < kPack; ++c) value[c] *= factor;
      if constexpr (Gate::kGated) {
        float gate[kPack], d_gate[kPack], again[kPack];
        load(head_row(z, shape, r) + i, gate);
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          const float open = sigmoid_for<T>(gate[c]), factor_of_gate = gate_of<Gate::kActivation>(gate[c], open);
          d_gate[c] = d[c] * weight[c] * value[c] * gate_slope<Gate::kActivation>(gate[c], open);
          d[c] *= factor_of_gate;
          again[c] = weight[c] * value[c] * factor_of_gate;
        }
        store(head_row(dz, shape, r) + i, d_gate);
        if (y.data != nullptr) store(head_row(y, shape, r) + i, again);
      }
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        own[i + c] += d[c] * value[c];
        result[c] = factor * (d[c] * (weight[c] + centre) - value[c] * mean);
      }
      if (write == Write::kAccumulate) {
        float old[kPack];
        load(to + i, old);
#pragma unroll
        for (int c = 0; c < kPack; ++c) result[c] += old[c];
      }
      store(to + i, result);
    }
  }
  add_warp_sums(sums, warp_sums, D);
}

// The same in bf16 for rows of at most kHeldElements.
template <int kPack, int kChunks, class R>
__global__ __launch_bounds__(256) void norm_bwd_held_kernel(NormShape shape, Rows<bf16> dx, Rows<bf16>, float* sums,
                                                            Rows<bf16> dy, Rows<R> x, Rows<bf16>, const float* w,
                                                            const float* rstd, float centre, Write write, Rows<bf16>) {
  extern __shared__ float warp_sums[];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp, D = static_cast<int>(shape.D);
  const bool accumulates = write == Write::kAccumulate;
  const auto column = [&](int k) { return (k * kWarp + lane) * kPack; };
  float dw[kChunks][kPack] = {};
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * num_warps + warp; r < shape.num_rows();
       r += static_cast<int64_t>(gridDim.x) * num_warps) {
    const R* from = head_row(x, shape, r);
    const bf16* gradient = head_row(dy, shape, r);
    bf16* to = head_row(dx, shape, r);
    // Loads without a branch between them are on their way together; lanes beyond the row load its last pack.
    Pack<kPack, R> values[kChunks];
    Pack<kPack, bf16> gradients[kChunks], old[kChunks] = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int i = min(column(k), D - kPack);
      values[k] = load_pack<kPack>(from + i);
      gradients[k] = load_pack<kPack>(gradient + i);
    }
    if (accumulates) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) old[k] = load_pack<kPack>(to + min(column(k), D - kPack));
    }
    const float factor = rstd[r];
    float dot = 0.0F;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (column(k) >= D) continue;
      float value[kPack], d[kPack], weight[kPack];
      values[k].unpack(value);
      gradients[k].unpack(d);
      load(w + column(k), weight);
#pragma unroll
      for (int c = 0; c < kPack; ++c) dot += d[c] * (weight[c] + centre) * value[c];
    }
    const float mean = warp_sum(dot) * factor / static_cast<float>(D);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (column(k) >= D) continue;
      float value[kPack], d[kPack], weight[kPack], result[kPack];
      values[k].unpack(value);
      gradients[k].unpack(d);
      old[k].unpack(result);
      load(w + column(k), weight);
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        value[c] *= factor;
        dw[k][c] += d[c] * value[c];
        result[c] += factor * (d[c] * (weight[c] + centre) - value[c] * mean);
      }
      store(to + column(k), result);
    }
  }
#pragma unroll
  for (int k = 0; k < kChunks; ++k)
#pragma unroll
    for (int c = 0; c < kPack; ++c)
      if (column(k) < D) warp_sums[warp * D + column(k) + c] = dw[k][c];
  add_warp_sums(sums, warp_sums, D);
}

template <int kLanes, class Gate>
__global__ __launch_bounds__(256, kSumBlocks / kProcessors) void short_bwd_kernel(NormShape shape, Rows<bf16> dx,
                                                                                  Rows<bf16> dz, float* sums,
                                                                                  Rows<bf16> dy, Rows<bf16> x,
                                                                                  Rows<bf16> z, const float* w,
                                                                                  const float* rstd, Rows<bf16> y) {
  constexpr int kRows = kShortBackwardRows, kPack = kShortPack;
  extern __shared__ float warp_sums[];
  const ShortPlace<kLanes, kRows> place(shape);
  const int num_rows = static_cast<int>(shape.num_rows()), D = static_cast<int>(shape.D);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, num_warps = static_cast<int>(blockDim.x) / kWarp;
  const int num_steps = static_cast<int>(ceil_div(num_rows, place.kRowsOfWarp));
  float dw[kPack] = {};
  for (int step = static_cast<int>(blockIdx.x) * num_warps + warp; step < num_steps;
       step += static_cast<int>(gridDim.x) * num_warps) {
    const int first = step * place.kRowsOfWarp;
    Pack<kPack, bf16> values[kRows], gradients[kRows], gates[kRows];
    float factors[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int r = min(place.row(first, j), num_rows - 1);
      values[j] = load_pack<kPack>(head_row(x, shape, r) + place.loaded);
      gradients[j] = load_pack<kPack>(head_row(dy, shape, r) + place.loaded);
      gates[j] = load_pack<kPack>(head_row(z, shape, r) + place.loaded);
      factors[j] = rstd[r];
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int r = place.row(first, j);
      const bool here = r < num_rows && place.inside;
      float value[kPack], d[kPack], gate[kPack], open[kPack], weight[kPack], dot = 0.0F;
      load(w + place.loaded, weight);
      values[j].unpack(value);
      gradients[j].unpack(d);
      gates[j].unpack(gate);
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        open[c] = rough_sigmoid(gate[c]);
        value[c] *= factors[j];
        dot += d[c] * gate_of<Gate::kActivation>(gate[c], open[c]) * weight[c] * value[c];
      }
      const float mean = warp_sum<kLanes>(here ? dot : 0.0F) / static_cast<float>(D);
      if (!here) continue;
      float result[kPack];
#pragma unroll
      for (int c = 0; c < kPack; ++c)
        result[c] = d[c] * weight[c] * value[c] * gate_slope<Gate::kActivation>(gate[c], open[c]);
      store(head_row(dz, shape, r) + place.column, result);
      if (y.data != nullptr) {
#pragma unroll
        for (int c = 0; c < kPack; ++c) result[c] = weight[c] * value[c] * gate_of<Gate::kActivation>(gate[c], open[c]);
        store(head_row(y, shape, r) + place.column, result);
      }
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        d[c] *= gate_of<Gate::kActivation>(gate[c], open[c]);
        dw[c] += d[c] * value[c];
        d[c] = factors[j] * (d[c] * weight[c] - value[c] * mean);
      }
      store(head_row(dx, shape, r) + place.column, d);
    }
  }
#pragma unroll
  for (int c = 0; c < kPack; ++c) {
#pragma unroll
    for (int distance = kLanes; distance < kWarp; distance *= 2) dw[c] += __shfl_xor_sync(kAllLanes, dw[c], distance);
    if (place.group == 0 && place.inside) warp_sums[warp * D + place.column + c] = dw[c];
  }
  add_warp_sums(sums, warp_sums, D);
}

// Calls body(lanes of a row) if the kernels of short rows serve these; returns whether they do.
template <class Body>
bool with_short_rows(const NormShape& shape, std::initializer_list<const Tensor*> tensors, Body body) {
  const auto fits = [&](int lanes) {
    return shape.D <= lanes * kShortPack && moves_in_packs(tensors, shape.D, kShortPack);
  };
  if (shape.num_rows() > std::numeric_limits<int>::max() - kWarp * kShortRows) return false;
  if (fits(kWarp / 2))
    body(std::integral_constant<int, kWarp / 2>{});
  else if (fits(kWarp))
    body(std::integral_constant<int, kWarp>{});
  else
    return false;
  return true;
}

// The gated norm has no part in the residual stream.
template <class Gate, class Body>
void with_types(DType dtype, DType residual, Body body) {
  if constexpr (Gate::kGated)
    with_float(dtype, [&](auto zero) { body(zero, zero); });
  else
    with_residual(dtype, residual, body);
}

template <class Gate>
void forward(const Stream& stream, const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& z,
             const Tensor& w, double eps, float centre, const Tensor& kept) {
  const NormShape shape(x);
  constexpr int kThreads = 256;
  with_types<Gate>(y.dtype(), x.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    using R = decltype(wide);
    if constexpr (Gate::kGated && std::is_same_v<T, bf16>) {
      if (with_short_rows(shape, {&y, &x, &z, &w}, [&](auto lanes) {
            constexpr int kLanes = decltype(lanes)::value;
            const int64_t warps = ceil_div(shape.num_rows(), ShortPlace<kLanes, kShortRows>::kRowsOfWarp);
            launch(stream, short_fwd_kernel<kLanes, Gate>,
                   {.grid_x = ceil_div(warps, kThreads / kWarp), .threads = kThreads}, shape, Rows<T>(y),
                   rstd.data<float>(), Rows<T>(x), Rows<T>(z), w.data<float>(), static_cast<float>(eps));
          }))
        return;
    }
    const bool as_it_is = kept.defined() && kept.dtype() == x.dtype();
    const Rows<R> copied(as_it_is ? kept : Tensor());
    const Rows<T> rounded(as_it_is ? Tensor() : kept);
    const LaunchShape grid = {.grid_x = ceil_div(shape.num_rows(), kThreads / kWarp), .threads = kThreads};
    const std::initializer_list<const Tensor*> tensors = {&y, &x, &z, &w, &kept};
    if constexpr (!Gate::kGated && std::is_same_v<T, bf16>) {
      if (shape.D <= kHeldElements && moves_in_packs(tensors, shape.D, kHeldPack))
        return launch(stream, norm_fwd_held_kernel<kHeldPack, kHeldChunks, R>, grid, shape, Rows<T>(y),
                      rstd.data<float>(), Rows<R>(x), w.data<float>(), centre, static_cast<float>(eps), copied,
                      rounded);
    }
    with_pack(tensors, shape.D, [&](auto pack) {
      launch(stream, norm_fwd_kernel<decltype(pack)::value, T, R, Gate>, grid, shape, Rows<T>(y), rstd.data<float>(),
             Rows<R>(x), Rows<T>(z), w.data<float>(), centre, static_cast<float>(eps), copied, rounded);
    });
  });
}

template <class Gate>
void backward(const Stream& stream, const Tensor& dx, const Tensor& dz, const Tensor& dw, const Tensor& dy,
              const Tensor& x, const Tensor& z, const Tensor& w, const Tensor& rstd, float centre, Write write,
              const Tensor& y) {
  const NormShape shape(x);
  constexpr int64_t kSharedBytes = 96 * 1024, kMaxWarps = 8;
  const int64_t row_bytes = shape.D * static_cast<int64_t>(sizeof(float));
  CHECK(row_bytes <= kSharedBytes * 2, "norm over ", shape.D, " elements: at most ", kSharedBytes * 2 / 4);
  const int64_t warps = std::clamp<int64_t>(kSharedBytes / std::max<int64_t>(row_bytes, 1), 1, kMaxWarps);
  int64_t blocks = std::min<int64_t>(kSumBlocks, ceil_div(shape.num_rows(), warps));
  const Arena::Scope scope(stream.scratch());
  const Tensor sums = stream.scratch().allocate(DType::kF32, {blocks, shape.D});
  with_types<Gate>(dy.dtype(), x.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    using R = decltype(wide);
    LaunchShape grid = {
        .grid_x = blocks, .threads = static_cast<int>(warps) * kWarp, .shared_bytes = warps * row_bytes};
    const std::initializer_list<const Tensor*> tensors = {&dx, &dz, &dy, &x, &z, &w, &y};
    const auto run = [&](auto* kernel) {
      launch(stream, kernel, grid, shape, Rows<T>(dx), Rows<T>(dz), sums.data<float>(), Rows<T>(dy), Rows<R>(x),
             Rows<T>(z), w.data<float>(), rstd.data<float>(), centre, write, Rows<T>(y));
    };
    if constexpr (Gate::kGated && std::is_same_v<T, bf16>) {
      if (with_short_rows(shape, tensors, [&](auto lanes) {
            launch(stream, short_bwd_kernel<decltype(lanes)::value, Gate>, grid, shape, Rows<T>(dx), Rows<T>(dz),
                   sums.data<float>(), Rows<T>(dy), Rows<T>(x), Rows<T>(z), w.data<float>(), rstd.data<float>(),
                   Rows<T>(y));
          }))
        return;
    } else if constexpr (std::is_same_v<T, bf16>) {
      if (shape.D <= kHeldElements && moves_in_packs(tensors, shape.D, kHeldPack)) {
        grid.grid_x = blocks = std::min<int64_t>(kHeldBlocks, blocks);
        return run(norm_bwd_held_kernel<kHeldPack, kHeldChunks, R>);
      }
    }
    with_pack(tensors, shape.D, [&](auto pack) { run(norm_bwd_kernel<decltype(pack)::value, T, R, Gate>); });
  });
  add_rows_to(stream, dw.data<float>(), sums.data<float>(), blocks, shape.D);
}

// What a one-centred weight is added to.
float centre_of(NormWeight kind) {
  return kind == NormWeight::kOneCentred ? 1.0F : 0.0F;
}

}  // namespace

void rms_norm_forward(Stream& stream, Tensor y, Tensor rstd, const Tensor& x, const Tensor& w, double eps,
                      NormWeight kind, const Tensor& kept) {
  forward<NoGate>(stream, y, rstd, x, {}, w, eps, centre_of(kind), kept);
}

void rms_norm_backward(Stream& stream, Tensor dx, Tensor dw, const Tensor& dy, const Tensor& x, const Tensor& w,
                       const Tensor& rstd, NormWeight kind, Write write) {
  backward<NoGate>(stream, dx, {}, dw, dy, x, {}, w, rstd, centre_of(kind), write, {});
}

void gated_rms_norm_forward(Stream& stream, Tensor y, Tensor rstd, const Tensor& o, const Tensor& z, const Tensor& w,
                            double eps, GateActivation activation) {
  const auto run = activation == GateActivation::kSigmoid ? forward<Gated<GateActivation::kSigmoid>>
                                                          : forward<Gated<GateActivation::kSilu>>;
  run(stream, y, rstd, o, z, w, eps, 0.0F, {});
}

void gated_rms_norm_backward(Stream& stream, Tensor d_o, Tensor dz, Tensor dw, const Tensor& dy, const Tensor& o,
                             const Tensor& z, const Tensor& w, const Tensor& rstd, GateActivation activation,
                             const Tensor& y) {
  const auto run = activation == GateActivation::kSigmoid ? backward<Gated<GateActivation::kSigmoid>>
                                                          : backward<Gated<GateActivation::kSilu>>;
  run(stream, d_o, dz, dw, dy, o, z, w, rstd, 0.0F, Write::kOverwrite, y);
}

}  // namespace palimpsest::cuda
