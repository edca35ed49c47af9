// The parameter registry. A layer declares each weight once; optimizer, checkpoint, gradient norm, import, export, the
// parameter table and the FLOP count all walk the registry, and nothing else lists weights.
//
// Weights are [out, in], as in the public checkpoints. Projections that read the same input are declared as a stack:
// they lie one below the other in memory, so that one matrix product serves them, and each keeps its public name.
//
// Ranks of a replica group share the optimizer's work: each holds an equal range of every stack's rows, its shard, and
// updates that alone. How much of the rest a rank holds too is the level of `zero`; layers always see whole values and
// gradients, which trainer/replica.h puts there in time.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/arena.h"
#include "kernels/rms_norm.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace palimpsest {

enum class Init : uint8_t {
  kNormal,  // normal(0, initializer_range)
  kZeros,
  kOnes,
  kLogUniform1To16,  // A_log of KDA with the softplus gate: log of uniform(1, 16)
  kLogUniform0To16,  // A_log of Gated DeltaNet: log of uniform(0, 16), kept at or above log 0.01 (0 would be a dead
                     // head)
  kDtBias,           // inverse softplus of dt, log-uniform in [1e-3, 1e-1], floor 1e-4
};

// Whether AdamW's weight decay applies. Matrices and convolution kernels decay; norms, biases, A_log and dt_bias do
// not.
enum class WeightDecay : uint8_t { kNo, kYes };

// How tensor parallelism cuts the parameter, and what one tensor rank's gradient is then.
// A replicated parameter's gradient is summed over the tensor group before it is used.
enum class TensorSplit : uint8_t {
  kRows,               // dimension 0, by head, column or vocabulary row; gradient complete
  kColumns,            // dimension 1; gradient complete
  kPartialOverTokens,  // replicated; the gradient is a sum over the rank's tokens only
  kPartialOverHeads,   // replicated; the gradient is a sum over the rank's heads only
};

// Whether the weight takes part in a matrix product once per token: counted in the 6 * weights of model FLOPs.
enum class InProduct : uint8_t { kNo, kYes };

struct ParameterSpec {
  std::string name;  // public name, "model.layers.3.self_attn.q_proj.weight"
  Shape shape;       // global
  Init init = Init::kNormal;
  WeightDecay decay = WeightDecay::kYes;
  TensorSplit split = TensorSplit::kRows;
  InProduct in_product = InProduct::kYes;
  int64_t units = 0;  // heads, when kRows or kColumns cut between heads alone; 0: anywhere, as even as it goes
};

// The weight [size] of a norm, which every tensor rank holds whole: the initial values leave the normalised alone.
ParameterSpec norm_weight(std::string name, int64_t size, TensorSplit split, NormWeight kind = NormWeight::kPlain);

// This rank's place in its tensor group.
struct TensorShare {
  int64_t rank = 0, size = 1;
  // How many of `count` heads (or other units) this rank computes. Throws a UserError that names `what` unless the
  // group's size divides it.
  int64_t units(int64_t count, const std::string& what) const;
  // The same for key heads that several query or value heads read: where the size is a multiple of the count, size /
  // count ranks hold a copy of one.
  int64_t shared_units(int64_t count, const std::string& what) const;
};

// The part of a parameter that a tensor rank holds.
struct TensorBlock {
  Shape start;  // in the global tensor
  Shape shape;
  int64_t copies = 1;  // tensor ranks that hold the same part; their gradients are summed
};
TensorBlock tensor_block(const ParameterSpec& spec, const TensorShare& share);

// This rank's place in its replica group, over which the optimizer's work is shared.
// zero: 1, a rank holds the optimizer state of its shard alone; 2, the gradients too; 3, the values too.
struct ReplicaShare {
  int64_t rank = 0, size = 1;
  int64_t zero = 1;
};

// The rows of a block or of a stack of blocks that one replica rank updates. A stack's are [rank * each, ...) with
// each = ceil(rows / size); the last ranks may hold fewer, or none. A parameter's are what falls into its own rows.
struct RowShard {
  int64_t begin = 0, count = 0;
};

struct Parameter {
  ParameterSpec spec;
  TensorBlock block;      // what this tensor rank holds of it
  RowShard shard;         // what this replica rank updates of that
  Tensor value;           // block.shape; f32, or f64 in f64 runs. Whole between need_values() calls (parameter_hooks.h)
  Tensor operand;         // what products read: value, or its rows rounded beforehand (rounded_weights.h)
  Tensor grad;            // same, where layers add; absent when bound without gradients
  Tensor value_shard;     // [shard.count, ...]: the shard's rows of the true value, at every level of zero
  Tensor grad_shard;      // same: where the sum over the replica group comes to stand
  Tensor adam_m, adam_v;  // same; absent when bound without optimizer state
};

