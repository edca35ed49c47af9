#include "model/head.h"

#include <algorithm>

#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"

namespace palimpsest {

namespace {

// Logits of a block of tokens and their row statistics, in scratch memory.
struct LogitBlock {
  int64_t start, rows;
  Tensor logits;      // [rows, V]
  Tensor stats;       // [rows, 3]
  Tensor token_loss;  // [rows]
  Tensor z_term;      // [rows]
};

template <class Function>
void for_each_block(Context& context, const Tensor& hidden, const HeadWeight& head, const Tensor& targets,
                    double z_loss, Function&& function) {
  Stream& stream = context.stream;
  Communicator& tensor = context.mesh.tensor();
  const int64_t N = hidden.dim(0), V = head.weight.dim(0);
  const int64_t block_rows = std::min(N, head_block_rows(V, context.dtype));
  const DType statistics = context.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (int64_t start = 0; start < N; start += block_rows) {
    Arena::Scope scope(stream.scratch());
    LogitBlock block{.start = start, .rows = std::min(block_rows, N - start)};
    block.logits = stream.scratch().allocate(context.dtype, {block.rows, V});
    block.stats = stream.scratch().allocate(statistics, {block.rows, 3});
    block.token_loss = stream.scratch().allocate(statistics, {block.rows});
    block.z_term = stream.scratch().allocate(statistics, {block.rows});
    const Tensor block_targets = targets.rows(start, block.rows);
    linear_forward(stream, block.logits, hidden.rows(start, block.rows), head.weight, Write::kOverwrite);
    if (tensor.size() == 1) {
      cross_entropy_stats(stream, block.stats, block.logits, block_targets, head.vocab_begin);
    } else {
      const Tensor own = stream.scratch().allocate(statistics, {block.rows, 3});
      const Tensor parts = stream.scratch().allocate(statistics, {tensor.size() * block.rows, 3});
      cross_entropy_stats(stream, own, block.logits, block_targets, head.vocab_begin);
      tensor.all_gather(stream, parts, own);
      cross_entropy_merge_stats(stream, block.stats, parts);
    }
    cross_entropy_loss(stream, block.token_loss, block.z_term, block.stats, block_targets, z_loss);
    function(block, block_targets);
  }
}

// The head as all blocks multiply by it, in scratch memory.
HeadWeight rounded_head(Context& context, const HeadWeight& head) {
  return {.weight = rounded_weight(context.stream, head.weight, context.dtype), .vocab_begin = head.vocab_begin};
}

}  // namespace

int64_t head_block_rows(int64_t vocab_size, DType dtype) {
  // Large blocks on a GPU: each reads the weight and adds to its gradient once.
  const int64_t block_bytes = int64_t{dtype == DType::kBF16 ? 256 : 32} << 20;
  constexpr int64_t kMinRows = 16;
  return std::max(kMinRows, block_bytes / (vocab_size * size_of(dtype)));
}

void head_loss_forward(Context& context, Tensor token_loss, const Tensor& hidden, const HeadWeight& head,
                       const Tensor& targets) {
  const Arena::Scope scope(context.stream.scratch());
  for_each_block(context, hidden, rounded_head(context, head), targets, 0.0,
                 [&](const LogitBlock& block, const Tensor&) {
                   copy(context.stream, token_loss.rows(block.start, block.rows), block.token_loss);
                 });
}

void head_loss_forward_backward(Context& context, const HeadBackward& out, const Tensor& hidden,
                                const HeadWeight& given, const Tensor& targets, double z_loss, double grad_scale) {
  Stream& stream = context.stream;
  const Arena::Scope scope(stream.scratch());
  const HeadWeight head = rounded_head(context, given);
  for_each_block(context, hidden, head, targets, z_loss, [&](const LogitBlock& block, const Tensor& block_targets) {
    sum_into(stream, out.loss_sum, block.token_loss);
    sum_into(stream, out.z_sum, block.z_term);
    cross_entropy_backward(stream, block.logits, block.stats, block_targets, head.vocab_begin, z_loss, grad_scale);
    const Tensor& d_logits = block.logits;
    linear_backward_input(stream, out.d_hidden.rows(block.start, block.rows), d_logits, head.weight, Write::kOverwrite);
    linear_backward_weight(stream, out.d_weight, d_logits, hidden.rows(block.start, block.rows));
  });
}

}  // namespace palimpsest
