// Affine maps of the recurrent state. What a range of tokens does to the state of the delta rule (kernels/delta_rule.h)
// is one map a value head, S -> Phi S + b, and its backward is the adjoint dS -> Phi^T dS + c. A map is kept as [K, V +
// K], b (or c) in the first V columns and Phi in the others: the final state of the range with K more value columns,
// all 0, that start from the identity.
#pragma once

#include "kernels/stream.h"

namespace palimpsest {

enum class AffineDirection : uint8_t { kForward, kAdjoint };

// maps [M, HV, K, V + K] = the maps that change nothing: b = 0, Phi = I. Contiguous; overwritten.
PALIMPSEST_OP(affine_identity, Stream& stream, Tensor maps);
// states [1, HV, K, V] <- Phi S + b, or Phi^T S + b, by the map [1, HV, K, V + K] of each head, in place. Contiguous.
PALIMPSEST_OP(affine_apply, Stream& stream, Tensor states, const Tensor& map, AffineDirection direction);

}  // namespace palimpsest
