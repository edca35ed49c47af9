// One half of a block: x += branch(norm(x)).
#pragma once

#include <memory>
#include <optional>

#include "kernels/rms_norm.h"
#include "model/layer.h"
#include "model/parameters.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

// Whether the branch's saved activations live until backward or are computed again there; or there is no backward.
enum class Keep : uint8_t { kSaved, kRecompute, kNothing };

struct SavedResidual {
  Tensor x;                       // [n, D]: the input, of this tensor rank's tokens
  Tensor rstd;                    // [n]
  std::unique_ptr<Saved> branch;  // null when it is to be recomputed
};

// The gradient of the residual stream, in the type of the activations, which backward goes through. It is on its way to
// all tensor ranks as soon as it is known.
class StreamGradient {
 public:
  // Memory is taken from the stack of activations.
  StreamGradient(Context& context, int64_t num_tokens, int64_t width);
  const Tensor& own() const { return gather_.own(); }                          // [n, D], of this tensor rank's tokens
  void changed(Context& context) { coming_.emplace(gather_.start(context)); }  // own() has new values
  LateTensor take_all(Context& context);  // [N, D], of all tokens, as they are until own() is changed

 private:
  TokenGather gather_;
  std::optional<LateTensor> coming_;
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
  // d: the gradient of the stream behind the branch on entry, before it on return.
  void backward(Context& context, const Sequence& sequence, const SavedResidual& saved, StreamGradient& d) const;

 private:
  // norm(x) of all tokens [N, D], in scratch memory; statistics of own tokens to rstd [n]; x is copied to `kept` where
  // that is there.
  LateTensor normed(Context& context, const Tensor& x, Tensor rstd, const Tensor& kept, int64_t num_tokens) const;

  const Branch& branch_;
  const Parameter& norm_;
  double norm_eps_;
  NormWeight norm_weight_;
};

}  // namespace palimpsest
