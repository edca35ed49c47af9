// Elementwise ops. Grid: x over packs of neighbours in a row, y over rows; tensors without gaps count as one row.
#include "kernels/elementwise.h"

#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int64_t kMaxGridY = 65535;

// body(row, column) for every pack.
template <int kPack, class Body>
__global__ void map_kernel(int64_t rows, int64_t size, Body body) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * kPack;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack; i < size; i += step)
      body(row, i);
}

// Makes the body from (pack, T{}) and runs it over the elements of tensors of one shape.
template <class Make>
void map(const Stream& stream, DType dtype, std::initializer_list<const Tensor*> tensors, Make make) {
  bool contiguous = true;
  for (const Tensor* tensor : tensors) contiguous = contiguous && tensor->contiguous();
  const Tensor& any = **tensors.begin();
  if (any.numel() == 0) return;
  const int64_t rows = contiguous ? 1 : any.dim(0), size = contiguous ? any.numel() : any.row_size();
  with_float(dtype, [&](auto zero) {
    with_pack(tensors, size, [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      const int threads = static_cast<int>(min(int64_t{256}, ceil_div(ceil_div(size, kPack), kWarp) * kWarp));
      const auto body = make(pack, zero);
      launch(stream, map_kernel<kPack, decltype(body)>,
             {.grid_x = ceil_div(size, static_cast<int64_t>(threads) * kPack),
              .grid_y = min(rows, kMaxGridY),
              .threads = threads},
             rows, size, body);
    });
  });
}

template <int kPack, class T, class R>
struct Add {
  Rows<R> y, a;
  Rows<T> b;
  __device__ void operator()(int64_t row, int64_t i) const {
    float first[kPack], second[kPack];
    load(a[row] + i, first);
    load(b[row] + i, second);
#pragma unroll
    for (int c = 0; c < kPack; ++c) first[c] += second[c];
    store(y[row] + i, first);
  }
};

// f64, of which there are few: counts and sums over a step.
struct AddWide {
  Rows<double> y, a, b;
  __device__ void operator()(int64_t row, int64_t i) const { y[row][i] = a[row][i] + b[row][i]; }
};

template <int kPack, class T>
struct SigmoidGate {
  Rows<T> y, x, z;
  __device__ void operator()(int64_t row, int64_t i) const {
    float value[kPack], gate[kPack];
    load(x[row] + i, value);
    load(z[row] + i, gate);
#pragma unroll
    for (int c = 0; c < kPack; ++c) value[c] *= sigmoid(gate[c]);
    store(y[row] + i, value);
  }
};

template <int kPack, class T>
struct SigmoidGateBackward {
  Rows<T> dx, dz, dy, x, z;
  __device__ void operator()(int64_t row, int64_t i) const {
    float d[kPack], value[kPack], gate[kPack], d_gate[kPack];
    load(dy[row] + i, d);
    load(x[row] + i, value);
    load(z[row] + i, gate);
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      const float open = sigmoid(gate[c]);
      d_gate[c] = d[c] * value[c] * open * (1.0F - open);
      d[c] *= open;
    }
    store(dz[row] + i, d_gate);
    store(dx[row] + i, d);
  }
};

template <int kPack, class To, class From>
struct Convert {
  Rows<To> to;
  Rows<From> from;
  __device__ void operator()(int64_t row, int64_t i) const {
    float x[kPack];
    load(from[row] + i, x);
    store(to[row] + i, x);
  }
};

struct RoundedArrays {
  bf16* to;
  const float* from;
};

// A block takes kPacks packs of each of its threads.
constexpr int kRoundedPack = kWidestPack<bf16>, kPacks = 2;

__global__ void round_all_kernel(const __grid_constant__ Batch<RoundedArrays> batch) {
  const int which = batch.index();
  const auto [to, from] = batch.arrays[which];
  const int64_t n = batch.n[which], step = batch.template step<kRoundedPack>(which);
#pragma unroll kPacks
  for (int64_t i = batch.template begin<kRoundedPack>(which); i < n; i += step) {
    float x[kRoundedPack];
    load(from + i, x);
    store(to + i, x);
  }
}

}  // namespace

void widen_to_f32(const Stream& stream, const Tensor& to, const Tensor& from) {
  map(stream, DType::kF32, {&to, &from}, [&](auto pack, auto) {
    return Convert<decltype(pack)::value, float, bf16>{Rows<float>(to), Rows<bf16>(from)};
  });
}

