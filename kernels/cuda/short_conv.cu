// Short convolution. With u the convolution before the activation and positions counted from a document's start:
//   du_t = dy_t * act'(u_t)      dx_p = sum_j w_j du_{p+(W-1)-j}      dw_j = sum_t du_t x_{t-(W-1)+j}
//
// Grid: x over runs of kTokens tokens, y over strips of kThreads channels. A thread walks its channel through the run,
// document by document, with the last inputs (backward: also the last du) in registers.
#include "kernels/short_conv.h"

#include "kernels/cuda/documents.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int64_t kTokens = 64;
constexpr int kMaxWidth = 4;

template <class T>
struct Conv {
  Rows<T> x;
  const float* w;    // [C, W]
  const T* initial;  // [states, W - 1, C] or null
  DocumentList documents;
  int64_t N, C;
  int W;
  bool silu;

  // Input of a channel at a position of a document, which may lie before its first token.
  __device__ float input(int64_t document, int64_t position, int64_t channel) const {
    if (position >= 0) return to_f32(x[documents.begin(document) + position][channel]);
    const int64_t row = position + W - 1, state = documents.entering(document);
    if (initial == nullptr || row < 0 || state < 0) return 0.0F;
    return to_f32(initial[(state * (W - 1) + row) * C + channel]);
  }
  __device__ float slope(float u) const {
    if (!silu) return 1.0F;
    const float open = sigmoid(u);
    return open * (1.0F + u * (1.0F - open));
  }
};

// A channel's weights and the inputs at its taps, the current token's last: tap kMaxWidth - W is the oldest in use.
template <class T>
struct Window {
  float weights[kMaxWidth], taps[kMaxWidth];

  __device__ Window(const Conv<T>& conv, int64_t channel) {
#pragma unroll
    for (int i = 0; i < kMaxWidth; ++i) {
      const int j = i - (kMaxWidth - conv.W);
      weights[i] = j >= 0 ? conv.w[channel * conv.W + j] : 0.0F;
      taps[i] = 0.0F;
    }
  }
  // Makes push(position) right.
  __device__ void start(const Conv<T>& conv, int64_t document, int64_t position, int64_t channel) {
#pragma unroll
    for (int i = 1; i < kMaxWidth; ++i)
      taps[i] = i > kMaxWidth - conv.W ? conv.input(document, position - kMaxWidth + i, channel) : 0.0F;
  }
  __device__ void push(float x, int W) {
#pragma unroll
    for (int i = 0; i + 1 < kMaxWidth; ++i) taps[i] = i >= kMaxWidth - W ? taps[i + 1] : 0.0F;
    taps[kMaxWidth - 1] = x;
  }
  __device__ float convolve() const {
    float u = 0.0F;
#pragma unroll
    for (int i = 0; i < kMaxWidth; ++i) u += weights[i] * taps[i];
    return u;
  }
};

// Calls body(document, from, to) on the parts of [begin, end) that documents own.
template <class Body>
__device__ void for_each_piece(const DocumentList& documents, int64_t begin, int64_t end, Body body) {
  for (int64_t document = documents.owner_of(begin); begin < end; ++document) {
    const int64_t stop = min(end, documents.end(document));
    if (begin < stop) body(document, begin, stop);
    begin = max(begin, stop);
  }
}

template <class T>
__global__ void conv_fwd_kernel(Conv<T> conv, Rows<T> y) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= conv.C) return;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTokens;
  Window<T> window(conv, channel);
  for_each_piece(conv.documents, begin, min(conv.N, begin + kTokens), [&](int64_t document, int64_t from, int64_t to) {
    window.start(conv, document, from - conv.documents.begin(document), channel);
    for (int64_t t = from; t < to; ++t) {
      window.push(to_f32(conv.x[t][channel]), conv.W);
      const float u = window.convolve();
      y[t][channel] = from_f32<T>(conv.silu ? u * sigmoid(u) : u);
    }
  });
}

// sums [runs, C * W]: dw of each run of tokens.
template <class T>
__global__ void conv_bwd_kernel(Conv<T> conv, Rows<T> dx, float* sums, Rows<T> dy, const T* d_final) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= conv.C) return;
  const int W = conv.W;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTokens;
  Window<T> window(conv, channel);
  float weights[kMaxWidth], dw[kMaxWidth] = {};
#pragma unroll
  for (int j = 0; j < kMaxWidth; ++j) weights[j] = j < W ? conv.w[channel * W + j] : 0.0F;
  const auto piece = [&](int64_t document, int64_t from, int64_t to) {
    const int64_t start = conv.documents.begin(document), end = conv.documents.end(document);
    const int64_t leaving = conv.documents.leaving(document);
    window.start(conv, document, from - start, channel);
    float recent[kMaxWidth] = {};  // du_t, du_{t-1}, ..
    // dx of a token needs du of the W-1 tokens after it: those after the piece are computed here again.
    for (int64_t t = from; t < to + W - 1; ++t) {
#pragma unroll
      for (int i = kMaxWidth - 1; i > 0; --i) recent[i] = recent[i - 1];
      recent[0] = 0.0F;
      if (t < end) {
        window.push(to_f32(conv.x[t][channel]), W);
        recent[0] = to_f32(dy[t][channel]) * conv.slope(window.convolve());
        if (t < to) {
#pragma unroll
          for (int i = 0; i < kMaxWidth; ++i) dw[i] += recent[0] * window.taps[i];
        }
      }
      const int64_t p = t - (W - 1);
      if (p < from) continue;
      float sum = 0.0F;
#pragma unroll
      for (int j = 0; j < kMaxWidth; ++j)
        if (j < W) sum += weights[j] * recent[j];
      const int64_t kept = p - (end - (W - 1));  // row of the final state that holds this input
      if (d_final != nullptr && leaving >= 0 && kept >= 0)
        sum += to_f32(d_final[(leaving * (W - 1) + kept) * conv.C + channel]);
      dx[p][channel] = from_f32<T>(sum);
    }
  };
  for_each_piece(conv.documents, begin, min(conv.N, begin + kTokens), piece);
  float* out = sums + (static_cast<int64_t>(blockIdx.x) * conv.C + channel) * W;
