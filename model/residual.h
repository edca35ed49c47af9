// One half of a block: x += branch(norm(x)).
#pragma once

#include <memory>

#include "kernels/rms_norm.h"
#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Whether the branch's saved activations live until backward or are computed again there; or there is no backward.
enum class Keep : uint8_t { kSaved, kRecompute, kNothing };

struct SavedResidual {
  Tensor x;                       // [n, D]: the input, of this tensor rank's tokens
  Tensor rstd;                    // [n]
  std::unique_ptr<Saved> branch;  // null when it is to be recomputed
};

// Runs the branch behind its norm, on all tokens of the tensor group (tensor_parallel.h). Holds references; built on
// the fly.
class Residual {
 public:
  Residual(const Branch& branch, const Parameter& norm, double norm_eps, NormWeight norm_weight)
      : branch_(branch), norm_(norm), norm_eps_(norm_eps), norm_weight_(norm_weight) {}

  // x [n, D], the residual stream, is added to. What backward reads of it is kept apart: rounded to the type of the
  // activations, which costs backward no more than rounding the normed input does, or as it is where the branch is to
  // be computed again from it.
  SavedResidual forward(Context& context, const Sequence& sequence, Tensor x, Keep keep) const;
  // d [n, D] in the type of the activations: the gradient of the stream behind the branch on entry, before it on
  // return.
  void backward(Context& context, const Sequence& sequence, const SavedResidual& saved, Tensor d) const;

 private:
  // norm(x) in scratch memory; x is copied to `kept` where that is there.
  Tensor normed(Context& context, const Tensor& x, Tensor rstd, const Tensor& kept) const;

  const Branch& branch_;
  const Parameter& norm_;
  double norm_eps_;
  NormWeight norm_weight_;
};

}  // namespace palimpsest
