// Token embedding: x_n = E[token_n].
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

// x [N, D] = table [V, D] at tokens [N] i32. The ids were checked against V when they were read from disk; the CPU
// backend checks again and throws an Error.
PALIMPSEST_OP(embedding_forward, Stream& stream, Tensor x, const Tensor& tokens, const Tensor& table);
// dtable [V, D] += dx [N, D] scattered to the rows of the tokens, in a fixed order (no atomics: bit-reproducible).
PALIMPSEST_OP(embedding_backward, Stream& stream, Tensor dtable, const Tensor& dx, const Tensor& tokens);

}  // namespace palimpsest
