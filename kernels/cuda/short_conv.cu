// Short convolution. With u the convolution before the activation and positions counted from a document's start:
//   du_t = dy_t * act'(u_t)      dx_p = sum_j w_j du_{p+(W-1)-j}      dw_j = sum_t du_t x_{t-(W-1)+j}
//
// Grid: x over runs of kTokens tokens, y over strips of kThreads channels. A thread walks its channel through the run,
// document by document, with the last inputs (backward: also the last du) in registers. What models train with, four
// taps and SiLU in bf16, has kernels of its own, whose threads take kPack neighbouring channels each and load ahead.
#include "kernels/short_conv.h"

#include "kernels/cuda/documents.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int64_t kTokens = 128;
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

// The next kAhead rows of a run of tokens, which are on their way while the rows before are computed with. Places are
// always known when compiling, so that all lies in registers.
constexpr int kAhead = 8;

template <int kPack>
struct Ahead {
  // From this row on, of which `count` follow.
  __device__ void fill(const bf16* row, int64_t row_stride, int count) {
    next = row;
    stride = row_stride;
#pragma unroll
    for (int i = 0; i < kAhead; ++i, next += stride)
      if (i < count) rows[i] = load_pack<kPack>(next);
  }
  // The row at this place, which the one kAhead later takes if there is one to take.
  __device__ void take(int place, bool more, float (&x)[kPack]) {
    rows[place].unpack(x);
    if (more) rows[place] = load_pack<kPack>(next);
    next += stride;
  }

  const bf16* next;
  int64_t stride;
  Pack<kPack, bf16> rows[kAhead] = {};
};

// The weights of a thread's channels and the inputs before the current token, oldest first.
template <int kPack>
struct WideWindow {
  static constexpr int kPast = kMaxWidth - 1;

  __device__ WideWindow(const Conv<bf16>& conv, int64_t first_channel) : channel(first_channel) {
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      float of_channel[kMaxWidth];
      load(conv.w + (channel + c) * kMaxWidth, of_channel);
#pragma unroll
      for (int j = 0; j < kMaxWidth; ++j) weights[j][c] = of_channel[j];
    }
  }
  __device__ void start(const Conv<bf16>& conv, int64_t document, int64_t begin, int64_t token) {
    const int64_t state = conv.initial == nullptr ? -1 : conv.documents.entering(document);
    Pack<kPack, bf16> rows[kPast] = {};
#pragma unroll
    for (int i = 0; i < kPast; ++i) {
      const int64_t position = token - begin - kPast + i;
      if (position >= 0)
        rows[i] = load_pack<kPack>(conv.x[begin + position] + channel);
      else if (state >= 0)  // position >= -kPast, since token >= begin
        rows[i] = load_pack<kPack>(conv.initial + (state * kPast + kPast + position) * conv.C + channel);
    }
#pragma unroll
    for (int i = 0; i < kPast; ++i) rows[i].unpack(past[i]);
  }
  __device__ float convolve(int c, const float (&x)[kPack]) const {
    float u = 0.0F;
#pragma unroll
    for (int j = 0; j < kPast; ++j) u += weights[j][c] * past[j][c];
    return u + weights[kPast][c] * x[c];
  }
  __device__ void push(const float (&x)[kPack]) {
    shift_in(past, x);
  }

  // Drops the oldest row, which is the first.
  __device__ static void shift_in(float (&rows)[kPast][kPack], const float (&x)[kPack]) {
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
#pragma unroll
      for (int i = 0; i + 1 < kPast; ++i) rows[i][c] = rows[i + 1][c];
      rows[kPast - 1][c] = x[c];
    }
  }

  int64_t channel;
  float weights[kMaxWidth][kPack], past[kPast][kPack] = {};
};

