// The chunkwise form of the delta rule, backward. Beside the equations of kernels/cpu/delta_rule_chunk.h, for a chunk
// with dS [K, V] the cotangent of S_C, from the last chunk to the first:
//
//   dX = scale Aqk^T dO + Kt dS        Y = M^T dX        dR = dV = diag(beta) Y                          [C, V]
//   dA = tril(scale dO X^T)            dP = -tril(dR X^T, -1)                                            [C, C]
//   dQb = scale dO S0^T                dKb = -dR S0^T    dKt = X dS^T                                    [C, K]
//   dbeta_i = Y_i . X_i / beta_i, and so dlogit_i = (Y_i . X_i) (1 - beta_i / beta_scale)
//   dS0 = Diag(exp G_C) dS + scale Qb^T dO - Kb^T dR
//
// With E_ij = exp(D_ij), at each level one factor a row:
//
//   dq_i = dQb_i exp(G_i) + sum_{j<=i} dA_ij k_j E_ij
//   dk_i = dKb_i exp(G_i) + sum_{j<i} dP_ij k_j E_ij                       (kr: k read as a query)
//        + sum_{l>=i} dA_li q_l E_li + sum_{l>i} dP_li k_l E_li            (kc: k as a key inside the chunk)
//        + dKt_i exp(U_i)                                                  (kt: k towards the chunk's end)
//
// dg without cancellation: every use of a decay factor adds (factor * its cotangent) to dg_t for the t of its segment:
//
//   tot = exp(G_C) rowsum(S0 * dS)                                         segment (0, C]
//   H_i = (q_i dQb_i + k_i dKb_i) exp(G_i)                                 segment (0, i]
//   N_j = k_j kt_j                                                         segment (j, C]
//   R_i = q_i dq_i + k_i kr_i of a level, rows i of second halves          segment (r, i]
//   C_j = k_j kc_j of a level, rows j of first halves                      segment (j, r]
//
// Nothing is subtracted, and with S0 = 0 the dg of a document's first token is exactly 0.
#include "kernels/cpu/delta_rule_chunk_forward.h"
#include "kernels/cpu/delta_rule_forms.h"

namespace palimpsest::cpu {

namespace {

constexpr int kMaxLevels = 6;  // h = 1 .. 32

// Working memory of one chunk of backward.
template <class T, Decay decay, DeltaRule delta>
struct BackwardBuffers {
  ChunkForwardBuffers<T, decay, delta> forward;
  T *dstate, *state_t, *dstate_t;  // [Kp, Vp], and both states transposed [Vp, Kp]
  T* d_o;                          // [C, Vp] scale dO
  T *dx, *dr;                      // [C, Vp] dX, then Y; dR
  T* x_t;                          // [Vp, C]
  T *da, *dp;                      // [C, C]
  T *dq, *dk;                      // [C, Kp] of the activated q and k
  T* dkt;                          // [C, Kp]
  T *part_a, *part_p;              // [C, Kp] products of one level
  T* uses[kMaxLevels];             // [C, W] R and C of each level
  T *dpre, *dsuf;                  // [C, W] H and N, then the sums of the transposed scan
  T* totals;                       // [C, W] of the scan's blocks, one block's in its first row
  T *dg_row, *ddt_bias;            // [W]

  BackwardBuffers(Carver<T>& carver, const ChunkSizes& sizes)
      : forward(carver, sizes),
        dstate(carver.take(sizes.Kp * sizes.Vp)),
        state_t(carver.take(sizes.Kp * sizes.Vp)),
        dstate_t(carver.take(sizes.Kp * sizes.Vp)),
        d_o(carver.take(sizes.C * sizes.Vp)),
        dx(carver.take(sizes.C * sizes.Vp)),
        dr(carver.take(sizes.C * sizes.Vp)),
        x_t(carver.take(sizes.Vp * sizes.C)),
        da(carver.take(sizes.C * sizes.C)),
        dp(carver.take(sizes.C * sizes.C)),
        dq(carver.take(sizes.C * sizes.Kp)),
        dk(carver.take(sizes.C * sizes.Kp)),
        dkt(carver.take(sizes.C * sizes.Kp)),
        part_a(carver.take(sizes.C * sizes.Kp)),
        part_p(carver.take(sizes.C * sizes.Kp)) {
    const int64_t W = forward.in.W;
    for (T*& use : uses) use = carver.take(sizes.C * W);
    dpre = carver.take(sizes.C * W);
    dsuf = carver.take(sizes.C * W);
    totals = carver.take(sizes.C * W);
    dg_row = carver.take(W);
    ddt_bias = carver.take(W);
  }
};

// What backward recomputes when forward did not keep it: room for a whole document and head.
template <class T>
struct RecomputedDocument {
  T *m = nullptr, *aqk = nullptr, *x = nullptr, *states = nullptr;
  ChunkSizes sizes;

