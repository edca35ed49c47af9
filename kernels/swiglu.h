// SwiGLU (Shazeer, 2020): h = silu(gate) * up.
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

// h [N, F] overwritten; gate_up [N, 2F]: columns [0, F) are gate, [F, 2F) are up.
PALIMPSEST_OP(swiglu_forward, Stream& stream, Tensor h, const Tensor& gate_up);
// d_gate_up [N, 2F] overwritten (may be gate_up); h [N, F] is recomputed and overwritten unless absent.
PALIMPSEST_OP(swiglu_backward, Stream& stream, Tensor d_gate_up, Tensor h, const Tensor& dh, const Tensor& gate_up);

}  // namespace palimpsest
