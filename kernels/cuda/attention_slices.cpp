#include "kernels/cuda/attention_slices.h"

#include <bit>

namespace palimpsest::cuda {

bool may_be_fused(const AttentionBackwardArgs& args) {
  constexpr int64_t kSizeStep = 8;
  return FusedAttention::is_built_in() && args.q.dtype() == DType::kBF16 && args.q.dim(2) % kSizeStep == 0 &&
         args.v.dim(2) % kSizeStep == 0;
}

bool all_start_on_packs(const AttentionBackwardArgs& args) {
  bool all = true;
  for (const Tensor* tensor : {&args.q, &args.k, &args.v, &args.o, &args.d_o, &args.dq, &args.dk, &args.dv})
    all = all && (!tensor->defined() || starts_on_packs(*tensor));
  return all;
}

AttentionBackwardArgs rows_of(const AttentionBackwardArgs& args, int64_t first_query, int64_t num_queries,
                              int64_t first_key, int64_t num_keys) {
  const auto queries = [&](const Tensor& tensor) { return tensor.rows(first_query, num_queries); };
  const auto keys = [&](const Tensor& tensor) { return tensor.rows(first_key, num_keys); };
  return {.dq = queries(args.dq),
          .dk = keys(args.dk),
          .dv = keys(args.dv),
          .d_o = queries(args.d_o),
          .q = queries(args.q),
          .k = keys(args.k),
          .v = keys(args.v),
          .o = queries(args.o),
          .lse = queries(args.lse),
          .scale = args.scale};
}

void set_rows_in_place(FusedShape& shape, const AttentionBackwardArgs& args) {
  const auto row = [](const Tensor& tensor) { return tensor.defined() ? tensor.row_stride() : 0; };
  shape.q_row = row(args.q);
  shape.k_row = row(args.k);
  shape.v_row = row(args.v);
  shape.o_row = row(args.o);
  shape.d_o_row = row(args.d_o);
  shape.dq_row = row(args.dq);
  shape.dk_row = row(args.dk);
  shape.dv_row = row(args.dv);
}

void set_rows_of_copies(FusedShape& shape) {
  shape.q_row = shape.H * shape.K;
  shape.k_row = shape.HKV * shape.K;
  shape.v_row = shape.HKV * shape.V;
  shape.o_row = shape.H * shape.V;
  if (!shape.is_backward) return;
  shape.d_o_row = shape.o_row;
  shape.dq_row = shape.q_row;
  shape.dk_row = shape.k_row;
  shape.dv_row = shape.v_row;
}

int64_t copied_length(int64_t length) {
  return std::max(kSequenceTile, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(length))));
}

}  // namespace palimpsest::cuda