  // Documents have at most N tokens.
  RecomputedDocument(Carver<T>& carver, const ChunkSizes& chunk_sizes, const DeltaRuleOptions& options, int64_t N)
      : sizes(chunk_sizes) {
    if (options.save_level < SaveLevel::kMatrices) {
      if (options.delta_rule == DeltaRule::kOn) m = carver.take(N * sizes.C);
      aqk = carver.take(N * sizes.C);
    }
    if (options.save_level < SaveLevel::kAll) {
      x = carver.take(N * sizes.V);
      states = carver.take(std::max<int64_t>(N - 1, 0) / sizes.C * sizes.K * sizes.V);
    }
  }

  // The store with what it lacks directed here.
  ChunkStore<T> complete(ChunkStore<T> store) const {
    if (m != nullptr) store.m = HeadRows<T>(m, sizes.C);
    if (aqk != nullptr) store.aqk = HeadRows<T>(aqk, sizes.C);
    if (x != nullptr) store.x = HeadRows<T>(x, sizes.V);
    if (states != nullptr) {
      store.states = states;
      store.state_stride = sizes.K * sizes.V;
    }
    return store;
  }
};

template <class T, Decay decay, DeltaRule delta>
class ChunkBackward {
 public:
  ChunkBackward(const DocumentHead<T>& head, const DocumentHeadGrads<T>& grads,
                BackwardBuffers<T, decay, delta>& buffers, const ChunkStore<T>& store)
      : head_(head),
        grads_(grads),
        b_(buffers),
        in_(buffers.forward.in),
        matrices_(buffers.forward.matrices),
        store_(store),
        C(buffers.forward.sizes.C),
        K(buffers.forward.sizes.K),
        V(buffers.forward.sizes.V),
        Kp(buffers.forward.sizes.Kp),
        Vp(buffers.forward.sizes.Vp),
        W(buffers.forward.in.W) {}

  void run() {
    load_state(b_.forward.sizes, grads_.d_final_state, b_.dstate);
    const int64_t num_chunks = (head_.length + C - 1) / C;
    for (int64_t chunk = num_chunks - 1; chunk >= 0; --chunk) {
      load(chunk);
      solve();
      if (!grads_.state_alone()) differentiate_inputs();
      advance_state();
    }
    store_state(b_.forward.sizes, b_.dstate, grads_.d_initial_state);
  }

 private:
  static constexpr bool kDelta = delta == DeltaRule::kOn;

  void load(int64_t chunk) {
    first_ = chunk * C;
    n_ = std::min(C, head_.length - first_);
    zero_entry_ = chunk == 0 && head_.initial_state == nullptr;
    zero_exit_ = first_ + n_ == head_.length && grads_.d_final_state == nullptr;
    in_.load(head_, first_, n_);

    const int64_t rows = in_.rows;
    load_rows<T>(n_, V, {store_.x[first_], store_.x.stride}, rows, Vp, b_.forward.x);
    load_state<T>(b_.forward.sizes, chunk == 0 ? head_.initial_state : store_.state(chunk), b_.forward.state);
    if constexpr (decay == Decay::kScalar) {
      matrices_.compute_scores(in_);  // P is not kept
    } else {
      load_rows<T>(n_, rows, {store_.aqk[first_], store_.aqk.stride}, rows, C, matrices_.aqk);
    }
    if constexpr (kDelta) load_rows<T>(n_, rows, {store_.m[first_], store_.m.stride}, rows, C, matrices_.n);
    load_rows(n_, V, grads_.d_o.from(first_), rows, Vp, b_.d_o);
    for (int64_t i = 0; i < n_ * Vp; ++i) b_.d_o[i] *= head_.scale;
  }

  // What load will read of the whole chunk that starts at this token.
  [[gnu::always_inline]] void prefetch(int64_t first) const {
    prefetch_rows(C, K, head_.q.from(first));
    prefetch_rows(C, K, head_.k.from(first));
    prefetch_rows(C, head_.gate.channels(), head_.gate_logit.from(first));
    prefetch_rows(C, V, grads_.d_o.from(first));
    prefetch_rows(C, V, store_.x.from(first));
    prefetch_rows(C, C, store_.aqk.from(first));
    prefetch_rows(C, C, store_.m.from(first));
  }

