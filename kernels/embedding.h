// Token embedding: x_n = E[token_n].
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

// The rows of a vocabulary that a table holds: ids [begin, begin + rows of the table) of `total`.
struct VocabRange {
  int64_t begin = 0;
  int64_t total = 0;
};

// x [N, D] = table [Vl, D] f32 (f64 or f32 for f64) at tokens [N] i32; 0 for ids that another rank's table holds. The
// ids were checked against the vocabulary when they were read from disk; the CPU backend checks again and throws an
// Error.
PALIMPSEST_OP(embedding_forward, Stream& stream, Tensor x, const Tensor& tokens, const Tensor& table,
              const VocabRange& range);
// dtable [Vl, D] += dx [N, D] scattered to the rows of the tokens, in a fixed order (no atomics: bit-reproducible).
PALIMPSEST_OP(embedding_backward, Stream& stream, Tensor dtable, const Tensor& dx, const Tensor& tokens,
              const VocabRange& range);

// The same with a table that holds the whole vocabulary.
void embedding_forward(Stream& stream, Tensor x, const Tensor& tokens, const Tensor& table);
void embedding_backward(Stream& stream, Tensor dtable, const Tensor& dx, const Tensor& tokens);

}  // namespace palimpsest
