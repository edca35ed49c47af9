// What other CUDA backends use of the elementwise ops.
#pragma once

#include "kernels/stream.h"

namespace palimpsest::cuda {

// to = from, rounded: bf16 [N, C] from f32 [N, C].
void round_to_bf16(const Stream& stream, const Tensor& to, const Tensor& from);

}  // namespace palimpsest::cuda
