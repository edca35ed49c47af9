#include "kernels/affine_state.h"

#include "kernels/op_check.h"

namespace palimpsest {

void affine_identity(Stream& stream, Tensor maps) {
  check_contiguous_operand(stream, "maps", maps, floating_dtype(stream, "maps", maps),
                           {kAnyDim, kAnyDim, kAnyDim, kAnyDim});
  CHECK(maps.dim(3) >= maps.dim(2), "maps are ", maps.str(), ", expected [M, HV, K, V + K]");
  PALIMPSEST_DISPATCH(stream, affine_identity(stream, maps));
}

void affine_apply(Stream& stream, Tensor states, const Tensor& map, AffineDirection direction) {
  const DType dtype = floating_dtype(stream, "states", states);
  check_contiguous_operand(stream, "states", states, dtype, {1, kAnyDim, kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "map", map, dtype, {1, states.dim(1), states.dim(2), states.dim(2) + states.dim(3)});
  PALIMPSEST_DISPATCH_ALWAYS(stream, affine_apply(stream, states, map, direction));
}

}  // namespace palimpsest
