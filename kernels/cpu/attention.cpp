// Blocks of kBlock queries against blocks of kBlock keys, each counted from the document's start, so that a document's
// numbers do not depend on its place in the batch. Products of blocks go through the BLAS; blocks in the future are
// skipped.
//
// Backward, with P = exp(scale q k^T - lse) and delta_i = d_o_i . o_i:
//   dv = P^T d_o      dS = P * (d_o v^T - delta) * scale      dq = dS k      dk = dS^T q
#include "kernels/attention.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/blas.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"

namespace palimpsest::cpu {

namespace {

constexpr int64_t kBlock = 64;

// The rows of one head of a [tokens, heads, size] tensor, one document's tokens counted from 0.
template <class T>
struct Head {
  Head(const Tensor& tensor, int64_t first_token, int64_t head)
      : data(tensor.data<T>() + first_token * tensor.row_stride() + head * tensor.dim(2)),
        stride(tensor.row_stride()),
        size(tensor.dim(2)) {}
  T* operator[](int64_t token) const { return data + token * stride; }

  T* data;
  int64_t stride, size;
};

template <class T>
using Scores = T[kBlock * kBlock];  // row i, column j at i * kBlock + j

// scores = scale * q k^T of one pair of blocks.
template <class T>
void multiply_scores(Scores<T>& scores, const Head<T>& q, int64_t first_query, int64_t num_queries, const Head<T>& k,
                     int64_t first_key, int64_t num_keys, T scale) {
  gemm(Transpose::kNo, Transpose::kYes, num_queries, num_keys, q.size, scale, q[first_query], q.stride, k[first_key],
       k.stride, T(0), scores, kBlock);
}

// Where a block of queries starts: with no key yet, or with o and lse of the keys before.
enum class Start : uint8_t { kEmpty, kContinue };

// o and lse of the queries [first, first + count) of one document and head against num_keys keys, of which query i sees
// 0 .. i + ahead.
template <class T>
void forward_block(const Head<T>& o, T* lse, int64_t lse_stride, const Head<T>& q, const Head<T>& k, const Head<T>& v,
                   int64_t first, int64_t count, int64_t num_keys, int64_t ahead, T scale, Start start) {
  alignas(64) Scores<T> scores;
  T maximum[kBlock], sum[kBlock];
  const bool empty = start == Start::kEmpty;
  for (int64_t i = 0; i < count; ++i) {
    maximum[i] = empty ? -std::numeric_limits<T>::infinity() : lse[(first + i) * lse_stride];
    sum[i] = empty ? T(0) : T(1);
  }
  const int64_t seen = std::min(num_keys, first + count + ahead);  // keys that the last query sees
  for (int64_t begin = 0; begin < seen; begin += kBlock) {
    const int64_t width = std::min(kBlock, seen - begin);
    multiply_scores(scores, q, first, count, k, begin, width, scale);
    for (int64_t i = 0; i < count; ++i) {
      T* row = scores + i * kBlock;
      const int64_t visible = std::clamp<int64_t>(first + i + ahead + 1 - begin, 0, width);
      T block_maximum = maximum[i];
#pragma omp simd reduction(max : block_maximum)
      for (int64_t j = 0; j < visible; ++j) block_maximum = row[j] > block_maximum ? row[j] : block_maximum;
#pragma omp simd
      for (int64_t j = 0; j < visible; ++j) row[j] = vector_exp(row[j] - block_maximum);
      std::fill(row + visible, row + width, T(0));
      const T keep = vector_exp(maximum[i] - block_maximum);
      sum[i] = sum[i] * keep + lane_sum<T>(visible, [=](int64_t j) { return row[j]; });
      maximum[i] = block_maximum;
      if ((begin > 0 || !empty) && keep != T(1)) {
        T* out = o[first + i];
#pragma omp simd
        for (int64_t c = 0; c < o.size; ++c) out[c] *= keep;
      }
    }
    gemm(Transpose::kNo, Transpose::kNo, count, o.size, width, T(1), scores, kBlock, v[begin], v.stride,
         begin == 0 && empty ? T(0) : T(1), o[first], o.stride);
  }
  for (int64_t i = 0; i < count; ++i) {
    T* out = o[first + i];
    const T norm = T(1) / sum[i];
#pragma omp simd
    for (int64_t c = 0; c < o.size; ++c) out[c] *= norm;
    lse[(first + i) * lse_stride] = maximum[i] + std::log(sum[i]);
  }
}

// One document and query head of backward.
template <class T>
struct BackwardHead {
  BackwardHead(const AttentionBackwardArgs& args, int64_t start, int64_t head, int64_t kv_head, bool overwrites_keys)
      : dq(args.dq, start, head),
        dk(args.dk, start, kv_head),
        dv(args.dv, start, kv_head),
        d_o(args.d_o, start, head),
        q(args.q, start, head),
        k(args.k, start, kv_head),
        v(args.v, start, kv_head),
        o(args.o, start, head),
        lse(args.lse.data<T>() + start * args.q.dim(1) + head),
        lse_stride(args.q.dim(1)),
        scale(static_cast<T>(args.scale)),
        first_of_group(overwrites_keys) {}

