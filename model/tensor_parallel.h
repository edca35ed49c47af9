// Tokens and the tensor group. Between blocks each tensor rank holds a range of the N tokens, n = ceil(N / T) rows with
// the last ranks' surplus rows 0; inside a branch every rank sees all tokens and computes its heads or columns, so that
// the branch's output is a partial sum. gather and scatter go from one to the other and are each other's adjoint.
#pragma once

#include <memory>
#include <vector>

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

// y [N, O] = x [N, I] w[O, I]^T: rows that are here while others are coming.
void linear_forward_of_late(Context& context, Tensor y, const LateTensor& x, const Tensor& w);
// y [N, O] = x [N, I] w[O, I]^T, or y += ...: rows that are on their way while others are computed.
void linear_forward_to_awaited(Context& context, const AwaitedRows& y, const Tensor& x, const Tensor& w, Write write);

// A branch's output: `all` [N, D] is what every rank fills with its partial sum; scatter() adds them up and leaves this
// rank's tokens in `local` [n, D]. With one rank `all` is `local`. start_scatter() may come before, once `all` is
// filled, and lets the caller go on meanwhile. Or rows() is filled in its place, where a part is sent when it is there.
class PartialSum {
 public:
  // Scratch memory is taken here, so the caller's Arena::Scope must outlive it.
  PartialSum(Context& context, Tensor local, int64_t num_tokens);
  const Tensor& all() const { return all_; }
  void start_scatter();
  void scatter();
  // Takes scratch memory too.
  AwaitedRows rows();

 private:
  void send(size_t part);
  RowPart range_of(int64_t rank) const;

  Context& context_;
  Tensor local_;   // [n, D]
  Tensor padded_;  // [T * n, D]
  Tensor all_;     // [N, D]
  std::unique_ptr<Pending> pending_;
  // Of rows(): the sums of own tokens by the ranks before this one, [n, D] each, and what is on its way. Part i is that
  // of the rank i + 1 after this one, the last its own.
  Tensor received_;
  std::vector<std::unique_ptr<Pending>> parts_;
};

// Completes the shards of all gradients: sums each over the tensor ranks that hold the same block, where each has the
// share of its own tokens or heads.
void sum_over_copies(Context& context, const ParameterRegistry& registry);

}  // namespace palimpsest
