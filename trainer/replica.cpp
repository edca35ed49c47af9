#include "trainer/replica.h"

#include <memory>
#include <vector>

#include "kernels/elementwise.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

namespace {

// `rows` rows of the parameter's shape, as a matrix.
Shape matrix(const Parameter& parameter, int64_t rows) {
  return {rows, parameter.grad.row_size()};
}

Tensor as_matrix(const Tensor& tensor) {
  return tensor.view({tensor.dim(0), tensor.row_size()});
}

// A collective under way and the memory it works on.
struct Transfer {
  const Parameter* parameter;
  Tensor own;  // [each, row]: this rank's rows, padded
  Tensor all;  // [size * each, row]
  std::unique_ptr<Pending> pending;
};

// Runs `start` for parameters until about kBatchBytes are under way, then `finish` for those, and so on: many small
// collectives overlap, and memory stays bounded.
template <class Start, class Finish>
void in_batches(Context& context, ParameterRegistry& registry, Start&& start, Finish&& finish) {
  constexpr int64_t kBatchBytes = int64_t{64} << 20;
  auto& parameters = registry.parameters();
  size_t next = 0;
  while (next < parameters.size()) {
    Arena::Scope scope(context.stream.scratch());
    std::vector<Transfer> transfers;
    int64_t bytes = 0;
    while (next < parameters.size() && (transfers.empty() || bytes < kBatchBytes)) {
      bytes += parameters[next].grad.bytes();
      transfers.push_back(start(parameters[next]));
      ++next;
    }
    for (Transfer& transfer : transfers) {
      transfer.pending->wait();
      finish(transfer);
    }
  }
}

}  // namespace

void reduce_gradients(Context& context, ParameterRegistry& registry) {
  Communicator& replica = context.mesh.replica();
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  if (replica.size() == 1) {
    for (const Parameter& parameter : registry.parameters()) sum_over_copies(context, parameter, parameter.grad);
    return;
  }
  in_batches(
      context, registry,
      [&](const Parameter& parameter) {
        const int64_t rows = parameter.grad.dim(0), padded = parameter.shard.each * replica.size();
        Transfer transfer{.parameter = &parameter};
        transfer.own = scratch.allocate(parameter.grad.dtype(), matrix(parameter, parameter.shard.each));
        transfer.all = as_matrix(parameter.grad);
        if (padded > rows) {
          transfer.all = scratch.allocate(parameter.grad.dtype(), matrix(parameter, padded));
          copy(stream, transfer.all.rows(0, rows), as_matrix(parameter.grad));
          fill_zero(stream, transfer.all.rows(rows, padded - rows));
        }
        transfer.pending = replica.start_reduce_scatter(stream, transfer.own, transfer.all);
        return transfer;
      },
      [&](const Transfer& transfer) {
        const Parameter& parameter = *transfer.parameter;
        const Tensor sum = transfer.own.rows(0, parameter.shard.count);
        sum_over_copies(context, parameter, sum);
        copy(stream, as_matrix(parameter.shard_of(parameter.grad)), sum);
      });
}

void gather_values(Context& context, ParameterRegistry& registry) {
  Communicator& replica = context.mesh.replica();
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  if (replica.size() == 1) return;
  in_batches(
      context, registry,
      [&](const Parameter& parameter) {
        const int64_t rows = parameter.value.dim(0), padded = parameter.shard.each * replica.size();
        Transfer transfer{.parameter = &parameter};
        transfer.own = scratch.allocate(parameter.value.dtype(), matrix(parameter, parameter.shard.each));
        fill_zero(stream, transfer.own.rows(parameter.shard.count, parameter.shard.each - parameter.shard.count));
        copy(stream, transfer.own.rows(0, parameter.shard.count), as_matrix(parameter.shard_of(parameter.value)));
        transfer.all = padded > rows ? scratch.allocate(parameter.value.dtype(), matrix(parameter, padded))
                                     : as_matrix(parameter.value);
        transfer.pending = replica.start_all_gather(stream, transfer.all, transfer.own);
        return transfer;
      },
      [&](const Transfer& transfer) {
        const Tensor value = as_matrix(transfer.parameter->value);
        if (transfer.all.dim(0) > value.dim(0)) copy(stream, value, transfer.all.rows(0, value.dim(0)));
      });
}

bool counts_in_sums(const TensorShare& share, const Parameter& parameter) {
  return share.rank % parameter.block.copies == 0;
}

bool counts_in_sums(const Context& context, const Parameter& parameter) {
  const Communicator& tensor = context.mesh.tensor();
  return counts_in_sums(TensorShare{.rank = tensor.rank(), .size = tensor.size()}, parameter);
}

}  // namespace palimpsest
