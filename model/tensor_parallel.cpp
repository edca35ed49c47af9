#include "model/tensor_parallel.h"

#include <utility>
#include <vector>

#include "kernels/elementwise.h"

namespace palimpsest {

int64_t tokens_of_rank(const Context& context, int64_t num_tokens) {
  const int64_t T = context.mesh.tensor().size();
  return (num_tokens + T - 1) / T;
}

Tensor gather_tokens(Context& context, const Tensor& local, int64_t num_tokens) {
  Communicator& tensor = context.mesh.tensor();
  if (tensor.size() == 1) return local;
  const Tensor padded = context.stream.scratch().allocate(local.dtype(), {tensor.size() * local.dim(0), local.dim(1)});
  tensor.all_gather(context.stream, padded, local);
  return padded.rows(0, num_tokens);
}

TokenGather::TokenGather(Context& context, Arena& arena, DType dtype, int64_t num_tokens, int64_t width) {
  const Communicator& tensor = context.mesh.tensor();
  const int64_t n = tokens_of_rank(context, num_tokens);
  padded_ = arena.allocate(dtype, {tensor.size() * n, width});
  own_ = padded_.rows(tensor.rank() * n, n);
  all_ = padded_.rows(0, num_tokens);
}

LateTensor TokenGather::start(Context& context) {
  Communicator& tensor = context.mesh.tensor();
  if (tensor.size() == 1) return all_;
  return {all_, tensor.start_all_gather(context.stream, {{.whole = padded_, .part = own_}})};
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

namespace {

// Where neighbours hold the same block. These are small (a few key heads), so everything is gathered and the own group
// added.
void sum_over_neighbours(Context& context, int64_t copies, const Tensor& grad) {
  Communicator& tensor = context.mesh.tensor();
  Arena::Scope scope(context.stream.scratch());
  const Tensor all = context.stream.scratch().allocate(grad.dtype(), {tensor.size(), grad.numel()});
  tensor.all_gather(context.stream, all, grad);
  const int64_t first = tensor.rank() / copies * copies;
  const Tensor sum = grad.view({1, grad.numel()});
  copy(context.stream, sum, all.rows(first, 1));
  for (int64_t rank = first + 1; rank < first + copies; ++rank) add(context.stream, sum, sum, all.rows(rank, 1));
}

}  // namespace

void sum_over_copies(Context& context, const ParameterRegistry& registry) {
  Communicator& tensor = context.mesh.tensor();
  if (tensor.size() == 1) return;
  std::vector<Tensor> on_all;
  for (const Parameter& parameter : registry.parameters()) {
    if (parameter.block.copies == tensor.size())
      on_all.push_back(parameter.grad_shard);
    else if (parameter.block.copies > 1)
      sum_over_neighbours(context, parameter.block.copies, parameter.grad_shard);
  }
  tensor.start_all_reduce(context.stream, std::move(on_all), ReduceOp::kSum)->wait();
}

}  // namespace palimpsest
