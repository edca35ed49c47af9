#include "kernels/expert_rows.h"

#include "kernels/cpu/blas.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"

namespace palimpsest::cpu {

namespace {

constexpr int64_t kTokens = 16;  // of one range

// body(e, first row, rows) for each expert that was given any.
template <class Body>
void for_each_expert(const Tensor& offsets, Body body) {
  const int32_t* offset = offsets.data<int32_t>();
  for (int64_t e = 0; e + 1 < offsets.dim(0); ++e)
    if (offset[e + 1] > offset[e]) body(e, int64_t{offset[e]}, int64_t{offset[e + 1] - offset[e]});
}

}  // namespace

// Counting sort: stable, and linear in the rows.
void sort_by_expert(Stream&, const ExpertRows& rows, const Tensor& experts) {
  const int64_t N = experts.dim(0), k = experts.dim(1), E = rows.offsets.dim(0) - 1;
  const Rows<int32_t> chosen(experts), row_of(rows.row_of);
  int32_t* offset = rows.offsets.data<int32_t>();
  int32_t* token_of = rows.token_of.data<int32_t>();
  std::fill_n(offset, E + 1, 0);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t j = 0; j < k; ++j) {
      const int32_t e = chosen[n][j];
      CHECK(e >= 0 && e < E, "token ", n, " chose expert ", e, " of ", E);
      ++offset[e + 1];
    }
  }
  for (int64_t e = 0; e < E; ++e) offset[e + 1] += offset[e];
  // offset[e] runs from the begin to the end of e's rows, which is where e + 1 begins.
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t j = 0; j < k; ++j) {
      const int32_t row = offset[chosen[n][j]]++;
      row_of[n][j] = row;
      token_of[row] = static_cast<int32_t>(n);
    }
  }
  for (int64_t e = E; e > 0; --e) offset[e] = offset[e - 1];
  offset[0] = 0;
}

void gather_expert_rows(Stream&, Tensor rows, const Tensor& x, const Tensor& token_of) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> to(rows), from(x);
    const int32_t* token = token_of.data<int32_t>();
    const int64_t D = x.dim(1);
    parallel_ranges(rows.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) std::copy_n(from[token[r]], D, to[r]);
    });
  });
}

void sum_expert_rows(Stream&, Tensor y, const Tensor& rows, const Tensor& row_of, Write write) {
  with_real(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> to(y), from(rows);
    const Rows<int32_t> places(row_of);
    const int64_t D = y.dim(1), k = row_of.dim(1);
    parallel_ranges(y.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        T* sum = to[n];
        if (write == Write::kOverwrite) std::fill_n(sum, D, T(0));
        for (int64_t j = 0; j < k; ++j) {
          const T* row = from[places[n][j]];
#pragma omp simd
          for (int64_t i = 0; i < D; ++i) sum[i] += row[i];
        }
      }
    });
  });
}

void scale_expert_rows_forward(Stream&, Tensor y, const Tensor& x, const Tensor& weights, const Tensor& row_of) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> to(y), from(x), weight(weights);
    const Rows<int32_t> places(row_of);
    const int64_t F = x.dim(1), k = row_of.dim(1);
    parallel_ranges(row_of.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t j = 0; j < k; ++j) {
          const T w = weight[n][j];
          const T* in = from[places[n][j]];
          T* out = to[places[n][j]];
#pragma omp simd
          for (int64_t i = 0; i < F; ++i) out[i] = w * in[i];
        }
      }
    });
  });
}

void scale_expert_rows_backward(Stream&, Tensor dx, Tensor d_weights, const Tensor& dy, const Tensor& x,
                                const Tensor& weights, const Tensor& row_of) {
  with_real(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> to(dx), d_weight(d_weights), gradient(dy), value(x), weight(weights);
    const Rows<int32_t> places(row_of);
    const int64_t F = dy.dim(1), k = row_of.dim(1);
    parallel_ranges(row_of.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t j = 0; j < k; ++j) {
          const int64_t r = places[n][j];
          const T w = weight[n][j];
          const T *d = gradient[r], *v = value[r];
          T* out = to[r];
          d_weight[n][j] = lane_sum<T>(F, [=](int64_t i) { return d[i] * v[i]; });
#pragma omp simd
          for (int64_t i = 0; i < F; ++i) out[i] = w * d[i];
        }
      }
    });
  });
}

void grouped_linear_forward(Stream&, Tensor y, const Tensor& x, const Tensor& w, const Tensor& offsets) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> out(y), in(x), weight(w);
    const int64_t O = y.dim(1), I = x.dim(1);
    for_each_expert(offsets, [=](int64_t e, int64_t first, int64_t count) {
      gemm(Transpose::kNo, Transpose::kYes, count, O, I, T(1), in[first], in.stride, weight[e * O], weight.stride, T(0),
           out[first], out.stride);
    });
  });
}

void grouped_linear_backward_input(Stream&, Tensor dx, const Tensor& dy, const Tensor& w, const Tensor& offsets) {
  with_real(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> out(dx), gradient(dy), weight(w);
    const int64_t O = dy.dim(1), I = dx.dim(1);
    for_each_expert(offsets, [=](int64_t e, int64_t first, int64_t count) {
      gemm(Transpose::kNo, Transpose::kNo, count, I, O, T(1), gradient[first], gradient.stride, weight[e * O],
           weight.stride, T(0), out[first], out.stride);
    });
  });
}

void grouped_linear_backward_weight(Stream&, Tensor dw, const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  with_real(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> out(dw), gradient(dy), in(x);
    const int64_t O = dy.dim(1), I = x.dim(1);
    for_each_expert(offsets, [=](int64_t e, int64_t first, int64_t count) {
      gemm(Transpose::kYes, Transpose::kNo, O, I, count, T(1), gradient[first], gradient.stride, in[first], in.stride,
           T(1), out[e * O], out.stride);
    });
  });
}

void token_gate_forward(Stream&, Tensor y, const Tensor& x, const Tensor& z) {
  with_real(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> to(y), from(x), gate(z);
    const int64_t D = x.dim(1);
    parallel_ranges(x.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const T open = vector_sigmoid(gate[n][0]);
        const T* in = from[n];
        T* out = to[n];
#pragma omp simd
        for (int64_t i = 0; i < D; ++i) out[i] = open * in[i];
      }
    });
  });
}

void token_gate_backward(Stream&, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z) {
  with_real(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> to(dx), d_gate(dz), gradient(dy), value(x), gate(z);
    const int64_t D = dy.dim(1);
    parallel_ranges(dy.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const T open = vector_sigmoid(gate[n][0]);
        const T *d = gradient[n], *v = value[n];
        T* out = to[n];
        d_gate[n][0] = open * (T(1) - open) * lane_sum<T>(D, [=](int64_t i) { return d[i] * v[i]; });
#pragma omp simd
        for (int64_t i = 0; i < D; ++i) out[i] = open * d[i];
      }
    });
  });
}

}  // namespace palimpsest::cpu
