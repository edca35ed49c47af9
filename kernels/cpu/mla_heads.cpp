#include "kernels/mla_heads.h"

#include "kernels/cpu/loops.h"

namespace palimpsest::cpu {

namespace {

constexpr int64_t kTokens = 16;  // of one range

}  // namespace

void mla_keys_values_forward(Stream&, Tensor k, Tensor v, const Tensor& kv, const Tensor& k_pe) {
  with_real(kv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t H = kv.dim(1), dv = v.dim(2), dn = kv.dim(2) - dv, dr = k_pe.dim(1);
    const Rows<T> k_rows(k), v_rows(v), kv_rows(kv), k_pe_rows(k_pe);
    parallel_ranges(kv.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t h = 0; h < H; ++h) {
          const T* from = kv_rows[n] + h * (dn + dv);
          T* key = k_rows[n] + h * (dn + dr);
          std::copy_n(from, dn, key);
          std::copy_n(k_pe_rows[n], dr, key + dn);
          std::copy_n(from + dn, dv, v_rows[n] + h * dv);
        }
    });
  });
}

void mla_keys_values_backward(Stream&, Tensor dkv, Tensor dk_pe, const Tensor& dk, const Tensor& dv_in) {
  with_real(dk.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t H = dk.dim(1), dv = dv_in.dim(2), dn = dkv.dim(2) - dv, dr = dk_pe.dim(1);
    const Rows<T> dkv_rows(dkv), dk_pe_rows(dk_pe), dk_rows(dk), dv_rows(dv_in);
    parallel_ranges(dk.dim(0), kTokens, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        T* shared = dk_pe_rows[n];
        std::fill_n(shared, dr, T(0));
        for (int64_t h = 0; h < H; ++h) {
          const T* d_key = dk_rows[n] + h * (dn + dr);
          T* to = dkv_rows[n] + h * (dn + dv);
          std::copy_n(d_key, dn, to);
          std::copy_n(dv_rows[n] + h * dv, dv, to + dn);
#pragma omp simd
          for (int64_t i = 0; i < dr; ++i) shared[i] += d_key[dn + i];
        }
      }
    });
  });
}

}  // namespace palimpsest::cpu
