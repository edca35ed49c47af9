// With u the convolution before the activation and positions counted from a document's start:
//   du_t = dy_t * act'(u_t)      dx_p = sum_j w_j du_{p+(W-1)-j}      dw_j = sum_t du_t x_{t-(W-1)+j}
// Work is cut into tiles of kTokensPerSum tokens and kStrip channels. Inside a tile, loops run over channels, so the
// few rows that a token touches stay in the first-level cache and every loop is vectorised.
#include "kernels/short_conv.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/token_sums.h"
#include "kernels/cpu/vector_math.h"

namespace palimpsest::cpu {

namespace {

constexpr int64_t kStrip = 256;  // channels

// The inputs of every document, those before its first token included.
template <class T>
struct Inputs {
  Inputs(const Tensor& x, const Tensor& initial_state, const Documents& docs, int64_t width)
      : rows(x),
        initial(initial_state.defined() ? initial_state.data<T>() : nullptr),
        C(x.dim(1)),
        documents(docs),
        kept(width - 1) {}

  // `position` >= -kept; from this channel on, at least kStrip channels or up to the last.
  const T* at(int64_t document, int64_t position, int64_t channel) const {
    static const T kZeros[kStrip] = {};
    if (position >= 0) return rows[documents.begin(document) + position] + channel;
    const int64_t row = documents.entering(document);
    return initial == nullptr || row < 0 ? kZeros : initial + (row * kept + kept + position) * C + channel;
  }

  Rows<T> rows;
  const T* initial;
  int64_t C;
  const Documents& documents;
  int64_t kept;  // W - 1
};

// Calls body(document, begin, end) on the parts of [begin, end) that the documents own.
template <class Body>
void for_each_piece(const Documents& documents, int64_t begin, int64_t end, Body body) {
  const auto& offsets = documents.offsets();
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), begin);
  for (int64_t document = after - offsets.begin() - 1; begin < end; ++document) {
    const int64_t stop = std::min(end, documents.end(document));
    if (begin < stop) body(document, begin, stop);
    begin = stop;
  }
}

// The convolution on one strip of channels.
template <int W, ConvActivation kActivation, class T>
struct Strip {
  Strip(const T* w, int64_t first_channel, int64_t num_channels)
      : first(first_channel), width(std::min(kStrip, num_channels - first_channel)) {
    for (int64_t c = 0; c < width; ++c)
      for (int j = 0; j < W; ++j) weight[j][c] = w[(first + c) * W + j];
  }

  void find_taps(const Inputs<T>& in, int64_t document, int64_t position, const T* taps[W]) const {
    for (int j = 0; j < W; ++j) taps[j] = in.at(document, position - (W - 1) + j, first);
  }

  [[gnu::always_inline]] T convolve(const T* const taps[W], int64_t c) const {
    T u = T(0);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) u += weight[j][c] * taps[j][c];
    return u;
  }

  void forward(T* y, const T* const taps[W]) const {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const T u = convolve(taps, c);
      y[c] = kActivation == ConvActivation::kSilu ? u * vector_sigmoid(u) : u;
    }
  }

  void gradient_before_activation(T* du, const T* dy, const T* const taps[W]) const {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      if constexpr (kActivation == ConvActivation::kSilu) {
        const T u = convolve(taps, c);
        const T open = vector_sigmoid(u);
        du[c] = dy[c] * open * (T(1) + u * (T(1) - open));
      } else {
        du[c] = dy[c];
      }
    }
  }

  void add_weight_gradient(T (&sum)[W][kStrip], const T* du, const T* const taps[W]) const {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) sum[j][c] += du[c] * taps[j][c];
    }
  }

  int64_t first, width;
  T weight[W][kStrip];
};

// du of the last W tokens, by position; a row of zeros after the document's end.
template <int W, class T>
struct RecentGradients {
  T* operator[](int64_t position) { return rows[position % W]; }
  T rows[W][kStrip];
};

