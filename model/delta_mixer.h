// The token mixer of the delta-rule family. Kimi Delta Attention, Gated DeltaNet and their relatives are one chain of
// ops that differ in which projections exist; each has a file that declares its parameters and describes itself with
// DeltaMixerParts. For each token, per value head:
//
//   q, k, v = short convolutions of linear maps of x           f = decay logits      z = output gate      b = write
//   logits o = delta rule (kernels/delta_rule.h)                      y = Wo ( w * n(o) * phi(z) )
#pragma once

#include <string>

#include "kernels/delta_rule.h"
#include "kernels/rms_norm.h"
#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

struct DeltaMixerParts {
  int64_t num_heads = 0, num_value_heads = 0, key_size = 0, value_size = 0;  // H, HV, K, V
  DeltaRuleOptions options;
  GateActivation gate_activation = GateActivation::kSigmoid;
  double norm_eps = 1e-5;

  // All projections of x, stacked in this order: q [H*K], k [H*K], v [HV*V], decay [decay_rows], gate [gate_rows],
  // beta [beta_rows]. A decay or gate of low rank passes through its second matrix.
  ParameterStack* in_proj = nullptr;
  int64_t decay_rows = 0, gate_rows = 0, beta_rows = 0;
  Parameter* decay_b = nullptr;    // [HV*K, decay_rows], or null: the rows of in_proj are the logits
  Parameter* gate_b = nullptr;     // [HV*V, gate_rows], or null: the rows of in_proj are the gate
  ParameterStack* conv = nullptr;  // [2*H*K + HV*V, 1, W], or null: q, k, v are used as they are
  Parameter* A_log = nullptr;      // [HV]; null without decay
  Parameter* dt_bias = nullptr;    // [HV*K] or [HV]; null without decay
  Parameter* o_norm = nullptr;     // [V]
  Parameter* o_proj = nullptr;     // [D, HV*V]

  int64_t conv_channels() const { return 2 * num_heads * key_size + num_value_heads * value_size; }
};

// What members of the family declare alike, with global sizes; `prefix` ends where the parameter's own name begins.
struct DeltaMixerSizes {
  int64_t num_heads, num_value_heads, key_size, value_size;
};
// <prefix>{q,k,v}_conv1d.weight, [heads * size, 1, width] each.
ParameterStack& declare_convolutions(ParameterRegistry& registry, const std::string& prefix,
                                     const DeltaMixerSizes& sizes, int64_t width);
// A_log or dt_bias: `size` numbers of the decay, the same number for each of `heads` value heads.
ParameterSpec decay_parameter(std::string name, int64_t size, int64_t heads, Init init);

// All projections of x [N, D], or their gradients.
struct DeltaProjections {
  Tensor whole;  // [N, P']: proj and columns to fill up, see DeltaMixer::padded_rows
  Tensor proj;   // [N, P]: the stacked first projections
  Tensor decay;  // [N, HV*K]: decay logits of low rank; absent when they are columns of proj
  Tensor gate;   // [N, HV*V]: output gate of low rank; absent when it is columns of proj
};

class DeltaMixer : public TokenMixer {
 public:
  explicit DeltaMixer(const DeltaMixerParts& parts) : parts_(parts) {}

  std::unique_ptr<Saved> forward(Context& context, const Sequence& sequence, const LateTensor& x, const AwaitedRows& y,
                                 Write write) const override;
  void backward(Context& context, const Sequence& sequence, const Saved& saved, const LateTensor& x, const Tensor& dy,
                const AwaitedTensor& dx) const override;
  double flops_per_token(int64_t row_length) const override;
  std::unique_ptr<DecodeState> make_decode_state(Context& context, int64_t max_tokens) const override;
  void extend(Context& context, DecodeState& state, const Sequence& sequence, const Tensor& x, Tensor y) const override;

 private:
  // Columns of the stacked projection [N, P], or of its gradient.
  Tensor conv_columns(const Tensor& proj) const;   // [N, C]
  Tensor decay_columns(const Tensor& proj) const;  // [N, decay_rows]
  Tensor gate_columns(const Tensor& proj) const;   // [N, gate_rows]
  // A tensor rank's share of the stack can have any number of rows P, but a GPU multiplies slowly by one that is not a
  // multiple of 8. So products there are of P' rows, the last of which are zero; on a CPU P' is P.
  int64_t padded_rows(Device device) const;
  Tensor padded_weight(Context& context) const;  // [P', D]: the stack itself, or in scratch memory
  void add_weight_gradient(Context& context, const Tensor& d_whole, const Tensor& x) const;
  DeltaProjections allocate_projections(const Context& context, Arena& arena, int64_t N) const;
  DeltaProjections project(Context& context, Arena& arena, const LateTensor& x) const;
  // The op's inputs from the convolved columns [N, C] and the projections. Given gradients instead, the places of the
  // op's gradients.
  DeltaRuleInputs delta_inputs(const Tensor& convolved, const DeltaProjections& projections) const;
  Tensor output_gate(const DeltaProjections& projections) const;  // as heads [N, HV, V]
  // The gated norm of o [N, HV, V], in scratch memory; its statistics go to rstd [N, HV].
  Tensor normed(Context& context, const Tensor& o, const Tensor& rstd, const DeltaProjections& projections) const;
  // q, k, v after the convolution [N, C], in scratch memory; the columns themselves when there is none. `halo` [R, W-1,
  // C] holds the inputs from other sequence ranks; absent when the rows are not cut.
  Tensor convolve(Context& context, const Sequence& sequence, const Tensor& proj, const Tensor& halo) const;
  // Inputs of the convolution before a token that it reads.
  int64_t window() const { return parts_.conv ? parts_.conv->value.dim(2) - 1 : 0; }
  DType statistics_dtype() const { return parts_.o_norm->value.dtype(); }

  DeltaMixerParts parts_;
};

}  // namespace palimpsest