  void differentiate_inputs() {
    differentiate_products();
    gather_entry_and_exit();
    if constexpr (decay == Decay::kVector) {
      differentiate_scores_by_level();
    } else {
      differentiate_scores();
    }
    if constexpr (decay != Decay::kNone) {
      if (head_.gate.has_gradient()) {
        scan_dg();
        store_gate_gradients();
      }
    }
    store_qk_gradients();
  }

  // dX, Y, dR = dV and dlogit of beta.
  void solve() {
    if (first_ > 0) prefetch(first_ - C);
    const T one = 1;
    product<Part::kUpper>(in_.rows, Vp, n_, one, columns_of(matrices_.aqk, C), b_.d_o, Vp, Into::kSet, b_.dx, Vp);
    if (!zero_exit_) product(in_.rows, Vp, K, one, rows_of(in_.Kt, Kp), b_.dstate, Vp, Into::kAdd, b_.dx, Vp);
    std::copy_n(b_.dx, in_.rows * Vp, b_.dr);
    if constexpr (kDelta) {
      product<Part::kUpper>(in_.rows, Vp, n_, one, columns_of(matrices_.n, C), b_.dx, Vp, Into::kAdd, b_.dr, Vp);
      // dlogit of beta needs Y.
      if (!grads_.state_alone())
        for (int64_t i = 0; i < n_; ++i)
          *grads_.dbeta_logit[first_ + i] = dot(Vp, b_.dr + i * Vp, b_.forward.x + i * Vp) * in_.beta_slope[i];
      for (int64_t i = 0; i < in_.rows; ++i) {
#pragma omp simd
        for (int64_t j = 0; j < Vp; ++j) b_.dr[i * Vp + j] *= in_.beta[i];
      }
    }
    if (!grads_.state_alone()) store_rows(n_, V, b_.dr, Vp, grads_.dv.from(first_));
  }

  // dA, dP, and dQb, dKb, dKt (into dq, dk, dkt).
  void differentiate_products() {
    const int64_t rows = in_.rows;
    const T one = 1;
    transpose(rows, Vp, b_.forward.x, Vp, b_.x_t, C);
    product<Part::kFull, Part::kLower>(rows, rows, V, one, rows_of(b_.d_o, Vp), b_.x_t, C, Into::kSet, b_.da, C);
    if constexpr (kDelta)
      product<Part::kFull, Part::kLower>(rows, rows, V, -one, rows_of(b_.dr, Vp), b_.x_t, C, Into::kSet, b_.dp, C);
    std::fill_n(b_.dq, rows * Kp, T(0));
    std::fill_n(b_.dk, rows * Kp, T(0));
    std::fill_n(b_.dkt, rows * Kp, T(0));
    if (!zero_entry_) {
      transpose(Kp, Vp, b_.forward.state, Vp, b_.state_t, Kp);
      product(rows, Kp, V, one, rows_of(b_.d_o, Vp), b_.state_t, Kp, Into::kSet, b_.dq, Kp);
      if constexpr (kDelta) product(rows, Kp, V, -one, rows_of(b_.dr, Vp), b_.state_t, Kp, Into::kSet, b_.dk, Kp);
    }
    if (!zero_exit_) {
      transpose(Kp, Vp, b_.dstate, Vp, b_.dstate_t, Kp);
      product(rows, Kp, V, one, rows_of(b_.forward.x, Vp), b_.dstate_t, Kp, Into::kSet, b_.dkt, Kp);
    }
  }

