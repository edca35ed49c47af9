#include "kernels/mla_heads.h"

#include "kernels/op_check.h"

namespace palimpsest {

namespace {

void check_mla_heads(const Stream& stream, const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& k_pe) {
  const DType dtype = floating_dtype(stream, "kv", kv);
  check_operand(stream, "kv", kv, dtype, {kAnyDim, kAnyDim, kAnyDim});
  check_operand(stream, "k_pe", k_pe, dtype, {kv.dim(0), kAnyDim});
  check_contiguous_operand(stream, "v", v, dtype, {kv.dim(0), kv.dim(1), kAnyDim});
  check_contiguous_operand(stream, "k", k, dtype, {kv.dim(0), kv.dim(1), kv.dim(2) - v.dim(2) + k_pe.dim(1)});
}

}  // namespace

void mla_keys_values_forward(Stream& stream, Tensor k, Tensor v, const Tensor& kv, const Tensor& k_pe) {
  check_mla_heads(stream, k, v, kv, k_pe);
  PALIMPSEST_DISPATCH(stream, mla_keys_values_forward(stream, k, v, kv, k_pe));
}

void mla_keys_values_backward(Stream& stream, Tensor dkv, Tensor dk_pe, const Tensor& dk, const Tensor& dv) {
  check_mla_heads(stream, dk, dv, dkv, dk_pe);
  PALIMPSEST_DISPATCH(stream, mla_keys_values_backward(stream, dkv, dk_pe, dk, dv));
}

}  // namespace palimpsest
