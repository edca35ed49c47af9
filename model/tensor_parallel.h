// Tokens and the tensor group. Between blocks each tensor rank holds a range of the N tokens, n = ceil(N / T) rows with
// the last ranks' surplus rows 0; inside a branch every rank sees all tokens and computes its heads or columns, so that
// the branch's output is a partial sum. gather and scatter go from one to the other and are each other's adjoint.
#pragma once

#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Rows that each tensor rank holds of N tokens.
int64_t tokens_of_rank(const Context& context, int64_t num_tokens);

// [N, D] of all tokens from the ranks' [n, D], in scratch memory; the tensor itself when the group has one rank.
Tensor gather_tokens(Context& context, const Tensor& local, int64_t num_tokens);

// The same of tokens that are written where they belong among all, on its way while the caller goes on.
class TokenGather {
 public:
  TokenGather(Context& context, Arena& arena, DType dtype, int64_t num_tokens, int64_t width);
  const Tensor& own() const { return own_; }  // [n, D]
  LateTensor start(Context& context);         // [N, D], when own() is filled; it must stay until the others' are there

 private:
  Tensor padded_;  // [T * n, D]
  Tensor own_, all_;
};

// A branch's output: `all` [N, D] is what every rank fills with its partial sum; scatter() adds them up and leaves this
// rank's tokens in `local` [n, D]. With one rank `all` is `local`. start_scatter() may come before, once `all` is
// filled, and lets the caller go on meanwhile.
class PartialSum {
 public:
  // Scratch memory is taken here, so the caller's Arena::Scope must outlive it.
  PartialSum(Context& context, Tensor local, int64_t num_tokens);
  const Tensor& all() const { return all_; }
  void start_scatter();
  void scatter();

 private:
  Context& context_;
  Tensor local_;   // [n, D]
  Tensor padded_;  // [T * n, D]
  Tensor all_;     // [N, D]
  std::unique_ptr<Pending> pending_;
};

// Completes the shards of all gradients: sums each over the tensor ranks that hold the same block, where each has the
// share of its own tokens or heads.
void sum_over_copies(Context& context, const ParameterRegistry& registry);

}  // namespace palimpsest