  // The uses that reach the chunk's borders: starts dq and dk, and dpre = H, dsuf = N, totals = tot; and the diagonal
  // of dA, which has no decay.
  void gather_entry_and_exit() {
    for (int64_t i = 0; i < in_.rows; ++i) {
      const T* __restrict q = in_.q + i * Kp;
      const T* __restrict k = in_.k + i * Kp;
      const T* __restrict dkt = b_.dkt + i * Kp;
      T* __restrict dq = b_.dq + i * Kp;
      T* __restrict dk = b_.dk + i * Kp;
      const T diagonal = b_.da[i * C + i];
      if constexpr (decay == Decay::kVector) {
        const T* __restrict exp_pre = in_.exp_pre + i * Kp;
        const T* __restrict exp_suf = in_.exp_suf + i * Kp;
        T* __restrict dpre = b_.dpre + i * Kp;
        T* __restrict dsuf = b_.dsuf + i * Kp;
#pragma omp simd
        for (int64_t c = 0; c < Kp; ++c) {
          const T q_entry = dq[c] * exp_pre[c], k_entry = dk[c] * exp_pre[c], k_exit = dkt[c] * exp_suf[c];
          dpre[c] = q[c] * q_entry + k[c] * k_entry;
          dsuf[c] = k[c] * k_exit;
          dq[c] = q_entry + diagonal * k[c];
          dk[c] = k_entry + k_exit + diagonal * q[c];
        }
      } else {
        const T exp_pre = decay == Decay::kScalar ? in_.exp_pre[i] : T(1);
        const T exp_suf = decay == Decay::kScalar ? in_.exp_suf[i] : T(1);
        if constexpr (decay == Decay::kScalar) {
          b_.dpre[i] = exp_pre * lane_sum<T>(Kp, [=](int64_t c) { return q[c] * dq[c] + k[c] * dk[c]; });
          b_.dsuf[i] = exp_suf * dot(Kp, k, dkt);
        }
#pragma omp simd
        for (int64_t c = 0; c < Kp; ++c) {
          dq[c] = dq[c] * exp_pre;
          dk[c] = dk[c] * exp_pre + dkt[c] * exp_suf;
        }
      }
    }
    if constexpr (decay == Decay::kVector) {
      std::fill_n(b_.totals, Kp, T(0));
      for (int64_t c = 0; c < K; ++c)
        b_.totals[c] = in_.chunk_decay(c) * dot(Vp, b_.forward.state + c * Vp, b_.dstate + c * Vp);
    } else if constexpr (decay == Decay::kScalar) {
      b_.totals[0] = in_.chunk_decay(0) * dot(K * Vp, b_.forward.state, b_.dstate);
    }
  }

  // Vector decay: the pairs of every level, into dq, dk and `uses`.
  void differentiate_scores_by_level() {
    int level = 0;
    in_.for_each_level([&](int64_t h) {
      const T one = 1;
      for (int64_t first = 0; first < in_.rows; first += 2 * h) {
        const int64_t second = first + h;
        const T* da = b_.da + second * C + first;
        const T* dp = b_.dp + second * C + first;
        const T *k1 = in_.level_k + first * Kp, *q2 = in_.level_q + second * Kp, *k2 = in_.level_k + second * Kp;
        product(h, Kp, h, one, rows_of(da, C), k1, Kp, Into::kSet, b_.part_a + second * Kp, Kp);
        product(h, Kp, h, one, columns_of(da, C), q2, Kp, Into::kSet, b_.part_a + first * Kp, Kp);
        if constexpr (kDelta) {
          product(h, Kp, h, one, rows_of(dp, C), k1, Kp, Into::kSet, b_.part_p + second * Kp, Kp);
          product(h, Kp, h, one, columns_of(dp, C), k2, Kp, Into::kAdd, b_.part_a + first * Kp, Kp);
        }
      }
      for (int64_t i = 0; i < in_.rows; ++i) {
        const T* __restrict factor = in_.factor + i * Kp;
        const T* __restrict level_q = in_.level_q + i * Kp;
        const T* __restrict level_k = in_.level_k + i * Kp;
        const T* __restrict part_a = b_.part_a + i * Kp;
        const T* __restrict part_p = b_.part_p + i * Kp;
        T* __restrict dq = b_.dq + i * Kp;
        T* __restrict dk = b_.dk + i * Kp;
        T* __restrict use = b_.uses[level] + i * Kp;
        if ((i & h) == 0) {
#pragma omp simd
          for (int64_t c = 0; c < Kp; ++c) {
            dk[c] += factor[c] * part_a[c];
            use[c] = level_k[c] * part_a[c];
          }
          continue;
        }
#pragma omp simd
        for (int64_t c = 0; c < Kp; ++c) {
          dq[c] += factor[c] * part_a[c];
          use[c] = level_q[c] * part_a[c];
          if constexpr (kDelta) {
            dk[c] += factor[c] * part_p[c];
            use[c] += level_k[c] * part_p[c];
          }
        }
      }
      ++level;
    });
  }

