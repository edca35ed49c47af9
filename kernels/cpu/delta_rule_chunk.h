// One chunk of the chunkwise delta rule: its activated inputs, the sums of its log decays, and its matrices. Forward
// and backward both start from these.
//
// For a chunk of C tokens with entry state S0 [K, V], with sum(a, b] the sum of g over the rows a+1 .. b:
//
//   G_i = sum(0, i], U_j = sum(j, C], D_ij = sum(j, i]
//   Qb = q * exp(G), Kb = k * exp(G), Kt = k * exp(U)                                      [C, K]
//   Aqk_ij = sum_c q_ic k_jc exp(D_ijc), j <= i;  P_ij = sum_c k_ic k_jc exp(D_ijc), j < i  [C, C]
//   M = (I + diag(beta) P)^-1, kept as N = M - I, strictly lower
//   R = V - Kb S0,  X = M diag(beta) R,  O = scale (Qb S0 + Aqk X),  S_C = Diag(exp G_C) S0 + Kt^T X
//
// Every exponent is a sum over the segment that it spans, never a difference of longer sums, and so is at most 0. A
// pair (i, j) belongs to the one level h = 1, 2, 4 .. where i lies in the second and j in the first half of the same
// aligned block of 2h rows; with r the last row of the first half, D_ij = sum(r, i] + sum(j, r], one factor a row.
//
// Rows past the document's end hold q = k = v = beta = g = 0, so that no formula has a special case. A chunk computes
// on `rows`, the power of two that holds its tokens.
#pragma once

#include <bit>

#include "kernels/cpu/delta_rule_heads.h"
#include "kernels/cpu/small_matrix.h"

namespace palimpsest::cpu {

constexpr int64_t kInverseTile = 4;  // rows, see ChunkMatrices::invert

// Extents of the buffers of a chunk. Kp and Vp are K and V padded with zeros to whole vectors.
struct ChunkSizes {
  int64_t C, K, V, Kp, Vp;
  template <class T>
  static ChunkSizes of(const DeltaRuleShape& s, const DeltaRuleOptions& options) {
    return {.C = options.chunk_size, .K = s.K, .V = s.V, .Kp = padded<T>(s.K), .Vp = padded<T>(s.V)};
  }
};

// Copies n rows of `size` numbers and fills up with zeros to `rows` rows of ld numbers.
template <class T>
void load_rows(int64_t n, int64_t size, HeadRows<const T> source, int64_t rows, int64_t ld, T* target) {
  for (int64_t i = 0; i < n; ++i) {
    std::copy_n(source[i], size, target + i * ld);
    std::fill(target + i * ld + size, target + (i + 1) * ld, T(0));
  }
  std::fill(target + n * ld, target + rows * ld, T(0));
}

// The first `size` numbers of n rows, back to where they came from.
template <class T>
void store_rows(int64_t n, int64_t size, const T* source, int64_t ld, HeadRows<T> target) {
  for (int64_t i = 0; i < n; ++i) std::copy_n(source + i * ld, size, target[i]);
}

// A state [K, V] as a buffer [Kp, Vp], null being zero, and back.
template <class T>
void load_state(const ChunkSizes& sizes, const T* state, T* buffer) {
  load_rows(state == nullptr ? 0 : sizes.K, sizes.V, HeadRows<const T>(state, sizes.V), sizes.Kp, sizes.Vp, buffer);
}
template <class T>
void store_state(const ChunkSizes& sizes, const T* buffer, T* state) {
  if (state != nullptr) store_rows(sizes.K, sizes.V, buffer, sizes.Vp, HeadRows<T>(state, sizes.V));
}

template <class T>
T dot(int64_t n, const T* a, const T* b) {
  return lane_sum<T>(n, [a, b](int64_t i) { return a[i] * b[i]; });
}

// Activated inputs of one chunk and its decay factors.
template <class T, Decay decay>
class ChunkInputs {
 public:
  const ChunkSizes sizes;
  const int64_t W;         // decay channels in the buffers: Kp, 1 or 0
  int64_t n = 0;           // tokens
  int64_t rows = 0;        // rows that are computed on, n <= rows <= C
  T *q, *k;                // [C, Kp]
  T *q_factor, *k_factor;  // [C] of the l2 norm
  T *beta, *beta_slope;    // [C] beta and 1 - beta / beta_scale
  T* g;                    // [C, W]
  T *exp_pre, *exp_suf;    // [C, W] exp(G), exp(U)
  T *Qb, *Kb, *Kt;         // [C, Kp]
  T *level_q, *level_k;    // [C, Kp] q and k times the factors of the current level
  T* factor;               // [C, W] factors of the current level