  // Queries [first, first + count) against every key they see.
  void block(int64_t first, int64_t count) const {
    T delta[kBlock];
    fill_delta(first, count, delta);
    for (int64_t begin = 0; begin < first + count; begin += kBlock) {
      const bool diagonal = begin == first;
      // The diagonal block is the first that reaches these keys.
      block_pair(first, count, begin, diagonal ? count : kBlock, diagonal, diagonal && first_of_group ? T(0) : T(1),
                 begin == 0 ? T(0) : T(1), delta);
    }
  }

  // Queries [first, first + count) against num_keys earlier keys; adds to all gradients.
  void prefix_block(int64_t first, int64_t count, int64_t num_keys) const {
    T delta[kBlock];
    fill_delta(first, count, delta);
    for (int64_t begin = 0; begin < num_keys; begin += kBlock)
      block_pair(first, count, begin, std::min(kBlock, num_keys - begin), false, T(1), T(1), delta);
  }

  void fill_delta(int64_t first, int64_t count, T* delta) const {
    for (int64_t i = 0; i < count; ++i) {
      const T *a = d_o[first + i], *b = o[first + i];
      delta[i] = lane_sum<T>(o.size, [=](int64_t c) { return a[c] * b[c]; });
    }
  }

  // One block of queries and keys [begin, begin + width); keep and keep_dq are the factors of what dk, dv and dq hold.
  void block_pair(int64_t first, int64_t count, int64_t begin, int64_t width, bool diagonal, T keep, T keep_dq,
                  const T* delta) const {
    alignas(64) Scores<T> p;
    alignas(64) Scores<T> ds;
    multiply_scores(p, q, first, count, k, begin, width, scale);
    gemm(Transpose::kNo, Transpose::kYes, count, width, v.size, T(1), d_o[first], d_o.stride, v[begin], v.stride, T(0),
         ds, kBlock);
    for (int64_t i = 0; i < count; ++i) {
      T *p_row = p + i * kBlock, *ds_row = ds + i * kBlock;
      const int64_t visible = diagonal ? i + 1 : width;
      const T log_sum = lse[(first + i) * lse_stride], d = delta[i];
#pragma omp simd
      for (int64_t j = 0; j < visible; ++j) {
        p_row[j] = vector_exp(p_row[j] - log_sum);
        ds_row[j] = p_row[j] * (ds_row[j] - d) * scale;
      }
      std::fill(p_row + visible, p_row + width, T(0));
      std::fill(ds_row + visible, ds_row + width, T(0));
    }
    gemm(Transpose::kYes, Transpose::kNo, width, v.size, count, T(1), p, kBlock, d_o[first], d_o.stride, keep,
         dv[begin], dv.stride);
    gemm(Transpose::kYes, Transpose::kNo, width, q.size, count, T(1), ds, kBlock, q[first], q.stride, keep, dk[begin],
         dk.stride);
    gemm(Transpose::kNo, Transpose::kNo, count, q.size, width, T(1), ds, kBlock, k[begin], k.stride, keep_dq, dq[first],
         dq.stride);
  }