  // Scalar or no decay: whole score matrices.
  void differentiate_scores() {
    const int64_t rows = in_.rows;
    const T one = 1;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < rows; ++j) {
        if (j > i) b_.da[i * C + j] = 0;
        if constexpr (kDelta)
          if (j >= i) b_.dp[i * C + j] = 0;
      }
    }
    if constexpr (decay == Decay::kScalar) {
      sum_scores_by_level();
      for (int64_t i = 0; i < rows; ++i) {
#pragma omp simd
        for (int64_t j = 0; j < rows; ++j) {
          b_.da[i * C + j] *= matrices_.d[i * C + j];
          if constexpr (kDelta) b_.dp[i * C + j] *= matrices_.d[i * C + j];
        }
      }
    }
    product<Part::kLower>(rows, Kp, rows, one, rows_of(b_.da, C), in_.k, Kp, Into::kAdd, b_.dq, Kp);
    product<Part::kUpper>(rows, Kp, rows, one, columns_of(b_.da, C), in_.q, Kp, Into::kAdd, b_.dk, Kp);
    if constexpr (kDelta) {
      product<Part::kLower>(rows, Kp, rows, one, rows_of(b_.dp, C), in_.k, Kp, Into::kAdd, b_.dk, Kp);
      product<Part::kUpper>(rows, Kp, rows, one, columns_of(b_.dp, C), in_.k, Kp, Into::kAdd, b_.dk, Kp);
    }
  }

  // Scalar decay: R and C of every level are sums over rows and columns of Z = dA * Aqk + dP * P.
  void sum_scores_by_level() {
    const int64_t rows = in_.rows;
    int level = 0;
    for (int64_t h = 1; h < rows; h *= 2, ++level) {
      std::fill_n(b_.uses[level], rows, T(0));
      for (int64_t i = 0; i < rows; ++i) {
        if ((i & h) == 0) continue;
        for (int64_t j = i / (2 * h) * 2 * h; j < i / (2 * h) * 2 * h + h; ++j) {
          T z = b_.da[i * C + j] * matrices_.aqk[i * C + j];
          if constexpr (kDelta) z += b_.dp[i * C + j] * matrices_.p[i * C + j];
          b_.uses[level][i] += z;
          b_.uses[level][j] += z;
        }
      }
    }
  }

  // The transposed scan, from whole chunk to single rows: every block of 2h rows with total t splits into halves with
  // totals t + (dpre summed over the second half) and t + (dsuf summed over the first half); then the uses of level h
  // join. At the end dg_i = dpre_i + the total of row i.
  void scan_dg() {
    const int64_t rows = in_.rows;
    int level = std::countr_zero(static_cast<uint64_t>(rows)) - 1;
    for (int64_t h = rows / 2; h >= 1; h /= 2, --level) {
      for (int64_t first = 0; first < rows; first += 2 * h) {
        const int64_t second = first + h;
        T* __restrict total1 = b_.totals + first * W;
        T* __restrict total2 = b_.totals + second * W;
        std::copy_n(total1, W, total2);
        for (int64_t i = 0; i < h; ++i) {
          const T* __restrict dpre = b_.dpre + (second + i) * W;
          const T* __restrict dsuf = b_.dsuf + (first + i) * W;
#pragma omp simd
          for (int64_t c = 0; c < W; ++c) {
            total1[c] += dpre[c];
            total2[c] += dsuf[c];
          }
        }
      }
      for (int64_t i = 0; i < rows; ++i) {
        T* __restrict sum = ((i & h) != 0 ? b_.dpre : b_.dsuf) + i * W;
        const T* __restrict use = b_.uses[level] + i * W;
#pragma omp simd
        for (int64_t c = 0; c < W; ++c) sum[c] += use[c];
      }
    }
  }

  void store_gate_gradients() {
    std::fill_n(b_.ddt_bias, W, T(0));
    const int64_t channels = head_.gate.channels();
    for (int64_t i = 0; i < n_; ++i) {
      const T* __restrict dpre = b_.dpre + i * W;
      const T* __restrict total = b_.totals + i * W;
      for (int64_t c = 0; c < W; ++c) b_.dg_row[c] = dpre[c] + total[c];
      const T dA_log = head_.gate.backward(head_.gate_logit[first_ + i], in_.g + i * W, b_.dg_row,
                                           grads_.dgate_logit[first_ + i], b_.ddt_bias);
      grads_.parameters[channels] += static_cast<double>(dA_log);
    }
    for (int64_t c = 0; c < channels; ++c) grads_.parameters[c] += static_cast<double>(b_.ddt_bias[c]);
  }

