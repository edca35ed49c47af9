#include "kernels/embedding.h"

#include "kernels/cpu/loops.h"

namespace palimpsest::cpu {

namespace {

void check_ids(const int32_t* ids, int64_t count, int64_t vocabulary) {
  for (int64_t n = 0; n < count; ++n)
    CHECK(ids[n] >= 0 && ids[n] < vocabulary, "token ", n, " has id ", ids[n], ", the vocabulary has ", vocabulary);
}

}  // namespace

void embedding_forward(Stream&, Tensor x, const Tensor& tokens, const Tensor& table, const VocabRange& range) {
  const int32_t* ids = tokens.data<int32_t>();
  check_ids(ids, tokens.dim(0), range.total);
  const int64_t rows_begin = range.begin, num_rows = table.dim(0);
  with_residual(table.dtype(), x.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    using R = decltype(wide);
    const Rows<R> to(x);
    const Rows<T> from(table);
    const int64_t D = x.dim(1);
    constexpr int64_t kTokens = 64;
    parallel_ranges(x.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = ids[n] - rows_begin;
        if (row >= 0 && row < num_rows) {
          std::copy_n(from[row], D, to[n]);
        } else {
          std::fill_n(to[n], D, R(0));
        }
      }
    });
  });
}

// Every range of columns adds the tokens in their order, so no two threads meet in a row.
void embedding_backward(Stream&, Tensor dtable, const Tensor& dx, const Tensor& tokens, const VocabRange& range) {
  const int32_t* ids = tokens.data<int32_t>();
  check_ids(ids, tokens.dim(0), range.total);
  const int64_t rows_begin = range.begin, num_rows = dtable.dim(0);
  with_residual(dtable.dtype(), dx.dtype(), [&](auto zero, auto wide) {
    using T = decltype(zero);
    using R = decltype(wide);
    const Rows<T> to(dtable);
    const Rows<R> from(dx);
    const int64_t N = dx.dim(0);
    constexpr int64_t kColumns = 128;
    parallel_ranges(dx.dim(1), kColumns, [=](int64_t begin, int64_t end) {
      for (int64_t n = 0; n < N; ++n) {
        const int64_t row = ids[n] - rows_begin;
        if (row < 0 || row >= num_rows) continue;
        T* sum = to[row];
        const R* gradient = from[n];
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) sum[i] += static_cast<T>(gradient[i]);
      }
    });
  });
}

}  // namespace palimpsest::cpu