  ChunkInputs(Carver<T>& carver, const ChunkSizes& chunk_sizes)
      : sizes(chunk_sizes),
        W(decay == Decay::kVector   ? chunk_sizes.Kp
          : decay == Decay::kScalar ? 1
                                    : 0),
        q(carver.take(sizes.C * sizes.Kp)),
        k(carver.take(sizes.C * sizes.Kp)),
        q_factor(carver.take(sizes.C)),
        k_factor(carver.take(sizes.C)),
        beta(carver.take(sizes.C)),
        beta_slope(carver.take(sizes.C)),
        g(carver.take(sizes.C * W)),
        exp_pre(carver.take(sizes.C * W)),
        exp_suf(carver.take(sizes.C * W)),
        Qb(decay == Decay::kNone ? q : carver.take(sizes.C * sizes.Kp)),
        Kb(decay == Decay::kNone ? k : carver.take(sizes.C * sizes.Kp)),
        Kt(decay == Decay::kNone ? k : carver.take(sizes.C * sizes.Kp)),
        level_q(carver.take(decay == Decay::kVector ? sizes.C * sizes.Kp : 0)),
        level_k(carver.take(decay == Decay::kVector ? sizes.C * sizes.Kp : 0)),
        factor(carver.take(sizes.C * W)),
        pre_(carver.take(sizes.C * W)),
        suf_(carver.take(sizes.C * W)) {}

  // Tokens first .. first + count - 1 of the document.
  void load(const DocumentHead<T>& head, int64_t first, int64_t count) {
    n = count;
    rows = std::max({static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count))), kWidth<T>, kInverseTile});
    clear_padding(q);
    clear_padding(k);
    std::fill_n(beta, rows, T(0));
    std::fill_n(beta_slope, rows, T(0));
    std::fill_n(g, rows * W, T(0));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t t = first + i;
      q_factor[i] = normalise_row(head.options, sizes.K, head.q[t], q + i * sizes.Kp);
      k_factor[i] = normalise_row(head.options, sizes.K, head.k[t], k + i * sizes.Kp);
      if (head.delta) {
        beta[i] = head.beta_scale * vector_sigmoid(head.beta_logit[t][0]);
        beta_slope[i] = vector_sigmoid(-head.beta_logit[t][0]);
      }
      if constexpr (decay != Decay::kNone) head.gate.forward(head.gate_logit[t], g + i * W);
    }
    if constexpr (decay == Decay::kNone) return;
    start_levels();
    for (int64_t h = 1; h < rows; h *= 2) next_level(h);
