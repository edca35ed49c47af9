#include "model/sequence_states.h"

#include <algorithm>
#include <vector>

#include "kernels/affine_state.h"
#include "kernels/elementwise.h"

namespace palimpsest {

namespace {

Tensor gather_slots(Context& context, const Sequence& sequence, const Tensor& own) {
  Shape shape = {sequence.crossings.num_ranks * own.dim(0)};
  for (int dim = 1; dim < own.num_dims(); ++dim) shape.push_back(own.dim(dim));
  const Tensor all = context.stream.scratch().allocate(own.dtype(), shape);
  context.mesh.sequence().all_gather(context.stream, all, own);
  return all;
}

// Whether a document goes on that began in an earlier range. A map is only applied to what enters the range: where the
// document begins there, b says all.
bool needs_matrices(const Crossings& crossings) {
  return std::any_of(crossings.leaving.begin(), crossings.leaving.end(), [&](const Crossing& leaving) {
    return std::any_of(crossings.entering.begin(), crossings.entering.end(),
                       [&](const Crossing& entering) { return entering.document == leaving.document; });
  });
}

// The maps of the ranges of documents that go on: the final states of the delta rule with K value columns more.
void compute_maps(Context& context, const Sequence& sequence, Tensor maps, const DeltaRuleInputs& in,
                  const DeltaRuleOptions& options) {
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = in.q.dim(0), HV = in.v.dim(1), V = in.v.dim(2), K = in.q.dim(2);
  std::vector<int64_t> leaving;
  for (int64_t i = 0; i < sequence.documents.count(); ++i) leaving.push_back(sequence.documents.leaving(i));
  const Documents documents = sequence.documents.with_states(sequence.documents.num_states(), leaving, leaving);
  DeltaRuleOptions keep_nothing = options;
  keep_nothing.save_level = SaveLevel::kNothing;
  fill_zero(stream, maps);
  DeltaRuleInputs inputs = in;
  if (!needs_matrices(sequence.crossings)) {
    inputs.initial_state = {};
    const Tensor b = scratch.allocate(maps.dtype(), {maps.dim(0), HV, K, V});
    fill_zero(stream, b);
    delta_rule_forward(stream, {.final_state = b}, {}, inputs, keep_nothing, documents);
    const int64_t rows = maps.numel() / (V + K);
    copy(stream, maps.view({rows, V + K}).columns(0, V), b.view({rows, V}));
    return;
  }
  inputs.v = scratch.allocate(in.v.dtype(), {N, HV, V + K});
  inputs.initial_state = scratch.allocate(maps.dtype(), maps.shape());
  fill_zero(stream, inputs.v);
  for (int64_t head = 0; head < HV; ++head)
    copy(stream, inputs.v.merge_columns().columns(head * (V + K), V), in.v.merge_columns().columns(head * V, V));
  affine_identity(stream, inputs.initial_state);
  delta_rule_forward(stream, {.final_state = maps}, {}, inputs, keep_nothing, documents);
}

// The rows of `own` [R, W-1, C] and of the other ranks that are the halo of one entering document: calls visit(row,
// count, other) for runs of `count` rows from `row` of the document's W-1 and from `other` of the gathered R * S *
// (W-1).
template <class Visit>
void for_each_halo_run(const Crossings& crossings, const Crossing& crossing, int64_t window, Visit visit) {
  int64_t missing = window;
  for (auto piece = crossing.others.rbegin(); piece != crossing.others.rend() && missing > 0; ++piece) {
    const int64_t count = std::min(piece->length, missing);
    missing -= count;
    visit(missing, count, (crossings.slot_of_all(*piece) + 1) * window - count);
  }
}

// The last inputs of documents that go on: calls visit(rows of x [N, C], rows of the slot in tails [R, W-1, C]).
template <class Visit>
void for_each_tail(const Crossings& crossings, const Tensor& x, const Tensor& tails, Visit visit) {
  const int64_t window = tails.dim(1);
  const Tensor rows = tails.view({tails.dim(0) * window, tails.dim(2)});
  for (const Crossing& crossing : crossings.leaving) {
    const int64_t count = std::min(crossing.own.length, window);
    visit(x.rows(crossing.own.first + crossing.own.length - count, count),
          rows.rows((crossing.own.slot + 1) * window - count, count));
  }
}

Tensor as_rows(const Tensor& slots) {
  return slots.view({slots.dim(0) * slots.dim(1), slots.dim(2)});
}

}  // namespace

RangeStates allocate_range_states(Arena& arena, DType dtype, const Sequence& sequence, const DeltaRuleShape& shape) {
  const int64_t R = sequence.crossings.num_slots;
  return {.maps = arena.allocate(dtype, {R, shape.HV, shape.K, shape.V + shape.K}),
          .entering = arena.allocate(dtype, {R, shape.HV, shape.K, shape.V})};
}

void exchange_states(Context& context, const Sequence& sequence, const RangeStates& states, const DeltaRuleInputs& in,
                     const DeltaRuleOptions& options) {
  Stream& stream = context.stream;
  Arena::Scope scope(stream.scratch());
  compute_maps(context, sequence, states.maps, in, options);
  const Tensor all = gather_slots(context, sequence, states.maps);
  fill_zero(stream, states.entering);
  for (const Crossing& crossing : sequence.crossings.entering)
    for (const DocumentPiece& piece : crossing.others)
      affine_apply(stream, states.entering.rows(crossing.own.slot, 1),
                   all.rows(sequence.crossings.slot_of_all(piece), 1), AffineDirection::kForward);
}

void exchange_state_gradients(Context& context, const Sequence& sequence, const RangeStates& states, Tensor d_leaving,
                              const Tensor& d_o, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
                              const DeltaRuleOptions& options) {
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t K = in.q.dim(2), V = in.v.dim(2), rows = states.maps.numel() / (V + K);
  // The adjoint map of a range: c of its first document, where that began earlier, and Phi of its last. A document has
  // both in the ranges that it fills, and where it ends Phi is multiplied by zero.
  const Tensor c = scratch.allocate(d_leaving.dtype(), d_leaving.shape());
  fill_zero(stream, c);
  delta_rule_backward(stream, {.d_initial_state = c}, d_o, {}, saved, in, options, sequence.documents);
  const Tensor adjoint = scratch.allocate(states.maps.dtype(), states.maps.shape());
  copy(stream, adjoint.view({rows, V + K}).columns(V, K), states.maps.view({rows, V + K}).columns(V, K));
  copy(stream, adjoint.view({rows, V + K}).columns(0, V), c.view({rows, V}));
  const Tensor all = gather_slots(context, sequence, adjoint);
  fill_zero(stream, d_leaving);
  for (const Crossing& crossing : sequence.crossings.leaving)
    for (auto piece = crossing.others.rbegin(); piece != crossing.others.rend(); ++piece)
      affine_apply(stream, d_leaving.rows(crossing.own.slot, 1), all.rows(sequence.crossings.slot_of_all(*piece), 1),
                   AffineDirection::kAdjoint);
}

void exchange_halo(Context& context, const Sequence& sequence, Tensor initial, const Tensor& x) {
  Stream& stream = context.stream;
  Arena::Scope scope(stream.scratch());
  const int64_t window = initial.dim(1);
  const Tensor tails = stream.scratch().allocate(initial.dtype(), initial.shape());
  fill_zero(stream, tails);
  for_each_tail(sequence.crossings, x, tails,
                [&](const Tensor& inputs, const Tensor& tail) { copy(stream, tail, inputs); });
  const Tensor all = as_rows(gather_slots(context, sequence, tails));
  fill_zero(stream, initial);
  for (const Crossing& crossing : sequence.crossings.entering)
    for_each_halo_run(sequence.crossings, crossing, window, [&](int64_t row, int64_t count, int64_t other) {
      copy(stream, as_rows(initial).rows(crossing.own.slot * window + row, count), all.rows(other, count));
    });
}

void exchange_halo_gradients(Context& context, const Sequence& sequence, Tensor dx, const Tensor& d_initial) {
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const Crossings& crossings = sequence.crossings;
  const int64_t window = d_initial.dim(1), C = d_initial.dim(2), R = crossings.num_slots;
  const Tensor d_all = scratch.allocate(d_initial.dtype(), {crossings.num_ranks * R * window, C});
  fill_zero(stream, d_all);
  for (const Crossing& crossing : crossings.entering)
    for_each_halo_run(crossings, crossing, window, [&](int64_t row, int64_t count, int64_t other) {
      const Tensor sum = d_all.rows(other, count);
      add(stream, sum, sum, as_rows(d_initial).rows(crossing.own.slot * window + row, count));
    });
  const Tensor d_tails = scratch.allocate(d_initial.dtype(), {R, window, C});
  context.mesh.sequence().reduce_scatter(stream, d_tails, d_all);
  for_each_tail(crossings, dx, d_tails, [&](const Tensor& sum, const Tensor& tail) { add(stream, sum, sum, tail); });
}

}  // namespace palimpsest
