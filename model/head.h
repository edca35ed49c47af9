// Head and loss: logits = hidden W^T, softmax cross-entropy, in blocks of tokens so that the logits of a whole batch
// never exist at once.
#pragma once

#include "kernels/stream.h"
#include "model/layer.h"

namespace palimpsest {

// Tokens whose logits exist at once: at most about 32 MiB of them, 256 MiB in bf16, at least 16 tokens.
int64_t head_block_rows(int64_t vocab_size, DType dtype);

// The rows of the head's matrix that this tensor rank holds: weight [Vl, D], ids from vocab_begin. The loss is that of
// the whole vocabulary: ranks exchange three numbers a token.
struct HeadWeight {
  Tensor weight;
  int64_t vocab_begin = 0;
};

// token_loss [N] overwritten. hidden [N, D], targets [N] i32.
void head_loss_forward(Context& context, Tensor token_loss, const Tensor& hidden, const HeadWeight& head,
                       const Tensor& targets);

struct HeadBackward {
  Tensor loss_sum, z_sum;  // [1] f64, accumulated
  Tensor d_hidden;         // [N, D], overwritten; a partial sum over the tensor group
  Tensor d_weight;         // [Vl, D], accumulated
};
// Loss and gradient of grad_scale * (loss_sum + z_sum) in one pass: each block's logits are computed once.
void head_loss_forward_backward(Context& context, const HeadBackward& out, const Tensor& hidden, const HeadWeight& head,
                                const Tensor& targets, double z_loss, double grad_scale);

}  // namespace palimpsest