#pragma omp simd
    for (int64_t i = 0; i < rows * W; ++i) {
      exp_pre[i] = vector_exp(pre_[i]);
      exp_suf[i] = vector_exp(suf_[i]);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = i * sizes.Kp;
#pragma omp simd
      for (int64_t c = 0; c < sizes.Kp; ++c) {
        const T pre = exp_pre[i * W + channel(c)];
        Qb[row + c] = q[row + c] * pre;
        Kb[row + c] = k[row + c] * pre;
        Kt[row + c] = k[row + c] * exp_suf[i * W + channel(c)];
      }
    }
  }

  // Factor of the entry state's row c over the whole chunk.
  T chunk_decay(int64_t c) const {
    return decay == Decay::kNone ? T(1) : exp_pre[(rows - 1) * W + channel(c)];
  }

  // state <- Diag(exp G_C) state, a buffer [Kp, Vp].
  void decay_state(T* state) const {
    if constexpr (decay == Decay::kNone) return;
    for (int64_t c = 0; c < sizes.K; ++c) {
      const T factor_of_row = chunk_decay(c);
#pragma omp simd
      for (int64_t j = 0; j < sizes.Vp; ++j) state[c * sizes.Vp + j] *= factor_of_row;
    }
  }

  // Calls visit(h) for the levels h = 1, 2, 4 .. with `factor` of that level: exp sum(r, i] in second halves,
  // exp sum(j, r] in first halves; for vector decay with level_q and level_k too.
  template <class Visit>
  void for_each_level(Visit visit) {
    start_levels();
    for (int64_t h = 1; h < rows; h *= 2) {
      for (int64_t i = 0; i < rows; ++i) {
        const T* __restrict sums = ((i & h) != 0 ? pre_ : suf_) + i * W;
        T* __restrict f = factor + i * W;
#pragma omp simd
        for (int64_t c = 0; c < W; ++c) f[c] = vector_exp(sums[c]);
        if constexpr (decay == Decay::kVector) {
          const int64_t row = i * sizes.Kp;
#pragma omp simd
          for (int64_t c = 0; c < sizes.Kp; ++c) {
            level_q[row + c] = q[row + c] * f[c];
            level_k[row + c] = k[row + c] * f[c];
          }
        }
      }
      visit(h);
      next_level(h);
    }
  }

 private:
  static constexpr int64_t channel(int64_t c) {
    return decay == Decay::kVector ? c : 0;
  }

  void clear_padding(T* matrix) const {
    if (sizes.K < sizes.Kp)
      for (int64_t i = 0; i < n; ++i) std::fill(matrix + i * sizes.Kp + sizes.K, matrix + (i + 1) * sizes.Kp, T(0));
    std::fill(matrix + n * sizes.Kp, matrix + rows * sizes.Kp, T(0));
  }

  // Over aligned blocks of h rows, pre is the sum from the block's first row to a row, itself included, and suf from
  // the row after it to the block's last.
  void start_levels() {
    std::copy_n(g, rows * W, pre_);
    std::fill_n(suf_, rows * W, T(0));
  }
  void next_level(int64_t h) {
    for (int64_t block = 0; block < rows; block += 2 * h) {
      const T* __restrict first_total = pre_ + (block + h - 1) * W;
      const T* __restrict second_total = pre_ + (block + 2 * h - 1) * W;
      for (int64_t i = block; i < block + h; ++i) {
        T* __restrict suf = suf_ + i * W;
#pragma omp simd
        for (int64_t c = 0; c < W; ++c) suf[c] += second_total[c];
      }
      for (int64_t i = block + h; i < block + 2 * h; ++i) {
        T* __restrict pre = pre_ + i * W;
#pragma omp simd
        for (int64_t c = 0; c < W; ++c) pre[c] += first_total[c];
      }
    }
  }

  T *pre_, *suf_;  // [C, W]
};

// The chunk's matrices, each [C, C] with zeros where the text above gives no value.
template <class T, Decay decay, DeltaRule delta>
class ChunkMatrices {
 public:
  T *aqk, *p, *n;  // Aqk; P, which inverting turns into L; N = M - I. The last two with the delta rule only
  T* d;            // exp(D) with ones on the diagonal; scalar decay only

  ChunkMatrices(Carver<T>& carver, const ChunkSizes& sizes)
      : aqk(carver.take(sizes.C * sizes.C)),
        p(carver.take(kDelta ? sizes.C * sizes.C : 0)),
        n(carver.take(kDelta ? sizes.C * sizes.C : 0)),
        d(carver.take(decay == Decay::kScalar ? sizes.C * sizes.C : 0)),
        transposed_(carver.take(sizes.Kp * sizes.C)) {}

