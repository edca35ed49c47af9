// The sum that ends a reduce-scatter: what this rank has of its own part and what the others have sent.
#pragma once

#include <cuda_runtime.h>

#include "kernels/tensor.h"

namespace palimpsest::cuda {

// out = the sum over r in 0 .. count - 1, in this order, of parts of out's size: the one at `own` for r = own_rank,
// else one of count - 1 at `rows`, row_bytes apart, in this order. f32, f64 or bf16, whose sum is f32 and rounded once.
// `own` may be out.
void sum_parts(cudaStream_t queue, const Tensor& out, const void* own, int own_rank, const void* rows,
               int64_t row_bytes, int count);

}  // namespace palimpsest::cuda
