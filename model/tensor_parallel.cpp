#include "model/tensor_parallel.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/part_sums.h"

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
  const int64_t first = std::min(tensor.rank() * own_.dim(0), all_.dim(0));
  return {all_,
          tensor.start_all_gather(context.stream, {{.whole = padded_, .part = own_}}),
          {.first = first, .count = std::min(own_.dim(0), all_.dim(0) - first)}};
}

namespace {

// A weight for more than one product, in the operands' type.
Tensor rounded_once(Context& context, const Tensor& w) {
  if (w.dtype() == context.dtype) return w;
  const Tensor rounded = context.stream.scratch().allocate(context.dtype, w.shape());
  copy(context.stream, rounded, w);
  return rounded;
}

}  // namespace

void linear_forward_of_late(Context& context, Tensor y, const LateTensor& x, const Tensor& w) {
  if (!x.in_parts()) return linear_forward(context.stream, y, x, w, Write::kOverwrite);
  Arena::Scope scope(context.stream.scratch());
  const Tensor weight = rounded_once(context, w);
  x.for_each_part([&](const Tensor& part, RowPart rows) {
    linear_forward(context.stream, y.rows(rows.first, rows.count), part, weight, Write::kOverwrite);
  });
}

void linear_forward_to_awaited(Context& context, const AwaitedRows& y, const Tensor& x, const Tensor& w, Write write) {
  if (!y.in_parts()) return linear_forward(context.stream, y, x, w, write);
  Arena::Scope scope(context.stream.scratch());
  const Tensor weight = rounded_once(context, w);
  y.fill([&](const Tensor& part, RowPart rows) {
    linear_forward(context.stream, part, x.rows(rows.first, rows.count), weight, write);
  });
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

RowPart PartialSum::range_of(int64_t rank) const {
  const int64_t first = std::min(rank * local_.dim(0), all_.dim(0));
  return {.first = first, .count = std::min(local_.dim(0), all_.dim(0) - first)};
}

AwaitedRows PartialSum::rows() {
  const Communicator& tensor = context_.mesh.tensor();
  const int64_t T = tensor.size();
  if (T == 1) return all_;
  received_ = context_.stream.scratch().allocate(local_.dtype(), {(T - 1) * local_.dim(0), local_.dim(1)});
  parts_.resize(static_cast<size_t>(T) - 1);
  std::vector<RowPart> ranges;
  for (int64_t by = 1; by <= T; ++by) ranges.push_back(range_of((tensor.rank() + by) % T));
  return {all_, std::move(ranges), [this](size_t part) { send(part); }};
}

void PartialSum::send(size_t part) {
  if (part >= parts_.size() || parts_[part]) return;
  Communicator& tensor = context_.mesh.tensor();
  const int64_t n = local_.dim(0), by = static_cast<int64_t>(part) + 1, to = (tensor.rank() + by) % tensor.size();
  parts_[part] = tensor.start_shift(context_.stream, padded_.rows(to * n, n),
                                    received_.rows(static_cast<int64_t>(part) * n, n), by);
}

void PartialSum::scatter() {
  if (received_.defined()) {
    const int64_t n = local_.dim(0);
    for (size_t part = 0; part < parts_.size(); ++part) send(part);  // those of a branch that fills all at once
    for (const auto& part : parts_) part->wait();
    add_parts(context_.stream, local_, padded_.rows(context_.mesh.tensor().rank() * n, n), received_);
    return;
  }
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