  // Aqk and P.
  void compute_scores(ChunkInputs<T, decay>& in) {
    const int64_t C = in.sizes.C, K = in.sizes.K, Kp = in.sizes.Kp, rows = in.rows;
    if constexpr (decay == Decay::kVector) {
      std::fill_n(aqk, rows * C, T(0));
      if constexpr (kDelta) std::fill_n(p, rows * C, T(0));
      for (int64_t i = 0; i < rows; ++i) aqk[i * C + i] = dot(K, in.q + i * Kp, in.k + i * Kp);
      in.for_each_level([&](int64_t h) {
        switch (h) {
          case 1:
            level_by_dots<1>(in);
            break;
          case 2:
            level_by_dots<2>(in);
            break;
          case 4:
            level_by_dots<4>(in);
            break;
          case 8:
            level_by_dots<8>(in);
            break;
          default:
            level_by_products(in, h);
        }
      });
    } else {
      transpose(rows, Kp, in.k, Kp, transposed_, C);
      product(rows, rows, K, T(1), rows_of(in.q, Kp), transposed_, C, Into::kSet, aqk, C);
      if constexpr (kDelta) product(rows, rows, K, T(1), rows_of(in.k, Kp), transposed_, C, Into::kSet, p, C);
      if constexpr (decay == Decay::kScalar) compute_decays(in);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < rows; ++j) {
          const T factor = j > i ? T(0) : decay == Decay::kScalar ? d[i * C + j] : T(1);
          aqk[i * C + j] *= factor;
          if constexpr (kDelta) p[i * C + j] *= j == i ? T(0) : factor;
        }
      }
    }
  }

  // N from P, which becomes L = diag(beta) P: row i of (I + L)(I + N) = I is N_i = -(L_i + sum_{j<i} L_ij N_j). The
  // rows above a tile of kTile rows come in by a product, those inside it one by one.
  void invert(const ChunkInputs<T, decay>& in) {
    constexpr int64_t kTile = kInverseTile;
    const int64_t C = in.sizes.C;
    for (int64_t tile = 0; tile < in.rows; tile += kTile) {
      for (int64_t i = tile; i < tile + kTile; ++i) {
#pragma omp simd
        for (int64_t c = 0; c < in.rows; ++c) {
          p[i * C + c] *= in.beta[i];
          n[i * C + c] = -p[i * C + c];
        }
      }
      product(kTile, padded<T>(tile), tile, T(-1), rows_of(p + tile * C, C), n, C, Into::kAdd, n + tile * C, C);
      for (int64_t i = tile + 1; i < tile + kTile; ++i) {
        T* __restrict row = n + i * C;
        for (int64_t j = tile; j < i; ++j) {
          const T* __restrict above = n + j * C;
          const T weight = p[i * C + j];
#pragma omp simd
          for (int64_t c = 0; c < in.rows; ++c) row[c] -= weight * above[c];
        }
      }
    }
  }

 private:
  static constexpr bool kDelta = delta == DeltaRule::kOn;

  // Pairs of a level whose half is smaller than a vector: kWidth dot products at a time.
  template <int64_t h>
  void level_by_dots(const ChunkInputs<T, decay>& in) {
    if constexpr (h < kWidth<T>) {
      constexpr int64_t kRows = kWidth<T> / h;  // rows of second halves at a time
      const int64_t C = in.sizes.C, Kp = in.sizes.Kp, num_second = in.rows / 2;
      const auto second_row = [](int64_t s) { return s / h * 2 * h + h + s % h; };
      for (int64_t s = 0; s < num_second; s += kRows) {
        int64_t row[kRows];
        for (int64_t r = 0; r < kRows; ++r) row[r] = second_row(std::min(s + r, num_second - 1));
        const auto first = [&](int p_) { return in.level_k + (row[p_ / h] / (2 * h) * 2 * h + p_ % h) * Kp; };
        const auto scores = [&](const T* second, T* matrix) {
          T results[kWidth<T>];
          store(results, dots<T>(
                             Kp, [&](int p_) { return second + row[p_ / h] * Kp; }, first));
          for (int64_t r = 0; r < kRows && s + r < num_second; ++r)
            std::copy_n(results + r * h, h, matrix + row[r] * C + row[r] / (2 * h) * 2 * h);
        };
        scores(in.level_q, aqk);
        if constexpr (kDelta) scores(in.level_k, p);
      }
    } else {
      level_by_products(in, h);
    }
  }

  void level_by_products(const ChunkInputs<T, decay>& in, int64_t h) {
    const int64_t C = in.sizes.C, K = in.sizes.K, Kp = in.sizes.Kp;
    for (int64_t first = 0; first < in.rows; first += 2 * h) {
      const int64_t second = first + h;
      transpose(h, Kp, in.level_k + first * Kp, Kp, transposed_, C);
      product(h, h, K, T(1), rows_of(in.level_q + second * Kp, Kp), transposed_, C, Into::kSet,
              aqk + second * C + first, C);
      if constexpr (kDelta)
        product(h, h, K, T(1), rows_of(in.level_k + second * Kp, Kp), transposed_, C, Into::kSet,
                p + second * C + first, C);
    }
  }

  void compute_decays(ChunkInputs<T, decay>& in) {
    const int64_t C = in.sizes.C;
    std::fill_n(d, in.rows * C, T(0));
    for (int64_t i = 0; i < in.rows; ++i) d[i * C + i] = T(1);
    in.for_each_level([&](int64_t h) {
      for (int64_t i = 0; i < in.rows; ++i) {
        if ((i & h) == 0) continue;
        const int64_t first = i / (2 * h) * 2 * h;
        for (int64_t j = first; j < first + h; ++j) d[i * C + j] = in.factor[i] * in.factor[j];
      }
    });
  }

  T* transposed_;  // [Kp, C]
};

}  // namespace palimpsest::cpu
