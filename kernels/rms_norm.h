// RMSNorm (Zhang and Sennrich, 2019): y = w * x / sqrt(mean(x^2) + eps). w, rstd and dw are f32 (f64 for f64 input).
// The one-centred kind of Qwen3-Next multiplies by (1 + w).
#pragma once

#include "kernels/stream.h"
#include "kernels/write.h"

namespace palimpsest {

enum class NormWeight : uint8_t { kPlain, kOneCentred };

// x, y [N, D] or [N, H, D] (norm over D, rows may be spaced); w [D]; rstd [N] or [N, H], overwritten, kept for
// backward. x may be of the residual stream, of the next wider type than y and dy. `kept`, where it is there, is a copy
// of x for backward, in the type of x or rounded to that of y.
PALIMPSEST_OP(rms_norm_forward, Stream& stream, Tensor y, Tensor rstd, const Tensor& x, const Tensor& w, double eps,
              NormWeight kind, const Tensor& kept = {});
// dx overwritten (may be dy then) or added to; dw [D] accumulated.
PALIMPSEST_OP(rms_norm_backward, Stream& stream, Tensor dx, Tensor dw, const Tensor& dy, const Tensor& x,
              const Tensor& w, const Tensor& rstd, NormWeight kind, Write write = Write::kOverwrite);

// Gated RMSNorm on the output of a delta-rule mixer, per head over V: y = w * n(o) * phi(z). phi = sigmoid in KDA,
// SiLU in Gated DeltaNet.
enum class GateActivation : uint8_t { kSigmoid, kSilu };

// o, z, y [N, H, V] (rows may be spaced); w [V]; rstd [N, H], overwritten, kept for backward.
PALIMPSEST_OP(gated_rms_norm_forward, Stream& stream, Tensor y, Tensor rstd, const Tensor& o, const Tensor& z,
              const Tensor& w, double eps, GateActivation activation);
// d_o and dz overwritten; dw [V] accumulated. y, where it is there, is computed again and overwritten.
PALIMPSEST_OP(gated_rms_norm_backward, Stream& stream, Tensor d_o, Tensor dz, Tensor dw, const Tensor& dy,
              const Tensor& o, const Tensor& z, const Tensor& w, const Tensor& rstd, GateActivation activation,
              const Tensor& y = {});

}  // namespace palimpsest