// Parameters that lie one below the other, and the memory behind them, with rows to fill up the last shard.
struct ParameterStack {
  std::vector<Parameter*> parameters;
  int64_t rows = 0;  // of this tensor rank
  int64_t each = 0;  // rows of a shard
  Tensor value;      // [rows, in]
  Tensor operand;    // [rows, in], as a parameter's
  Tensor grad;       // [rows, in]

  Tensor whole_value, whole_grad;  // [each * ranks, in]: value and grad begin here
  Tensor own_value;                // [each, in]: the rank's rows of the true values; with zero < 3 part of whole_value
  Tensor own_grad;                 // [each, in]: the rank's rows of the sum; with zero < 2 part of whole_grad
  Tensor received;  // [each, in]: a sum on its way; absent where it can come to own_grad: with zero < 2 on a GPU
};

// Stacks whose values a model needs at the same time: a block, the embedding, the head. With zero > 1 groups that take
// turns share memory: a slot.
struct ParameterGroup {
  std::vector<ParameterStack*> stacks;
  int64_t slot = 0;
};

// What a run needs beside the values.
enum class ParameterUse : uint8_t { kInference, kGradients, kTraining };

class ParameterRegistry {
 public:
  explicit ParameterRegistry(TensorShare share = {}, ReplicaShare replica = {});
  ParameterRegistry(const ParameterRegistry&) = delete;
  ParameterRegistry& operator=(const ParameterRegistry&) = delete;

  // What is declared from here on belongs to a new group, whose number this returns. Two groups of one slot must never
  // be in use at the same time.
  int64_t begin_group(int64_t slot);
  // References stay valid for the registry's life. Throws an Error on a name declared twice.
  Parameter& declare(ParameterSpec spec);
  // All specs are matrices of one width; at least one.
  ParameterStack& declare_stack(std::vector<ParameterSpec> specs);

  // Takes the tensors of every parameter from three arenas, in declaration order. May be called again, with real arenas
  // after planning ones; layers see the new tensors.
  void bind(DType dtype, ParameterUse use, Arena& parameters, Arena& gradients, Arena& optimizer);

  // Fills what this rank holds of the values: a pure function of (seed, parameter name, global element index), drawn in
  // f64 and rounded once. `progress` is told the elements of each parameter that was filled.
  void initialize(uint64_t seed, double initializer_range, const std::function<void(int64_t elements)>& progress = {});
  void zero_gradients(Stream& stream);  // with zero > 1 those of the shard
  void zero_optimizer(Stream& stream);

  const TensorShare& tensor_share() const { return share_; }
  const ReplicaShare& replica_share() const { return replica_; }  // zero is 1 where there is one rank
  std::deque<Parameter>& parameters() { return parameters_; }
  const std::deque<Parameter>& parameters() const { return parameters_; }
  const std::vector<ParameterGroup>& groups() const { return groups_; }
  Parameter* find(const std::string& name);               // null when there is none
  int64_t num_elements() const { return num_elements_; }  // of all parameters, over all ranks
  int64_t num_product_elements() const;                   // of those with InProduct::kYes

 private:
  void bind_own(ParameterStack& stack, DType dtype, ParameterUse use, Arena& parameters, Arena& gradients,
                Arena& optimizer);
  void bind_slot(int64_t slot, DType dtype, ParameterUse use, Arena& parameters, Arena& gradients);

  TensorShare share_;
  ReplicaShare replica_;
  std::deque<Parameter> parameters_;
  int64_t num_elements_ = 0;
  std::deque<ParameterStack> stacks_;  // every parameter belongs to exactly one, often alone
  std::vector<ParameterGroup> groups_;
  std::unordered_map<std::string, Parameter*> by_name_;
};

// One line a parameter (name, shape, count, init, weight decay) and a total, for the start-up log and --dry-run. The
// experts of a layer share their lines.
std::string parameter_table(const ParameterRegistry& registry);

// The initial value of one element: a pure function of its arguments.
double initial_value(const ParameterSpec& spec, uint64_t seed, int64_t global_index, double initializer_range);

}  // namespace palimpsest
