#include "model/residual.h"

#include "kernels/elementwise.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

Tensor Residual::normed(Context& context, const Tensor& x, Tensor rstd, const Tensor& kept) const {
  const Tensor y = context.stream.scratch().allocate(context.dtype, x.shape());
  rms_norm_forward(context.stream, y, rstd, x, norm_.value, norm_eps_, norm_weight_, kept);
  return y;
}

SavedResidual Residual::forward(Context& context, const Sequence& sequence, Tensor x, Keep keep) const {
  Arena& scratch = context.stream.scratch();
  Arena::Scope scope(scratch);
  SavedResidual saved;
  if (keep != Keep::kNothing)
    saved.x = context.activations.allocate(keep == Keep::kSaved ? context.dtype : context.residual, x.shape());
  saved.rstd = context.activations.allocate(norm_.value.dtype(), {x.dim(0)});
  const int64_t mark = context.activations.mark();
  const int64_t N = sequence.documents.num_tokens();
  const Tensor x_normed = gather_tokens(context, normed(context, x, saved.rstd, saved.x), N);
  // What travels between tensor ranks is in the type of activations.
  const bool adds = context.mesh.tensor().size() == 1 && branch_.adds_to_output() &&
                    (context.residual == context.dtype || context.dtype == DType::kBF16);
  if (adds) {
    saved.branch = branch_.forward(context, sequence, x_normed, x, Write::kAccumulate);
  } else {
    const Tensor of_branch = scratch.allocate(context.dtype, x.shape());
    PartialSum out(context, of_branch, N);
    saved.branch = branch_.forward(context, sequence, x_normed, out.all(), Write::kOverwrite);
    out.scatter();
    add(context.stream, x, x, of_branch);
  }
  if (keep != Keep::kSaved) {
    saved.branch.reset();
    context.activations.release(mark);
  }
  return saved;
}

void Residual::backward(Context& context, const Sequence& sequence, const SavedResidual& saved, Tensor d) const {
  Arena& scratch = context.stream.scratch();
  Arena::Scope scope(scratch);
  Arena::Scope recomputed(context.activations);
  const int64_t N = sequence.documents.num_tokens();
  const LateTensor d_of_all = start_gather_tokens(context, d, N);
  const LateTensor x_normed = start_gather_tokens(context, normed(context, saved.x, saved.rstd, {}), N);
  std::unique_ptr<Saved> again;
  if (!saved.branch) again = branch_.forward(context, sequence, x_normed, {}, Write::kOverwrite);
  const Tensor d_normed = scratch.allocate(context.dtype, d.shape());
  PartialSum d_in(context, d_normed, N);
  branch_.backward(context, sequence, again ? *again : *saved.branch, x_normed, d_of_all,
                   {d_in.all(), [&] { d_in.start_scatter(); }});
  d_in.scatter();
  rms_norm_backward(context.stream, d, norm_.grad, d_normed, saved.x, norm_.value, saved.rstd, norm_weight_,
                    Write::kAccumulate);
}

}  // namespace palimpsest
