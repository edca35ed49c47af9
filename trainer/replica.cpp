#include "trainer/replica.h"

#include <algorithm>
#include <utility>

#include "kernels/elementwise.h"
#include "model/tensor_parallel.h"

namespace palimpsest {

namespace {

size_t count_slots(const ParameterRegistry& registry) {
  int64_t count = 0;
  for (const ParameterGroup& group : registry.groups()) count = std::max(count, group.slot + 1);
  return static_cast<size_t>(count);
}

// MPI moves data only inside its own calls.
template <class Slot>
void advance_all(std::vector<Slot>& slots) {
  for (Slot& slot : slots)
    if (slot.pending) slot.pending->advance();
}

void wait_for(std::unique_ptr<Pending>& pending) {
  if (pending) pending->wait();
  pending.reset();
}

}  // namespace

WholeValues::WholeValues(ParameterRegistry& registry)
    : registry_(registry),
      slots_(count_slots(registry)),
      coming_(registry.groups().size()),
      is_old_(registry.groups().size(), false) {}

std::unique_ptr<Pending> WholeValues::gather(Context& context, const ParameterGroup& group) {
  std::vector<Parts> tensors;
  for (const ParameterStack* stack : group.stacks)
    tensors.push_back({.whole = stack->whole_value, .part = stack->own_value});
  return context.mesh.replica().start_all_gather(context.stream, std::move(tensors));
}

void WholeValues::start(Context& context, int64_t group) {
  Slot& slot = slot_of(group);
  if (slot.group == group) return;
  wait_for(slot.pending);  // of a group that was fetched ahead and not asked for
  slot.group = group;
  slot.pending = gather(context, registry_.groups()[group]);
}

void WholeValues::need_values(Context& context, int64_t group, int64_t next) {
  if (registry_.replica_share().zero < 3) {
    renew(context, group);
    if (next != kNoGroup) renew(context, next);
    wait_for(coming_[group]);
    return;
  }
  advance_all(slots_);
  start(context, group);
  if (next != kNoGroup && &slot_of(next) != &slot_of(group)) start(context, next);
  wait_for(slot_of(group).pending);
}

void WholeValues::values_changed(Context& context) {
  const ReplicaShare& share = registry_.replica_share();
  if (share.size == 1) return;
  for (Slot& slot : slots_) {
    wait_for(slot.pending);
    slot.group = kNoGroup;
  }
  if (share.zero >= 3) return;
  wait_for_all();
  is_old_.assign(is_old_.size(), true);
  // Every rank's rows to all, in place. On a GPU the model's first group comes while the next step is prepared, and
  // each other one while the group before it is used: the host has to do something for each as well, and the GPU would
  // wait for it if all were started here. Elsewhere data moves only while somebody waits, so it is done here, two
  // groups under way at a time.
  for (size_t group = 0; group < coming_.size(); ++group) {
    renew(context, static_cast<int64_t>(group));
    if (context.stream.device() == Device::kCuda) return;
    if (group > 0) wait_for(coming_[group - 1]);
  }
  wait_for_all();
}

void WholeValues::wait_for_all() {
  for (std::unique_ptr<Pending>& pending : coming_) wait_for(pending);
}

void WholeValues::renew(Context& context, int64_t group) {
  if (!is_old_[group]) return;
  is_old_[group] = false;
  coming_[group] = gather(context, registry_.groups()[group]);
}

GradientReduction::GradientReduction(ParameterRegistry& registry, ParameterHooks& values)
    : registry_(registry),
      values_(values),
      slots_(std::max(count_slots(registry), registry.groups().size())),
      reduced_(registry.groups().size(), false) {}

// Where sums come in place no group's memory is another's, and nothing waits before the end.
GradientReduction::Slot& GradientReduction::slot_of(int64_t group) {
  const ParameterGroup& parameters = registry_.groups()[group];
  return slots_[parameters.stacks.front()->received.defined() ? parameters.slot : group];
}

void GradientReduction::need_values(Context& context, int64_t group, int64_t next) {
  advance_all(slots_);
  values_.need_values(context, group, next);
}

void GradientReduction::values_changed(Context& context) {
  values_.values_changed(context);
}

void GradientReduction::begin(Context& context) {
  const ReplicaShare& share = registry_.replica_share();
  CHECK(share.size == context.mesh.replica().size() && share.rank == context.mesh.replica().rank(),
        "the registry is for rank ", share.rank, " of ", share.size, ", the mesh has ", context.mesh.replica().rank(),
        " of ", context.mesh.replica().size());
  settle(context);  // a step that never finished would be added to this one
  registry_.zero_gradients(context.stream);
  reduced_.assign(reduced_.size(), false);
  micro_batch_ = -1;
  is_last_ = false;
  trace_.clear();
}

void GradientReduction::begin_micro_batch(bool is_last) {
  ++micro_batch_;
  is_last_ = is_last;
}

void GradientReduction::before_backward(Context& context, int64_t group) {
  if (is_sharded()) {
    complete(context, slot_of(group));
    for (const ParameterStack* stack : registry_.groups()[group].stacks) fill_zero(context.stream, stack->whole_grad);
  }
  record(ReductionEvent::Kind::kBackwardBegins, group, micro_batch_);
}

void GradientReduction::after_backward(Context& context, int64_t group) {
  record(ReductionEvent::Kind::kBackwardEnds, group, micro_batch_);
  advance_all(slots_);
  if (registry_.replica_share().size > 1 && (is_sharded() || is_last_)) start(context, group);
}

void GradientReduction::start(Context& context, int64_t group) {
  Slot& slot = slot_of(group);
  complete(context, slot);
  slot.group = group;
  slot.micro_batch = micro_batch_;
  reduced_[group] = true;
  record(ReductionEvent::Kind::kReduceStarts, group, micro_batch_);
  std::vector<Parts> tensors;
  for (const ParameterStack* stack : registry_.groups()[group].stacks)
    tensors.push_back(
        {.whole = stack->whole_grad, .part = stack->received.defined() ? stack->received : stack->own_grad});
  slot.pending = context.mesh.replica().start_reduce_scatter(context.stream, std::move(tensors));
}

void GradientReduction::complete(Context& context, Slot& slot) {
  if (slot.group == kNoGroup) return;
  wait_for(slot.pending);
  for (const ParameterStack* stack : registry_.groups()[slot.group].stacks) {
    if (is_sharded()) {
      add(context.stream, stack->own_grad, stack->own_grad, stack->received);
    } else if (stack->received.defined()) {
      copy(context.stream, stack->own_grad, stack->received);
    }
  }
  record(ReductionEvent::Kind::kReduceEnds, slot.group, slot.micro_batch);
  slot.group = kNoGroup;
}

void GradientReduction::settle(Context& context) {
  for (Slot& slot : slots_) complete(context, slot);
}

void GradientReduction::finish(Context& context) {
  if (registry_.replica_share().size > 1 && !is_sharded())
    for (size_t group = reduced_.size(); group-- > 0;)
      if (!reduced_[group]) start(context, static_cast<int64_t>(group));
  settle(context);
  sum_over_copies(context, registry_);
}

void GradientReduction::record(ReductionEvent::Kind kind, int64_t group, int64_t micro_batch) {
  trace_.push_back({kind, group, micro_batch, std::chrono::steady_clock::now()});
}

bool counts_in_sums(const TensorShare& share, const Parameter& parameter) {
  return share.rank % parameter.block.copies == 0;
}

bool counts_in_sums(const Context& context, const Parameter& parameter) {
  const Communicator& tensor = context.mesh.tensor();
  return counts_in_sums(TensorShare{.rank = tensor.rank(), .size = tensor.size()}, parameter);
}

}  // namespace palimpsest