template <int W, ConvActivation kActivation, class T>
void conv_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& initial,
                  const Documents& documents) {
  const Inputs<T> in(x, initial, documents, W);
  const Rows<T> y_rows(y);
  const T* weights = w.data<T>();
  const int64_t N = x.dim(0), C = x.dim(1), strips = ceil_div(C, kStrip);
  parallel_ranges(ceil_div(N, kTokensPerSum) * strips, 1, [=, &in, &documents](int64_t tile, int64_t) {
    const Strip<W, kActivation, T> strip(weights, tile % strips * kStrip, C);
    const int64_t begin = tile / strips * kTokensPerSum;
    for_each_piece(documents, begin, std::min(N, begin + kTokensPerSum),
                   [&](int64_t document, int64_t from, int64_t to) {
                     const T* taps[W];
                     for (int64_t t = from; t < to; ++t) {
                       strip.find_taps(in, document, t - documents.begin(document), taps);
                       strip.forward(y_rows[t] + strip.first, taps);
                     }
                   });
  });
}

template <int W, ConvActivation kActivation, class T>
void conv_backward(Stream& stream, const Tensor& dx, const Tensor& dw, const Tensor& dy, const Tensor& x,
                   const Tensor& w, const Tensor& initial, const Tensor& d_final, const Documents& documents) {
  const Inputs<T> in(x, initial, documents, W);
  const Rows<T> dx_rows(dx), dy_rows(dy);
  const T *weights = w.data<T>(), *final_gradient = d_final.defined() ? d_final.data<T>() : nullptr;
  const int64_t N = x.dim(0), C = x.dim(1), strips = ceil_div(C, kStrip);
  const Arena::Scope scope(stream.scratch());
  const Tensor sums = allocate_token_sums(stream, dw.dtype(), N, C * W);
  const Rows<T> sum_rows(sums);

  parallel_ranges(sums.dim(0) * strips, 1, [=, &in, &documents](int64_t tile, int64_t) {
    const Strip<W, kActivation, T> strip(weights, tile % strips * kStrip, C);
    const int64_t block = tile / strips, first = strip.first, width = strip.width;
    RecentGradients<W, T> du;
    T sum[W][kStrip] = {};
    auto piece = [&](int64_t document, int64_t from, int64_t to) {
      const int64_t start = documents.begin(document), length = documents.length(document);
      const T* taps[W];
      // dx of a token needs du of the W-1 tokens after it: those after the piece are computed here again.
      for (int64_t t = from - start; t < to - start + W - 1; ++t) {
        if (t < length) {
          strip.find_taps(in, document, t, taps);
          strip.gradient_before_activation(du[t], dy_rows[start + t] + first, taps);
          if (t < to - start) strip.add_weight_gradient(sum, du[t], taps);
        } else {
          std::fill_n(du[t], width, T(0));
        }
        const int64_t p = t - (W - 1);
        if (p < from - start) continue;
        T* to_x = dx_rows[start + p] + first;
        const T* after[W];
        for (int j = 0; j < W; ++j) after[j] = du[t - j];
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) to_x[c] = strip.convolve(after, c);
        const int64_t kept = p - (length - (W - 1));  // row of the final state that holds this input
        const int64_t row = documents.leaving(document);
        if (final_gradient != nullptr && row >= 0 && kept >= 0) {
          const T* more = final_gradient + (row * (W - 1) + kept) * C + first;
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) to_x[c] += more[c];
        }
      }
    };
    for_each_piece(documents, block * kTokensPerSum, std::min(N, (block + 1) * kTokensPerSum), piece);
    T* out = sum_rows[block] + first * W;
    for (int64_t c = 0; c < width; ++c)
      for (int j = 0; j < W; ++j) out[c * W + j] = sum[j][c];
  });
  add_token_sums(dw.data<T>(), sums);
}

