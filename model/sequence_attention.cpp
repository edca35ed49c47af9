#include "model/sequence_attention.h"

#include "kernels/elementwise.h"

namespace palimpsest {

Tensor gather_rows(Context& context, const Sequence& sequence, std::initializer_list<Tensor> parts) {
  Stream& stream = context.stream;
  const Crossings& crossings = sequence.crossings;
  int64_t width = 0;
  for (const Tensor& part : parts) width += part.dim(1);
  const DType dtype = parts.begin()->dtype();
  const Tensor all = stream.scratch().allocate(dtype, {crossings.num_ranks * crossings.max_tokens, width});
  Arena::Scope scope(stream.scratch());
  const Tensor own = stream.scratch().allocate(dtype, {crossings.max_tokens, width});
  const int64_t N = parts.begin()->dim(0);
  int64_t column = 0;
  for (const Tensor& part : parts) {
    copy(stream, own.rows(0, N).columns(column, part.dim(1)), part);
    column += part.dim(1);
  }
  fill_zero(stream, own.rows(N, crossings.max_tokens - N));
  context.mesh.sequence().all_gather(stream, all, own);
  return all;
}

Tensor allocate_row_gradients(Context& context, const Tensor& gathered) {
  const Tensor d_gathered = context.stream.scratch().allocate(gathered.dtype(), gathered.shape());
  fill_zero(context.stream, d_gathered);
  return d_gathered;
}

Tensor scatter_row_gradients(Context& context, const Sequence& sequence, const Tensor& d_gathered) {
  const Tensor own =
      context.stream.scratch().allocate(d_gathered.dtype(), {sequence.crossings.max_tokens, d_gathered.dim(1)});
  context.mesh.sequence().reduce_scatter(context.stream, own, d_gathered);
  return own.rows(0, sequence.documents.num_tokens());
}

}  // namespace palimpsest
