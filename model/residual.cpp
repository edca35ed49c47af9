#include "model/residual.h"

#include "kernels/elementwise.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

Tensor Residual::normed(Context& context, const Tensor& x, Tensor rstd) const {
  const Tensor y = context.stream.scratch().allocate(context.dtype, x.shape());
  rms_norm_forward(context.stream, y, rstd, x, norm_.value, norm_eps_, norm_weight_);
  return y;
}

SavedResidual Residual::forward(Context& context, const Sequence& sequence, const Tensor& x, Tensor y,
                                Keep keep) const {
  Arena::Scope scope(context.stream.scratch());
  SavedResidual saved;
  saved.x = x;
  saved.rstd = context.activations.allocate(norm_.value.dtype(), {x.dim(0)});
  const int64_t mark = context.activations.mark();
  const int64_t N = sequence.documents.num_tokens();
  const Tensor x_normed = gather_tokens(context, normed(context, x, saved.rstd), N);
  const bool writes_y =
      context.residual == context.dtype || (context.dtype == DType::kBF16 && branch_.has_wide_output());
  const Tensor of_branch = writes_y ? y : context.stream.scratch().allocate(context.dtype, y.shape());
  PartialSum out(context, of_branch, N);
  saved.branch = branch_.forward(context, sequence, x_normed, out.all());
  out.scatter();
  if (keep == Keep::kRecompute) {
    saved.branch.reset();
    context.activations.release(mark);
  }
  add(context.stream, y, x, of_branch);
  return saved;
}

void Residual::backward(Context& context, const Sequence& sequence, const SavedResidual& saved, Tensor d) const {
  Arena& scratch = context.stream.scratch();
  Arena::Scope scope(scratch);
  Arena::Scope recomputed(context.activations);
  const int64_t N = sequence.documents.num_tokens();
  const Tensor dy = context.residual == context.dtype ? d : scratch.allocate(context.dtype, d.shape());
  if (context.residual != context.dtype) copy(context.stream, dy, d);
  const LateTensor dy_of_all = start_gather_tokens(context, dy, N);
  const LateTensor x_normed = start_gather_tokens(context, normed(context, saved.x, saved.rstd), N);
  std::unique_ptr<Saved> again;
  if (!saved.branch) again = branch_.forward(context, sequence, x_normed, {});
  const Tensor d_normed = scratch.allocate(context.dtype, d.shape());
  PartialSum d_in(context, d_normed, N);
  branch_.backward(context, sequence, again ? *again : *saved.branch, x_normed, dy_of_all,
                   {d_in.all(), [&] { d_in.start_scatter(); }});
  d_in.scatter();
  rms_norm_backward(context.stream, d, norm_.grad, d_normed, saved.x, norm_.value, saved.rstd, norm_weight_,
                    Write::kAccumulate);
}

}  // namespace palimpsest