// Grid of the wide kernels: the strips of a run are neighbours, so that blocks at work together read whole rows.
template <int kPack>
__global__ __launch_bounds__(kThreads) void wide_fwd_kernel(Conv<bf16> conv, Rows<bf16> y, int num_strips) {
  const int64_t run = static_cast<int>(blockIdx.x) / num_strips, strip = static_cast<int>(blockIdx.x) % num_strips;
  const int64_t channel = (strip * kThreads + static_cast<int>(threadIdx.x)) * kPack;
  if (channel >= conv.C) return;
  const int64_t begin = run * kTokens, end = min(conv.N, begin + kTokens);
  Ahead<kPack> inputs;
  inputs.fill(conv.x[begin] + channel, conv.x.stride, static_cast<int>(end - begin));
  WideWindow<kPack> window(conv, channel);
  for_each_piece(conv.documents, begin, end, [&](int64_t document, int64_t from, int64_t to) {
    const int count = static_cast<int>(to - from), whole = count - count % kAhead;
    if (from != begin) inputs.fill(conv.x[from] + channel, conv.x.stride, count);
    window.start(conv, document, conv.documents.begin(document), from);
    bf16* out = y[from] + channel;
    const auto finish_token = [&](const float(&x)[kPack]) {
      float result[kPack];
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        const float u = window.convolve(c, x);
        result[c] = u * rough_sigmoid(u);
      }
      store(out, result);
      out += y.stride;
      window.push(x);
    };
    for (int first = 0; first < whole; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        float x[kPack];
        inputs.take(i, first + kAhead < whole, x);
        finish_token(x);
      }
    }
#pragma unroll 1
    for (int t = whole; t < count; ++t) {
      float x[kPack];
      load_pack<kPack>(conv.x[from + t] + channel).unpack(x);
      finish_token(x);
    }
  });
}

// sums [runs, C * kMaxWidth]: dw of each run of tokens.
template <int kPack>
__global__ __launch_bounds__(kThreads, 3) void wide_bwd_kernel(Conv<bf16> conv, Rows<bf16> dx, float* sums,
                                                               Rows<bf16> dy, const bf16* d_final, int num_strips) {
  constexpr int kPast = kMaxWidth - 1;
  const int64_t run = static_cast<int>(blockIdx.x) / num_strips, strip = static_cast<int>(blockIdx.x) % num_strips;
  const int64_t channel = (strip * kThreads + static_cast<int>(threadIdx.x)) * kPack;
  if (channel >= conv.C) return;
  const int64_t begin = run * kTokens, end = min(conv.N, begin + kTokens);
  Ahead<kPack> inputs, gradients;
  const auto fill = [&](int64_t token, int64_t stop) {
    inputs.fill(conv.x[token] + channel, conv.x.stride, static_cast<int>(stop - token));
    gradients.fill(dy[token] + channel, dy.stride, static_cast<int>(stop - token));
  };
  fill(begin, end);
  WideWindow<kPack> window(conv, channel);
  float dw[kMaxWidth][kPack] = {};
  for_each_piece(conv.documents, begin, end, [&](int64_t document, int64_t from, int64_t to) {
    const int count = static_cast<int>(to - from), whole = count - count % kAhead;
    if (from != begin) fill(from, to);
    window.start(conv, document, conv.documents.begin(document), from);
    float recent[kPast][kPack] = {};                             // du of the tokens before, oldest first
    bf16* out = dx.data + (from - kPast) * dx.stride + channel;  // dx of the token kPast before
    // In place of dy: du.
    const auto through_activation = [&](float(&d)[kPack], const float(&x)[kPack]) {
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        const float u = window.convolve(c, x), open = rough_sigmoid(u);
        d[c] *= open * (1.0F + u * (1.0F - open));
      }
    };
    const auto add_to_dw = [&](const float(&du)[kPack], const float(&x)[kPack]) {
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
#pragma unroll
        for (int j = 0; j < kPast; ++j) dw[j][c] += du[c] * window.past[j][c];
        dw[kPast][c] += du[c] * x[c];
      }
    };
    const auto input_gradient = [&](float(&result)[kPack], const float(&du)[kPack]) {
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        result[c] = window.weights[0][c] * du[c];
#pragma unroll
        for (int j = 1; j < kMaxWidth; ++j) result[c] += window.weights[j][c] * recent[kPast - j][c];
      }
    };
    const auto to_next_token = [&](const float(&du)[kPack], const float(&x)[kPack]) {
      out += dx.stride;
      window.push(x);
      window.shift_in(recent, du);
    };
    for (int first = 0; first < whole; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        float x[kPack], du[kPack];
        inputs.take(i, first + kAhead < whole, x);
        gradients.take(i, first + kAhead < whole, du);
        through_activation(du, x);
        add_to_dw(du, x);
        if (i >= kPast || first > 0) {
          float result[kPack];
          input_gradient(result, du);
          store(out, result);
        }
        to_next_token(du, x);
      }
    }
    // What is left, and the tokens after the piece, whose du the last dx need: in their place, after the document, the
    // gradient of its final state.
    const int in_document = static_cast<int>(min(conv.documents.end(document) - from, int64_t{count + kPast}));
    const int64_t leaving = d_final == nullptr ? -1 : conv.documents.leaving(document);
