// One half of a block: y = x + branch(norm(x)).
#pragma once

#include <memory>

#include "kernels/rms_norm.h"
#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Whether the branch's saved activations live until backward or are computed again there.
enum class Keep : uint8_t { kSaved, kRecompute };

struct SavedResidual {
  Tensor x;                       // [n, D] of the residual stream: the input, of this tensor rank's tokens
  Tensor rstd;                    // [n]
  std::unique_ptr<Saved> branch;  // null when it is to be recomputed
};

// Runs the branch behind its norm, on all tokens of the tensor group (tensor_parallel.h). Holds references; built on
// the fly.
class Residual {
 public:
  Residual(const Branch& branch, const Parameter& norm, double norm_eps, NormWeight norm_weight)
      : branch_(branch), norm_(norm), norm_eps_(norm_eps), norm_weight_(norm_weight) {}

  // x, y [n, D] of the residual stream; y overwritten; must be allocated before, since saved activations follow it in
  // the arena.
  SavedResidual forward(Context& context, const Sequence& sequence, const Tensor& x, Tensor y, Keep keep) const;
  // d [n, D]: the gradient of y on entry, of x on return.
  void backward(Context& context, const Sequence& sequence, const SavedResidual& saved, Tensor d) const;

 private:
  // norm(x) in scratch memory.
  Tensor normed(Context& context, const Tensor& x, Tensor rstd) const;

  const Branch& branch_;
  const Parameter& norm_;
  double norm_eps_;
  NormWeight norm_weight_;
};

}  // namespace palimpsest
