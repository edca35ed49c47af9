// What other CUDA backends use of the elementwise ops.
#pragma once

#include "kernels/stream.h"

namespace palimpsest::cuda {

// to = from, of one shape: bf16 in f32, and f32 rounded to bf16.
void widen_to_f32(const Stream& stream, const Tensor& to, const Tensor& from);
void round_to_bf16(const Stream& stream, const Tensor& to, const Tensor& from);

}  // namespace palimpsest::cuda
