// Keys and values of multi-head latent attention (DeepSeek-V2, 2024) from the expanded latent and the shared key:
//   kv [N, H, dn + dv]: per head dn key rows, then dv value rows;   k_pe [N, dr]: one shared positional key a token
//   k [N, H, dn + dr] = concat(kv[.., :dn], k_pe)                   v [N, H, dv] = kv[.., dn:]
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

// k and v overwritten, contiguous; kv and k_pe rows may be spaced.
PALIMPSEST_OP(mla_keys_values_forward, Stream& stream, Tensor k, Tensor v, const Tensor& kv, const Tensor& k_pe);
// dkv and dk_pe (summed over heads) overwritten.
PALIMPSEST_OP(mla_keys_values_backward, Stream& stream, Tensor dkv, Tensor dk_pe, const Tensor& dk, const Tensor& dv);

}  // namespace palimpsest
