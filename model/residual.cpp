#include "model/residual.h"

#include <utility>

#include "kernels/elementwise.h"

namespace palimpsest {

StreamGradient::StreamGradient(Context& context, int64_t num_tokens, int64_t width)
    : gather_(context, context.activations, context.dtype, num_tokens, width) {}

LateTensor StreamGradient::take_all(Context& context) {
  if (!coming_) changed(context);
  LateTensor all = *std::move(coming_);
  coming_.reset();
  return all;
}

LateTensor Residual::normed(Context& context, const Tensor& x, Tensor rstd, const Tensor& kept,
                            int64_t num_tokens) const {
  TokenGather y(context, context.stream.scratch(), context.dtype, num_tokens, x.dim(1));
  rms_norm_forward(context.stream, y.own(), rstd, x, norm_.value, norm_eps_, norm_weight_, kept);
  return y.start(context);
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
  const LateTensor x_normed = normed(context, x, saved.rstd, saved.x, N);
  // What travels between tensor ranks is in the type of activations.
  const bool adds = context.mesh.tensor().size() == 1 && branch_.adds_to_output() &&
                    (context.residual == context.dtype || context.dtype == DType::kBF16);
  if (adds) {
    saved.branch = branch_.forward(context, sequence, x_normed, x, Write::kAccumulate);
  } else {
    const Tensor of_branch = scratch.allocate(context.dtype, x.shape());
    PartialSum out(context, of_branch, N);
    saved.branch = branch_.forward(context, sequence, x_normed, out.rows(), Write::kOverwrite);
    out.scatter();
    add(context.stream, x, x, of_branch);
  }
  if (keep != Keep::kSaved) {
    saved.branch.reset();
    context.activations.release(mark);
  }
  return saved;
}

void Residual::backward(Context& context, const Sequence& sequence, const SavedResidual& saved,
                        StreamGradient& d) const {
  Arena& scratch = context.stream.scratch();
  Arena::Scope scope(scratch);
  Arena::Scope recomputed(context.activations);
  const int64_t N = sequence.documents.num_tokens();
  const LateTensor dy = d.take_all(context);
  const LateTensor x_normed = normed(context, saved.x, saved.rstd, {}, N);
  std::unique_ptr<Saved> again;
  if (!saved.branch) again = branch_.forward(context, sequence, x_normed, {}, Write::kOverwrite);
  const Tensor d_normed = scratch.allocate(context.dtype, saved.x.shape());
  PartialSum d_in(context, d_normed, N);
  bool taken = false;
  const auto take = [&] {
    if (std::exchange(taken, true)) return;
    d_in.scatter();
    rms_norm_backward(context.stream, d.own(), norm_.grad, d_normed, saved.x, norm_.value, saved.rstd, norm_weight_,
                      Write::kAccumulate);
    d.changed(context);
  };
  branch_.backward(context, sequence, again ? *again : *saved.branch, x_normed, dy,
                   {d_in.all(), [&] { d_in.start_scatter(); }, take});
  take();
}

}  // namespace palimpsest
