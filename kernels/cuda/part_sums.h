// The sums that end a reduce-scatter: of what this rank has of its own parts and what the others have sent.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "kernels/tensor.h"

namespace palimpsest::cuda {

struct SummedPart {
  Tensor out;
  const void* own;  // of out's size, and may be out
  int64_t offset;   // bytes, in each row, where the others' parts of the same size begin
};
// Each out = the sum over r in 0 .. count - 1, in this order, of its part: `own` for r = own_rank, else the one in one
// of count - 1 rows at `rows`, row_bytes apart, in this order. f32, f64 or bf16, whose sum is f32 and rounded once.
void sum_parts(cudaStream_t queue, std::span<const SummedPart> parts, int own_rank, const void* rows, int64_t row_bytes,
               int count);

}  // namespace palimpsest::cuda