  Head<T> dq, dk, dv, d_o, q, k, v, o;
  const T* lse;
  int64_t lse_stride;
  T scale;
  bool first_of_group;  // the query head that overwrites dk and dv; the others of its group add
};

}  // namespace

void attention_forward(Stream&, Tensor o, Tensor lse, const Tensor& q, const Tensor& k, const Tensor& v, double scale,
                       const Documents& queries, const Documents& keys) {
  with_real(q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t H = q.dim(1), group = H / k.dim(1);
#pragma omp parallel
    for (int64_t document = 0; document < queries.count(); ++document) {
      const int64_t length = queries.length(document), blocks = ceil_div(length, kBlock);
      const int64_t first_query = queries.begin(document), first_key = keys.begin(document);
      // Late blocks see most keys: they go first, so that threads end together.
#pragma omp for schedule(dynamic) collapse(2) nowait
      for (int64_t reverse = 0; reverse < blocks; ++reverse)
        for (int64_t h = 0; h < H; ++h) {
          const int64_t begin = (blocks - 1 - reverse) * kBlock;
          forward_block(Head<T>(o, first_query, h), lse.data<T>() + first_query * H + h, H, Head<T>(q, first_query, h),
                        Head<T>(k, first_key, h / group), Head<T>(v, first_key, h / group), begin,
                        std::min(kBlock, length - begin), keys.length(document), keys.length(document) - length,
                        static_cast<T>(scale), Start::kEmpty);
        }
    }
  });
}

void attention_backward(Stream&, const AttentionBackwardArgs& args, const Documents& documents) {
  with_real(args.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t H = args.q.dim(1), HKV = args.k.dim(1), group = H / HKV;
    // The query heads of a group and their blocks add to dk and dv one after the other, in a fixed order.
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t document = 0; document < documents.count(); ++document)
      for (int64_t kv_head = 0; kv_head < HKV; ++kv_head) {
        const int64_t start = documents.begin(document), length = documents.length(document);
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
          const BackwardHead<T> head(args, start, h, kv_head, h == kv_head * group);
          for (int64_t begin = 0; begin < length; begin += kBlock) head.block(begin, std::min(kBlock, length - begin));
        }
      }
  });
}

void attention_prefix_forward(Stream&, Tensor o, Tensor lse, const Tensor& q, const Tensor& k, const Tensor& v,
                              double scale) {
  with_real(q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t N = q.dim(0), H = q.dim(1), group = H / k.dim(1), num_keys = k.dim(0);
    parallel_ranges(ceil_div(N, kBlock) * H, 1, [&](int64_t task, int64_t) {
      const int64_t h = task % H, begin = task / H * kBlock;
      forward_block(Head<T>(o, 0, h), lse.data<T>() + h, H, Head<T>(q, 0, h), Head<T>(k, 0, h / group),
                    Head<T>(v, 0, h / group), begin, std::min(kBlock, N - begin), num_keys, num_keys,
                    static_cast<T>(scale), Start::kContinue);
    });
  });
}

void attention_prefix_backward(Stream&, const AttentionBackwardArgs& args) {
  with_real(args.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t N = args.q.dim(0), H = args.q.dim(1), HKV = args.k.dim(1), group = H / HKV;
    parallel_ranges(HKV, 1, [&](int64_t kv_head, int64_t) {
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const BackwardHead<T> head(args, 0, h, kv_head, false);
        for (int64_t begin = 0; begin < N; begin += kBlock)
          head.prefix_block(begin, std::min(kBlock, N - begin), args.k.dim(0));
      }
    });
  });
}

}  // namespace palimpsest::cpu
