// RMSNorm and its gated kind. A warp takes a row (one head of one token), its lanes packs of neighbours.
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

constexpr int64_t kSumBlocks = 528;  // of backward at most: four for each multiprocessor of an H200

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
                                const float* w, const float* rstd, float centre, Write write) {
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
        float gate[kPack], d_gate[kPack];
        load(head_row(z, shape, r) + i, gate);
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          d_gate[c] = d[c] * weight[c] * value[c] * gate_slope<Gate::kActivation>(gate[c], sigmoid_for<T>(gate[c]));
          d[c] *= gate_of<Gate::kActivation>(gate[c], sigmoid_for<T>(gate[c]));
        }
        store(head_row(dz, shape, r) + i, d_gate);
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

// The same for rows of at most kChunks packs a lane, which are read once and held in registers.
template <int kPack, int kChunks, class T, class R, class Gate>
__global__ __launch_bounds__(256) void norm_bwd_held_kernel(NormShape shape, Rows<T> dx, Rows<T> dz, float* sums,
                                                            Rows<T> dy, Rows<R> x, Rows<T> z, const float* w,
                                                            const float* rstd, float centre, Write write) {
  extern __shared__ float warp_sums[];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp, D = static_cast<int>(shape.D);
  const bool accumulates = write == Write::kAccumulate;
  const auto column = [&](int k) { return (k * kWarp + lane) * kPack; };
  float dw[kChunks][kPack] = {};
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * num_warps + warp; r < shape.num_rows();
       r += static_cast<int64_t>(gridDim.x) * num_warps) {
    const R* from = head_row(x, shape, r);
    const T* gradient = head_row(dy, shape, r);
    T* to = head_row(dx, shape, r);
    // Loads without a branch between them are on their way together; lanes beyond the row load its last pack.
    Pack<kPack, R> values[kChunks];
    Pack<kPack, T> gradients[kChunks], gates[kChunks], old[kChunks] = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int i = min(column(k), D - kPack);
      values[k] = load_pack<kPack>(from + i);
      gradients[k] = load_pack<kPack>(gradient + i);
      if constexpr (Gate::kGated) gates[k] = load_pack<kPack>(head_row(z, shape, r) + i);
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
      if constexpr (Gate::kGated) {
        float gate[kPack];
        gates[k].unpack(gate);
#pragma unroll
        for (int c = 0; c < kPack; ++c) d[c] *= gate_of<Gate::kActivation>(gate[c], sigmoid_for<T>(gate[c]));
      }
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
      for (int c = 0; c < kPack; ++c) value[c] *= factor;
      if constexpr (Gate::kGated) {
        float gate[kPack], d_gate[kPack];
        gates[k].unpack(gate);
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          const float open = sigmoid_for<T>(gate[c]);
          d_gate[c] = d[c] * weight[c] * value[c] * gate_slope<Gate::kActivation>(gate[c], open);
          d[c] *= gate_of<Gate::kActivation>(gate[c], open);
        }
        store(head_row(dz, shape, r) + column(k), d_gate);
      }
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
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
    const bool as_it_is = kept.defined() && kept.dtype() == x.dtype();
    with_pack({&y, &x, &z, &w, &kept}, shape.D, [&](auto pack) {
      launch(stream, norm_fwd_kernel<decltype(pack)::value, T, R, Gate>,
             {.grid_x = ceil_div(shape.num_rows(), kThreads / kWarp), .threads = kThreads}, shape, Rows<T>(y),
             rstd.data<float>(), Rows<R>(x), Rows<T>(z), w.data<float>(), centre, static_cast<float>(eps),
             Rows<R>(as_it_is ? kept : Tensor()), Rows<T>(as_it_is ? Tensor() : kept));
    });
  });
}

template <class Gate>
void backward(const Stream& stream, const Tensor& dx, const Tensor& dz, const Tensor& dw, const Tensor& dy,
              const Tensor& x, const Tensor& z, const Tensor& w, const Tensor& rstd, float centre, Write write) {
  const NormShape shape(x);
  constexpr int64_t kSharedBytes = 96 * 1024, kMaxWarps = 8;
  const int64_t row_bytes = shape.D * static_cast<int64_t>(sizeof(float));
  CHECK(row_bytes <= kSharedBytes * 2, "norm over ", shape.D, " elements: at most ", kSharedBytes * 2 / 4);
  const int64_t warps = std::clamp<int64_t>(kSharedBytes / std::max<int64_t>(row_bytes, 1), 1, kMaxWarps);
  const int64_t blocks = std::min(kSumBlocks, ceil_div(shape.num_rows(), warps));
  const Arena::Scope scope(stream.scratch());
  const Tensor sums = stream.scratch().allocate(DType::kF32, {blocks, shape.D});
  with_types<Gate>(dy.dtype(), x.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    using R = decltype(wide);
    with_pack({&dx, &dz, &dy, &x, &z, &w}, shape.D, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value, kChunks = Gate::kGated ? 1 : 8;
      auto* kernel = norm_bwd_kernel<kPack, T, R, Gate>;
      if constexpr (kPack > 1 && std::is_same_v<T, bf16>)
        if (shape.D <= kChunks * kWarp * kPack) kernel = norm_bwd_held_kernel<kPack, kChunks, T, R, Gate>;
      launch(stream, kernel,
             {.grid_x = blocks, .threads = static_cast<int>(warps) * kWarp, .shared_bytes = warps * row_bytes}, shape,
             Rows<T>(dx), Rows<T>(dz), sums.data<float>(), Rows<T>(dy), Rows<R>(x), Rows<T>(z), w.data<float>(),
             rstd.data<float>(), centre, write);
    });
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
  backward<NoGate>(stream, dx, {}, dw, dy, x, {}, w, rstd, centre_of(kind), write);
}

void gated_rms_norm_forward(Stream& stream, Tensor y, Tensor rstd, const Tensor& o, const Tensor& z, const Tensor& w,
                            double eps, GateActivation activation) {
  const auto run = activation == GateActivation::kSigmoid ? forward<Gated<GateActivation::kSigmoid>>
                                                          : forward<Gated<GateActivation::kSilu>>;
  run(stream, y, rstd, o, z, w, eps, 0.0F, {});
}

void gated_rms_norm_backward(Stream& stream, Tensor d_o, Tensor dz, Tensor dw, const Tensor& dy, const Tensor& o,
                             const Tensor& z, const Tensor& w, const Tensor& rstd, GateActivation activation) {
  const auto run = activation == GateActivation::kSigmoid ? backward<Gated<GateActivation::kSigmoid>>
                                                          : backward<Gated<GateActivation::kSilu>>;
  run(stream, d_o, dz, dw, dy, o, z, w, rstd, 0.0F, Write::kOverwrite);
}

}  // namespace palimpsest::cuda
