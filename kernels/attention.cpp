#include "kernels/attention.h"

#include <algorithm>

#include "kernels/op_check.h"

namespace palimpsest {

namespace {

// q [N, H, K], k [NK, HKV, K], v [NK, HKV, V], o [N, H, V], lse [N, H].
DType check_attention(const Stream& stream, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                      const Tensor& lse) {
  const DType dtype = floating_dtype(stream, "q", q);
  check_operand(stream, "q", q, dtype, {kAnyDim, kAnyDim, kAnyDim});
  check_operand(stream, "k", k, dtype, {kAnyDim, kAnyDim, q.dim(2)});
  check_operand(stream, "v", v, dtype, {k.dim(0), k.dim(1), kAnyDim});
  check_operand(stream, "o", o, dtype, {q.dim(0), q.dim(1), v.dim(2)});
  check_contiguous_operand(stream, "lse", lse, statistics_dtype(dtype), {q.dim(0), q.dim(1)});
  CHECK(k.dim(1) > 0 && q.dim(1) % k.dim(1) == 0, "query heads (", q.dim(1), ") must be a multiple of key heads (",
        k.dim(1), ")");
  check_attention_supported(stream.device(), k.dim(2), v.dim(2));
  return dtype;
}

void check_backward(const Stream& stream, const AttentionBackwardArgs& args) {
  const DType dtype = check_attention(stream, args.q, args.k, args.v, args.o, args.lse);
  check_operand(stream, "d_o", args.d_o, dtype, args.o.shape());
  check_operand(stream, "dq", args.dq, dtype, args.q.shape());
  check_operand(stream, "dk", args.dk, dtype, args.k.shape());
  check_operand(stream, "dv", args.dv, dtype, args.v.shape());
}

}  // namespace

void check_attention_supported(Device device, int64_t key_size, int64_t value_size) {
  if (device == Device::kCuda && std::max(key_size, value_size) > kMaxHeadOnGpus)
    throw_user_error("attention on ", name_of(device), ": heads of ", key_size, " (keys) and ", value_size,
                     " (values) are not supported; supported are 1 to ", kMaxHeadOnGpus);
}

void attention_forward(Stream& stream, Tensor o, Tensor lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, const Documents& queries, const Documents& keys) {
  check_attention(stream, q, k, v, o, lse);
  check_covers(queries, "q", q.dim(0));
  check_covers(keys, "k", k.dim(0));
  CHECK(queries.count() == keys.count(), "queries have ", queries.count(), " documents, keys ", keys.count());
  for (int64_t i = 0; i < queries.count(); ++i)
    CHECK(queries.length(i) <= keys.length(i), "document ", i, " has ", queries.length(i), " queries and only ",
          keys.length(i), " keys");
  PALIMPSEST_DISPATCH(stream, attention_forward(stream, o, lse, q, k, v, scale, queries, keys));
}

void attention_backward(Stream& stream, const AttentionBackwardArgs& args, const Documents& documents) {
  check_backward(stream, args);
  CHECK(args.q.dim(0) == args.k.dim(0), "queries are the keys' tokens in backward: ", args.q.dim(0), " and ",
        args.k.dim(0));
  check_covers(documents, "q", args.q.dim(0));
  PALIMPSEST_DISPATCH(stream, attention_backward(stream, args, documents));
}

void attention_prefix_forward(Stream& stream, Tensor o, Tensor lse, const Tensor& q, const Tensor& k, const Tensor& v,
                              double scale) {
  check_attention(stream, q, k, v, o, lse);
  PALIMPSEST_DISPATCH(stream, attention_prefix_forward(stream, o, lse, q, k, v, scale));
}

void attention_prefix_backward(Stream& stream, const AttentionBackwardArgs& args) {
  check_backward(stream, args);
  PALIMPSEST_DISPATCH(stream, attention_prefix_backward(stream, args));
}

}  // namespace palimpsest
