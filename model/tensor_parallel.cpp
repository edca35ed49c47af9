#include "model/tensor_parallel.h"

#include "kernels/elementwise.h"

namespace palimpsest {

int64_t tokens_of_rank(const Context& context, int64_t num_tokens) {
  const int64_t T = context.mesh.tensor().size();
  return (num_tokens + T - 1) / T;
}

Tensor gather_tokens(Context& context, const Tensor& local, int64_t num_tokens) {
  return start_gather_tokens(context, local, num_tokens);
}

LateTensor start_gather_tokens(Context& context, const Tensor& local, int64_t num_tokens) {
  const int64_t T = context.mesh.tensor().size();
  if (T == 1) return local;
  const Tensor padded = context.stream.scratch().allocate(local.dtype(), {T * local.dim(0), local.dim(1)});
  return {padded.rows(0, num_tokens),
          context.mesh.tensor().start_all_gather(context.stream, {{.whole = padded, .part = local}})};
}

PartialSum::PartialSum(Context& context, Tensor local, int64_t num_tokens) : context_(context), local_(local) {
  const int64_t T = context.mesh.tensor().size();
  if (T == 1) {
    padded_ = all_ = local;
    return;
  }
  padded_ = context.stream.scratch().allocate(local.dtype(), {T * local.dim(0), local.dim(1)});
  all_ = padded_.rows(0, num_tokens);
  fill_zero(context.stream, padded_.rows(num_tokens, padded_.dim(0) - num_tokens));
}

void PartialSum::start_scatter() {
  if (context_.mesh.tensor().size() > 1)
    pending_ = context_.mesh.tensor().start_reduce_scatter(context_.stream, {{.whole = padded_, .part = local_}});
}

void PartialSum::scatter() {
  if (!pending_) start_scatter();
  if (pending_) pending_->wait();
}

void sum_over_copies(Context& context, const Parameter& parameter, Tensor grad) {
  Communicator& tensor = context.mesh.tensor();
  const int64_t copies = parameter.block.copies;
  if (copies == 1) return;
  if (copies == tensor.size()) {
    tensor.all_reduce(context.stream, grad, ReduceOp::kSum);
    return;
  }
  // Neighbours hold the same block. These are small (a few key heads), so everything is gathered and the own group
  // added.
  Arena::Scope scope(context.stream.scratch());
  const Tensor all = context.stream.scratch().allocate(grad.dtype(), {tensor.size(), grad.numel()});
  tensor.all_gather(context.stream, all, grad);
  const int64_t first = tensor.rank() / copies * copies;
  const Tensor sum = grad.view({1, grad.numel()});
  copy(context.stream, sum, all.rows(first, 1));
  for (int64_t rank = first + 1; rank < first + copies; ++rank) add(context.stream, sum, sum, all.rows(rank, 1));
}

}  // namespace palimpsest
