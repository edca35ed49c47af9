// What the layers with a recurrent state exchange over the sequence axis: the affine map of each range to the ranks
// that need the state at its end, and the inputs of a short convolution just before each range. Neither grows with the
// length of the rows. Every sequence rank makes the same calls, whatever its documents. They wait for what they
// exchange: the op that follows needs it from its first token on.
#pragma once

#include "kernels/delta_rule.h"
#include "model/layer.h"

namespace palimpsest {

// ---- states of the delta rule -----------------------------------------------------------------------------------
// For each slot of the rank (see Crossings): the state with which the document begins that began earlier.
struct RangeStates {
  Tensor maps;      // [R, HV, K, V + K]: what the slot's last document, where it goes on, does to a state
  Tensor entering;  // [R, HV, K, V]
};
RangeStates allocate_range_states(Arena& arena, DType dtype, const Sequence& sequence, const DeltaRuleShape& shape);

// Forward: fills `states`. in.initial_state is not read.
void exchange_states(Context& context, const Sequence& sequence, const RangeStates& states, const DeltaRuleInputs& in,
                     const DeltaRuleOptions& options);
// Backward: d_leaving [R, HV, K, V], the gradients of the final states of documents that go on, from d_o [N, HV, V] of
// all ranks. `in` holds the initial states; `saved` is what delta_rule_forward kept.
void exchange_state_gradients(Context& context, const Sequence& sequence, const RangeStates& states, Tensor d_leaving,
                              const Tensor& d_o, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
                              const DeltaRuleOptions& options);

// ---- inputs of a short convolution ------------------------------------------------------------------------------
// initial [R, W-1, C]: for each slot the inputs x [N, C] just before the document that began earlier, 0 before its
// start; they may come from several ranks.
void exchange_halo(Context& context, const Sequence& sequence, Tensor initial, const Tensor& x);
// The adjoint: adds what d_initial holds into dx [N, C] of the ranks that the inputs came from.
void exchange_halo_gradients(Context& context, const Sequence& sequence, Tensor dx, const Tensor& d_initial);

}  // namespace palimpsest