void round_to_bf16(const Stream& stream, const Tensor& to, const Tensor& from) {
  map(stream, DType::kF32, {&to, &from}, [&](auto pack, auto) {
    return Convert<decltype(pack)::value, bf16, float>{Rows<bf16>(to), Rows<float>(from)};
  });
}

void fill_zero(Stream& stream, Tensor y) {
  if (stream.is_planning() || y.numel() == 0) return;
  const auto element = static_cast<size_t>(size_of(y.dtype()));
  CUDA_CHECK(cudaMemset2DAsync(y.raw(), static_cast<size_t>(y.row_stride()) * element, 0,
                               static_cast<size_t>(y.row_size()) * element,
                               static_cast<size_t>(y.numel() / y.row_size()), queue_of(stream)));
}

void copy(Stream& stream, Tensor y, const Tensor& x) {
  if (x.dtype() != y.dtype()) return round_to_bf16(stream, y, x);
  if (stream.is_planning() || x.numel() == 0) return;
  const auto element = static_cast<size_t>(size_of(x.dtype()));
  const auto width = static_cast<size_t>(x.row_size()) * element;
  if (x.contiguous() && y.contiguous()) {
    CUDA_CHECK(
        cudaMemcpyAsync(y.raw(), x.raw(), static_cast<size_t>(x.bytes()), cudaMemcpyDeviceToDevice, queue_of(stream)));
    return;
  }
  CUDA_CHECK(cudaMemcpy2DAsync(
      y.raw(), static_cast<size_t>(y.row_stride()) * element, x.raw(), static_cast<size_t>(x.row_stride()) * element,
      width, static_cast<size_t>(x.numel() / x.row_size()), cudaMemcpyDeviceToDevice, queue_of(stream)));
}

void copy_all(Stream& stream, std::span<const CopyOperands> operands) {
  Batch<RoundedArrays> batch;
  const auto send = [&] {
    launch(stream, round_all_kernel, {.grid_x = batch.blocks(), .threads = kBatchThreads}, batch);
    batch = {};
  };
  for (const auto& [y, x] : operands) {
    const int64_t n = x.numel();
    if (x.dtype() == y.dtype() || !x.contiguous() || !y.contiguous() || !moves_in_packs({&y, &x}, n, kRoundedPack)) {
      cuda::copy(stream, y, x);
      continue;
    }
    if (n == 0) continue;
    batch.add(n, ceil_div(n, int64_t{kBatchThreads} * kRoundedPack * kPacks), {y.data<bf16>(), x.data<float>()});
    if (batch.count == kMostArrays) send();
  }
  send();
}

void add(Stream& stream, Tensor y, const Tensor& a, const Tensor& b) {
  if (a.dtype() == DType::kF64) {
    launch(stream, map_kernel<1, AddWide>, {.grid_x = ceil_div(a.row_size(), 256), .grid_y = min(a.dim(0), kMaxGridY)},
           a.dim(0), a.row_size(), AddWide{Rows<double>(y), Rows<double>(a), Rows<double>(b)});
    return;
  }
  const auto make = [&](auto pack, auto zero, auto wide) {
    using T = decltype(zero);
    using R = decltype(wide);
    return Add<decltype(pack)::value, T, R>{Rows<R>(y), Rows<R>(a), Rows<T>(b)};
  };
  if (a.dtype() != b.dtype()) {
    map(stream, a.dtype(), {&y, &a, &b}, [&](auto pack, auto) { return make(pack, bf16{}, float{}); });
    return;
  }
  map(stream, a.dtype(), {&y, &a, &b}, [&](auto pack, auto zero) { return make(pack, zero, zero); });
}

void sigmoid_gate_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& z) {
  map(stream, x.dtype(), {&y, &x, &z}, [&](auto pack, auto zero) {
    using T = decltype(zero);
    return SigmoidGate<decltype(pack)::value, T>{Rows<T>(y), Rows<T>(x), Rows<T>(z)};
  });
}

void sigmoid_gate_backward(Stream& stream, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z) {
  map(stream, dy.dtype(), {&dx, &dz, &dy, &x, &z}, [&](auto pack, auto zero) {
    using T = decltype(zero);
    return SigmoidGateBackward<decltype(pack)::value, T>{Rows<T>(dx), Rows<T>(dz), Rows<T>(dy), Rows<T>(x), Rows<T>(z)};
  });
}

}  // namespace palimpsest::cuda