  void store_qk_gradients() {
    for (int64_t i = 0; i < n_; ++i) {
      normalise_row_backward(head_.options, K, in_.q_factor[i], in_.q + i * Kp, b_.dq + i * Kp, grads_.dq[first_ + i],
                             grads_.write);
      normalise_row_backward(head_.options, K, in_.k_factor[i], in_.k + i * Kp, b_.dk + i * Kp, grads_.dk[first_ + i],
                             grads_.write);
    }
  }

  // dS of the chunk's end becomes that of its start.
  void advance_state() {
    in_.decay_state(b_.dstate);
    product(K, Vp, n_, T(1), columns_of(in_.Qb, Kp), b_.d_o, Vp, Into::kAdd, b_.dstate, Vp);
    if constexpr (kDelta) product(K, Vp, n_, T(-1), columns_of(in_.Kb, Kp), b_.dr, Vp, Into::kAdd, b_.dstate, Vp);
  }

  const DocumentHead<T>& head_;
  const DocumentHeadGrads<T>& grads_;
  BackwardBuffers<T, decay, delta>& b_;
  ChunkInputs<T, decay>& in_;
  ChunkMatrices<T, decay, delta>& matrices_;
  const ChunkStore<T>& store_;
  const int64_t C, K, V, Kp, Vp, W;
  int64_t first_ = 0, n_ = 0;                    // the chunk's first token and its tokens
  bool zero_entry_ = false, zero_exit_ = false;  // its S0 or dS is known to be zero
};

}  // namespace

template <class T>
void delta_rule_chunkwise_backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o,
                                   const Tensor& d_final_state, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
                                   const DeltaRuleOptions& options, const Documents& documents) {
  const DeltaRuleShape s = delta_rule_shape(in, documents);
  const ChunkSizes sizes = ChunkSizes::of<T>(s, options);
  const int64_t heads_per_key = s.HV / s.H;
  with_kind(options, [&]<Decay decay, DeltaRule delta>() {
    struct Buffers {
      BackwardBuffers<T, decay, delta> chunk;
      RecomputedDocument<T> document;
      Buffers(Carver<T>& carver, const ChunkSizes& chunk_sizes, const DeltaRuleOptions& op, int64_t N)
          : chunk(carver, chunk_sizes), document(carver, chunk_sizes, op, N) {}
    };
    Arena::Scope scope(stream.scratch());
    const int threads = num_threads_for(s);
    const auto buffers_of_threads = thread_buffers<T>(
        stream.scratch(), threads, [&](Carver<T>& carver) { return Buffers(carver, sizes, options, s.N); });
    const GateParameterSums sums(stream.scratch(), s.HV, in.dt_bias);
    if (stream.is_planning()) return;
    sums.clear();
    for_each_document_head(
        documents, s.HV, heads_per_key, threads, [&](int thread, int64_t group, int64_t document, int64_t value_head) {
          const DocumentHeadGrads<T> head_grads(grads, d_o, d_final_state, documents, document, value_head,
                                                heads_per_key, sums.of(group, value_head));
          if (head_grads.state_alone() && head_grads.d_initial_state == nullptr) return;
          Buffers buffers = buffers_of_threads.of(thread);
          const DocumentHead<T> head(in, options, documents, document, value_head, heads_per_key);
          const ChunkStore<T> store =
              buffers.document.complete(saved_store<T>(saved, sizes.C, documents.begin(document), value_head));
          if (options.save_level < SaveLevel::kAll)
            forward_chunks(head, buffers.chunk.forward,
                           options.save_level == SaveLevel::kNothing ? Matrices::kCompute : Matrices::kLoad, store,
                           HeadRows<T>(), static_cast<T*>(nullptr));
          ChunkBackward<T, decay, delta>(head, head_grads, buffers.chunk, store).run();
        });
    sums.add_to<T>(grads);
  });
}

template void delta_rule_chunkwise_backward<float>(Stream&, const DeltaRuleGrads&, const Tensor&, const Tensor&,
                                                   const DeltaRuleSaved&, const DeltaRuleInputs&,
                                                   const DeltaRuleOptions&, const Documents&);
template void delta_rule_chunkwise_backward<double>(Stream&, const DeltaRuleGrads&, const Tensor&, const Tensor&,
                                                    const DeltaRuleSaved&, const DeltaRuleInputs&,
                                                    const DeltaRuleOptions&, const Documents&);

}  // namespace palimpsest::cpu
