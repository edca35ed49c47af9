// Causal softmax attention inside documents, in blocks with a running maximum and sum (memory linear in T):
//   p_ij = softmax_{j <= i} (scale * q_i . k_j)        o_i = sum_j p_ij v_j
// Key size K and value size V may differ. Query head h reads key/value head h / (H / HKV).
#pragma once

#include "kernels/documents.h"
#include "kernels/stream.h"

namespace palimpsest {

constexpr int64_t kMaxHeadOnGpus = 256;  // K and V there; free on the CPU
// Throws a UserError that names the supported sizes when the ops cannot serve these on this device; they all ask it.
void check_attention_supported(Device device, int64_t key_size, int64_t value_size);

// o [N, H, V] and lse [N, H] (log of the softmax denominator, kept for backward) overwritten; q [N, H, K]; k [NK, HKV,
// K]; v [NK, HKV, V]; rows may be spaced. lse is f32 (f64 for f64). `queries` splits N, `keys` splits NK, both with the
// same number of documents; query j of document i sees its keys up to and including number length_k(i) - length_q(i) +
// j. In training both are the same; in decoding keys are longer.
PALIMPSEST_OP(attention_forward, Stream& stream, Tensor o, Tensor lse, const Tensor& q, const Tensor& k,
              const Tensor& v, double scale, const Documents& queries, const Documents& keys);

struct AttentionBackwardArgs {
  Tensor dq, dk, dv;       // as q, k, v; overwritten; rows may be spaced
  Tensor d_o, q, k, v, o;  // as in forward
  Tensor lse;              // from forward
  double scale = 1.0;
};
// One set of documents: queries and keys are the same tokens.
PALIMPSEST_OP(attention_backward, Stream& stream, const AttentionBackwardArgs& args, const Documents& documents);

// More keys of one document, all of them before its N queries: each query sees every key. o and lse are those of the
// keys attended to so far, and become those of these keys as well; so attention goes block by block over keys that
// never lie in memory together.
PALIMPSEST_OP(attention_prefix_forward, Stream& stream, Tensor o, Tensor lse, const Tensor& q, const Tensor& k,
              const Tensor& v, double scale);
// The share of one such block in the gradients. o and lse are those of all keys; dq [N, H, K], dk [NK, HKV, K] and dv
// [NK, HKV, V] are accumulated.
PALIMPSEST_OP(attention_prefix_backward, Stream& stream, const AttentionBackwardArgs& args);

}  // namespace palimpsest
