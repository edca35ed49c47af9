// Sums over tokens, for the gradients of weights: every block of kTokensPerSum tokens sums into a row of its own, and
// the rows are added in order. The result depends neither on the number of threads nor on their speed.
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

constexpr int64_t kTokensPerSum = 64;

// Workspace: [ceil(num_tokens / kTokensPerSum), width], uninitialised.
inline Tensor allocate_token_sums(const Stream& stream, DType dtype, int64_t num_tokens, int64_t width) {
  return stream.scratch().allocate(dtype, {(num_tokens + kTokensPerSum - 1) / kTokensPerSum, width});
}

// For public op functions: makes a rehearsal count the workspace that the backend will take.
inline void count_token_sums(const Stream& stream, DType dtype, int64_t num_tokens, int64_t width) {
  const Arena::Scope scope(stream.scratch());
  allocate_token_sums(stream, dtype, num_tokens, width);
}

}  // namespace palimpsest