#pragma unroll 1
    for (int t = whole; t < count + kPast; ++t) {
      float x[kPack] = {}, du[kPack] = {};
      if (t < in_document) {
        load_pack<kPack>(conv.x[from + t] + channel).unpack(x);
        load_pack<kPack>(dy[from + t] + channel).unpack(du);
        through_activation(du, x);
      }
      if (t < count) add_to_dw(du, x);
      if (t >= kPast) {
        float result[kPack];
        input_gradient(result, du);
        if (leaving >= 0 && t >= in_document) {
          float kept[kPack];
          load_pack<kPack>(d_final + (leaving * kPast + t - in_document) * conv.C + channel).unpack(kept);
#pragma unroll
          for (int c = 0; c < kPack; ++c) result[c] += kept[c];
        }
        store(out, result);
      }
      to_next_token(du, x);
    }
  });
  float* to = sums + (run * conv.C + channel) * kMaxWidth;
#pragma unroll
  for (int c = 0; c < kPack; ++c) {
    const float of_channel[kMaxWidth] = {dw[0][c], dw[1][c], dw[2][c], dw[3][c]};
    store(to + c * kMaxWidth, of_channel);
  }
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

constexpr int kPack = 4;  // of the wide kernels

// Whether the wide kernels serve this convolution and the rows of all its tensors.
template <class T>
bool is_wide(const Conv<T>& conv, std::initializer_list<const Tensor*> tensors) {
  return std::is_same_v<T, bf16> && conv.W == kMaxWidth && conv.silu && moves_in_packs(tensors, conv.C, kPack);
}

}  // namespace

void short_conv_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& w, const Tensor& initial,
                        const Documents& documents, ConvActivation activation) {
  const Arena::Scope scope(stream.scratch());
  with_float(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto conv = make_conv<T>(stream, x, w.data<float>(), w.dim(2), initial, documents, activation);
    if constexpr (std::is_same_v<T, bf16>) {
      const int64_t strips = ceil_div(conv.C, kThreads * kPack);
      if (is_wide(conv, {&y, &x, &w, &initial}))
        return launch(stream, wide_fwd_kernel<kPack>,
                      {.grid_x = ceil_div(conv.N, kTokens) * strips, .threads = kThreads}, conv, Rows<T>(y), strips);
    }
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
    bool wide = false;
    if constexpr (std::is_same_v<T, bf16>) {
      wide = is_wide(conv, {&dx, &dy, &x, &w, &initial, &d_final});
      const int64_t wide_strips = ceil_div(conv.C, kThreads * kPack);
      if (wide)
        launch(stream, wide_bwd_kernel<kPack>, {.grid_x = runs * wide_strips, .threads = kThreads}, conv, Rows<T>(dx),
               sums.data<float>(), Rows<T>(dy), optional_data<T>(d_final), wide_strips);
    }
    if (!wide)
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
