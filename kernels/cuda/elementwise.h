// What other CUDA backends use of the elementwise ops.
#pragma once

#include "kernels/stream.h"

namespace palimpsest::cuda {

// A weight [N, C] in the operands' dtype: itself, or f32 rounded to bf16 in scratch memory.
Tensor rounded(const Stream& stream, const Tensor& w, DType dtype);

}  // namespace palimpsest::cuda
