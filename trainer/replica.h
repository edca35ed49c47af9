// What the ranks of a replica group (data x sequence) do together in a step: each has the gradient of its own tokens,
// and each updates a shard of the rows of every stack of parameters.
//
// Both classes are told by the model what it comes to (model/parameter_hooks.h). All ranks of the group must run the
// same calls of the model in the same order where the level of zero makes these collective:
//   values     with zero: 3 every forward gathers them, one group ahead of the model. Two blocks are whole at a time.
//              With less, they are gathered once they have changed, on GPUs one group ahead of the next forward.
//   gradients  are reduce-scattered group by group while earlier blocks still run backward: with zero: 1 once a step,
//              in the last micro-batch; with zero > 1 in each, and two blocks' gradients are whole at a time.
// Sums are made in the dtype of the parameters, in an order that the layout decides and, of more than two ranks on
// GPUs, whether they go as copies or by NCCL.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "model/layer.h"
#include "model/parameter_hooks.h"
#include "model/parameters.h"

namespace palimpsest {

// Whole values. One for each registry, for as long as the registry is bound.
class WholeValues : public ParameterHooks {
 public:
  explicit WholeValues(ParameterRegistry& registry);

  void need_values(Context& context, int64_t group, int64_t next) override;
  void values_changed(Context& context) override;

 private:
  struct Slot {
    int64_t group = kNoGroup;  // whose values are there or on their way
    std::unique_ptr<Pending> pending;
  };

  Slot& slot_of(int64_t group) { return slots_[registry_.groups()[group].slot]; }
  void start(Context& context, int64_t group);
  std::unique_ptr<Pending> gather(Context& context, const ParameterGroup& group);
  void renew(Context& context, int64_t group);  // with less: starts to, if its values have changed
  void wait_for_all();

  ParameterRegistry& registry_;
  std::vector<Slot> slots_;                       // with zero: 3
  std::vector<std::unique_ptr<Pending>> coming_;  // with less, by group: what is on its way,
  std::vector<bool> is_old_;                      // and whether it has not even started
};

// What a step did when, on this rank.
struct ReductionEvent {
  enum class Kind : uint8_t { kBackwardBegins, kBackwardEnds, kReduceStarts, kReduceEnds };
  Kind kind;
  int64_t group;
  int64_t micro_batch;  // 0 for the first of a step
  std::chrono::steady_clock::time_point time;
};

// Gradients of one training step. Passes on what is asked of values.
class GradientReduction : public ParameterHooks {
 public:
  GradientReduction(ParameterRegistry& registry, ParameterHooks& values);

  void need_values(Context& context, int64_t group, int64_t next) override;
  void before_backward(Context& context, int64_t group) override;
  void after_backward(Context& context, int64_t group) override;
  void values_changed(Context& context) override;

  // begin, then for each micro-batch begin_micro_batch and the model's backward, then finish. Where no micro-batch is
  // said to be the last, finish does what has not been reduced, after all backward.
  void begin(Context& context);
  void begin_micro_batch(bool is_last);
  // What is on its way arrives, with zero > 1: each grad_shard is then the sum over the ranks of all backward so far.
  // For a step that ends here, without finish.
  void settle(Context& context);
  // Leaves in every grad_shard the sum over the replica group, completed over the tensor ranks that hold copies.
  void finish(Context& context);

  const std::vector<ReductionEvent>& trace() const { return trace_; }  // of the step so far, or of the last one

 private:
  struct Slot {
    int64_t group = kNoGroup;  // whose gradients are on their way
    int64_t micro_batch = 0;
    std::unique_ptr<Pending> pending;
  };

  bool is_sharded() const { return registry_.replica_share().zero >= 2; }
  Slot& slot_of(int64_t group);
  void start(Context& context, int64_t group);
  void complete(Context& context, Slot& slot);
  void record(ReductionEvent::Kind kind, int64_t group, int64_t micro_batch);

  ParameterRegistry& registry_;
  ParameterHooks& values_;
  std::vector<Slot> slots_;    // those of groups, or one a group where sums come in place
  std::vector<bool> reduced_;  // by group, in this step
  int64_t micro_batch_ = -1;
  bool is_last_ = false;
  std::vector<ReductionEvent> trace_;
};

// Whether this rank's shard of the parameter counts in sums over all ranks (each element once, though copies hold it).
bool counts_in_sums(const TensorShare& share, const Parameter& parameter);
bool counts_in_sums(const Context& context, const Parameter& parameter);

}  // namespace palimpsest