#pragma unroll
  for (int i = 0; i < kMaxWidth; ++i)
    if (i >= kMaxWidth - W) out[i - (kMaxWidth - W)] = dw[i];
}

// d_initial: row r is the input at position r - (W-1), which the first r+1 tokens read. A block: a document, a strip.
template <class T>
__global__ void conv_bwd_initial_kernel(Conv<T> conv, T* d_initial, Rows<T> dy, const T* d_final) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x, document = blockIdx.x;
  if (channel >= conv.C) return;
  const int W = conv.W;
  const int64_t start = conv.documents.begin(document), length = conv.documents.length(document);
  const int64_t entering = conv.documents.entering(document), leaving = conv.documents.leaving(document);
  if (entering < 0) return;
  Window<T> window(conv, channel);
  window.start(conv, document, 0, channel);
  float du[kMaxWidth - 1] = {};
#pragma unroll
  for (int r = 0; r < kMaxWidth - 1; ++r) {
    if (r >= W - 1) continue;
    if (r < length) {
      window.push(to_f32(conv.x[start + r][channel]), W);
      du[r] = to_f32(dy[start + r][channel]) * conv.slope(window.convolve());
    }
    float sum = 0.0F;  // the row is part of the final state of a document shorter than W-1
    if (d_final != nullptr && leaving >= 0 && r >= length)
      sum = to_f32(d_final[(leaving * (W - 1) + r - length) * conv.C + channel]);
#pragma unroll
    for (int t = 0; t <= r; ++t)
      if (t < length) sum += conv.w[channel * W + r - t] * du[t];
    d_initial[(entering * (W - 1) + r) * conv.C + channel] = from_f32<T>(sum);
  }
}

// Ascending rows: when final_state is initial, every row is read before it is overwritten.
template <class T>
__global__ void conv_final_kernel(Conv<T> conv, T* final_state) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x, document = blockIdx.x;
  const int64_t leaving = conv.documents.leaving(document);
  if (channel >= conv.C || leaving < 0) return;
  const int64_t length = conv.documents.length(document);
  for (int r = 0; r < conv.W - 1; ++r)
    final_state[(leaving * (conv.W - 1) + r) * conv.C + channel] =
        from_f32<T>(conv.input(document, length - (conv.W - 1) + r, channel));
}

template <class T>
Conv<T> make_conv(const Stream& stream, const Tensor& x, const float* w, int64_t W, const Tensor& initial,
                  const Documents& documents, ConvActivation activation) {
  return {.x = Rows<T>(x),
          .w = w,
          .initial = initial.defined() ? initial.data<T>() : nullptr,
          .documents = upload(stream, documents),
          .N = x.dim(0),
          .C = x.dim(1),
          .W = static_cast<int>(W),
          .silu = activation == ConvActivation::kSilu};
}

template <class T>
const T* optional_data(const Tensor& tensor) {
  return tensor.defined() ? tensor.data<T>() : nullptr;
}

}  // namespace

void short_conv_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& w, const Tensor& initial,
                        const Documents& documents, ConvActivation activation) {
  const Arena::Scope scope(stream.scratch());
  with_float(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto conv = make_conv<T>(stream, x, w.data<float>(), w.dim(2), initial, documents, activation);
    launch(stream, conv_fwd_kernel<T>,
           {.grid_x = ceil_div(conv.N, kTokens), .grid_y = ceil_div(conv.C, kThreads), .threads = kThreads}, conv,
           Rows<T>(y));
  });
}

void short_conv_backward(Stream& stream, Tensor dx, Tensor dw, Tensor d_initial, const Tensor& dy, const Tensor& x,
                         const Tensor& w, const Tensor& initial, const Tensor& d_final, const Documents& documents,
                         ConvActivation activation) {
  const Arena::Scope scope(stream.scratch());
  with_float(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto conv = make_conv<T>(stream, x, w.data<float>(), w.dim(2), initial, documents, activation);
    const int64_t runs = ceil_div(conv.N, kTokens), strips = ceil_div(conv.C, kThreads);
    const Tensor sums = stream.scratch().allocate(DType::kF32, {runs, w.numel()});
    launch(stream, conv_bwd_kernel<T>, {.grid_x = runs, .grid_y = strips, .threads = kThreads}, conv, Rows<T>(dx),
           sums.data<float>(), Rows<T>(dy), optional_data<T>(d_final));
    add_rows_to(stream, dw.data<float>(), sums.data<float>(), runs, w.numel());
    if (d_initial.defined())
      launch(stream, conv_bwd_initial_kernel<T>, {.grid_x = documents.count(), .grid_y = strips, .threads = kThreads},
             conv, d_initial.data<T>(), Rows<T>(dy), optional_data<T>(d_final));
  });
}

void short_conv_final_state(Stream& stream, Tensor final_state, const Tensor& x, const Tensor& initial,
                            const Documents& documents) {
  const Arena::Scope scope(stream.scratch());
  with_float(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto conv =
        make_conv<T>(stream, x, nullptr, final_state.dim(1) + 1, initial, documents, ConvActivation::kNone);
    launch(stream, conv_final_kernel<T>,
           {.grid_x = documents.count(), .grid_y = ceil_div(conv.C, kThreads), .threads = kThreads}, conv,
           final_state.data<T>());
  });
}

}  // namespace palimpsest::cuda
