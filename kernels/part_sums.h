// Sums of parts that ranks have computed of the same tensor.
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

// y [n, D] = own [n, D] + the parts of others [k * n, D], k >= 1, one after the other. y may be `own`. Contiguous; f32
// or f64, on a GPU f32 or bf16, which is summed in f32 and rounded once.
PALIMPSEST_OP(add_parts, Stream& stream, Tensor y, const Tensor& own, const Tensor& others);

}  // namespace palimpsest
