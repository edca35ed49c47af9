// The interfaces of a block: Branch, what stands inside a residual connection; TokenMixer, a branch that mixes tokens
// over time (KDA, Gated DeltaNet, MLA, softmax attention and every later one); FeedForward, one that takes each token
// alone.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/arena.h"
#include "kernels/documents.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"
#include "kernels/write.h"
#include "model/parameter_hooks.h"
#include "parallel/late_tensor.h"
#include "parallel/mesh.h"
#include "parallel/sequence_cut.h"

namespace palimpsest {

struct ExpertTally;

// Number types of activations, and of the residual stream, the sum that every block adds to: the same, or the next
// wider (f32 beside bf16, f64 beside f32).
struct ActivationTypes {
  ActivationTypes(DType both) : dtype(both), residual(both) {}  // NOLINT(google-explicit-constructor): usually one
  ActivationTypes(DType dtype, DType residual) : dtype(dtype), residual(residual) {}
  DType dtype, residual;
};

// Where a step runs. Temporaries come from stream.scratch(), what backward needs from `activations`.
struct Context {
  Stream& stream;
  Arena& activations;
  DType dtype;  // of activations: f32 or f64 on the CPU, f32 or bf16 on a GPU
  const Mesh& mesh = Mesh::single();
  const ExpertTally* experts = nullptr;  // what layers with routed experts note of a training micro-batch; or nothing
  ParameterHooks* hooks = &ParameterHooks::none();  // with zero: 3, all of a replica group run the model equally often
  DType residual = dtype;                           // of the residual stream, see ActivationTypes
};

// How the N tokens of a batch, or of one sequence rank's part of it, lie in time.
struct Sequence {
  Documents documents;
  Tensor positions;     // [N] i32, counted from each document's start, wherever that lies
  Crossings crossings;  // what of the documents lies on other sequence ranks
};

// What a forward keeps for its backward. Each layer derives its own struct, with shapes.
struct Saved {
  virtual ~Saved() = default;
};

// What a mixer carries from token to token when decoding.
struct DecodeState {
  virtual ~DecodeState() = default;
};

class Branch {
 public:
  virtual ~Branch() = default;

  // Whether forward can add to y, which may then be f32 beside bf16 operands: y takes the sums of its last product as
  // they are.
  virtual bool adds_to_output() const { return true; }
  // y [N, D] = f(x [N, D]), or y += ... When y is absent only what backward needs is computed (recomputation). With
  // tensor ranks rows of x may still be coming, and rows of y be awaited: see linear_forward_of_late and
  // linear_forward_to_awaited in tensor_parallel.h.
  virtual std::unique_ptr<Saved> forward(Context& context, const Sequence& sequence, const LateTensor& x,
                                         const AwaitedRows& y, Write write) const = 0;
  // dx [N, D] overwritten; gradients of the weights accumulated. x holds the same values as in forward. With tensor
  // ranks x is still coming and dx awaited: x is best used last, dx filled before the gradients of the weights, and the
  // last of these computed after dx.may_be_taken(), from which on dy is not dy any more.
  virtual void backward(Context& context, const Sequence& sequence, const Saved& saved, const LateTensor& x,
                        const Tensor& dy, const AwaitedTensor& dx) const = 0;
};

class TokenMixer : public Branch {
 public:
  // FLOPs of one token, forward, beside the weights' products: 6 K V a head for delta layers, 2 H (dqk + dv) (T + 1) /
  // 2 for attention over rows of T tokens.
  virtual double flops_per_token(int64_t row_length) const = 0;

  // Decoding one sequence of at most max_tokens. The state of a recurrent mixer does not grow with max_tokens.
  virtual std::unique_ptr<DecodeState> make_decode_state(Context& context, int64_t max_tokens) const = 0;
  // Continues the state by the n tokens x [n, D] of one document; y [n, D] overwritten. The same values as forward over
  // the whole document, to rounding.
  virtual void extend(Context& context, DecodeState& state, const Sequence& sequence, const Tensor& x,
                      Tensor y) const = 0;
};

class FeedForward : public Branch {
 public:
  // FLOPs of one token, forward, beside the weights that every token meets: those of the experts it is sent to.
  virtual double flops_per_token() const { return 0.0; }
};

}  // namespace palimpsest