// d_initial: row r is the input at position r - (W-1), which the first r+1 tokens read.
template <int W, ConvActivation kActivation, class T>
void conv_backward_initial(const Tensor& d_initial, const Tensor& dy, const Tensor& x, const Tensor& w,
                           const Tensor& initial, const Tensor& d_final, const Documents& documents) {
  const Inputs<T> in(x, initial, documents, W);
  const Rows<T> dy_rows(dy);
  const T *weights = w.data<T>(), *final_gradient = d_final.defined() ? d_final.data<T>() : nullptr;
  T* out = d_initial.data<T>();
  const int64_t C = x.dim(1), strips = ceil_div(C, kStrip);
  parallel_ranges(documents.count() * strips, 1, [=, &in, &documents](int64_t tile, int64_t) {
    const Strip<W, kActivation, T> strip(weights, tile % strips * kStrip, C);
    const int64_t document = tile / strips, length = documents.length(document);
    const int64_t entering = documents.entering(document), leaving = documents.leaving(document);
    if (entering < 0) return;
    RecentGradients<W, T> du;
    const T* taps[W];
    for (int64_t r = 0; r < W - 1; ++r) {
      if (r < length) {
        strip.find_taps(in, document, r, taps);
        strip.gradient_before_activation(du[r], dy_rows[documents.begin(document) + r] + strip.first, taps);
      }
      T* to = out + (entering * (W - 1) + r) * C + strip.first;
      const T* more = nullptr;  // the row is part of the final state of a document shorter than W-1
      if (final_gradient != nullptr && leaving >= 0 && r >= length)
        more = final_gradient + (leaving * (W - 1) + r - length) * C + strip.first;
      for (int64_t c = 0; c < strip.width; ++c) {
        T sum = more == nullptr ? T(0) : more[c];
        for (int64_t t = 0; t <= std::min(r, length - 1); ++t) sum += strip.weight[r - t][c] * du[t][c];
        to[c] = sum;
      }
    }
  });
}

// body(width, activation, T{}) with the first two as compile-time constants.
template <class Body>
void with_variant(const Tensor& w, ConvActivation activation, Body body) {
  auto with_width = [&](auto width) {
    with_real(w.dtype(), [&](auto zero) {
      if (activation == ConvActivation::kSilu)
        body(width, std::integral_constant<ConvActivation, ConvActivation::kSilu>{}, zero);
      else
        body(width, std::integral_constant<ConvActivation, ConvActivation::kNone>{}, zero);
    });
  };
  switch (w.dim(2)) {
    case 1:
      return with_width(std::integral_constant<int, 1>{});
    case 2:
      return with_width(std::integral_constant<int, 2>{});
    case 3:
      return with_width(std::integral_constant<int, 3>{});
    default:
      return with_width(std::integral_constant<int, 4>{});
  }
}

}  // namespace

void short_conv_forward(Stream&, Tensor y, const Tensor& x, const Tensor& w, const Tensor& initial,
                        const Documents& documents, ConvActivation activation) {
  with_variant(w, activation, [&](auto width, auto act, auto zero) {
    conv_forward<width(), act(), decltype(zero)>(y, x, w, initial, documents);
  });
}

void short_conv_backward(Stream& stream, Tensor dx, Tensor dw, Tensor d_initial, const Tensor& dy, const Tensor& x,
                         const Tensor& w, const Tensor& initial, const Tensor& d_final, const Documents& documents,
                         ConvActivation activation) {
  with_variant(w, activation, [&](auto width, auto act, auto zero) {
    using T = decltype(zero);
    conv_backward<width(), act(), T>(stream, dx, dw, dy, x, w, initial, d_final, documents);
    if (d_initial.defined()) conv_backward_initial<width(), act(), T>(d_initial, dy, x, w, initial, d_final, documents);
  });
}

void short_conv_final_state(Stream&, Tensor final_state, const Tensor& x, const Tensor& initial,
                            const Documents& documents) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t kept = final_state.dim(1), C = x.dim(1);
    const Rows<T> rows(x);
    const T* from_initial = initial.defined() ? initial.data<T>() : nullptr;
    T* out = final_state.data<T>();
    for (int64_t document = 0; document < documents.count(); ++document) {
      const int64_t length = documents.length(document);
      const int64_t entering = documents.entering(document), leaving = documents.leaving(document);
      if (leaving < 0) continue;
      // Ascending rows: when final_state is initial, every row is read before it is overwritten.
      for (int64_t r = 0; r < kept; ++r) {
        const int64_t position = length - kept + r;
        T* to = out + (leaving * kept + r) * C;
        const T* from = nullptr;
        if (position >= 0)
          from = rows[documents.begin(document) + position];
        else if (from_initial != nullptr && entering >= 0)
          from = from_initial + (entering * kept + kept + position) * C;
        if (from == nullptr)
          std::fill_n(to, C, T(0));
        else if (from != to)
          std::copy_n(from, C, to);
      }
    }
  });
}

}  // namespace palimpsest::cpu
