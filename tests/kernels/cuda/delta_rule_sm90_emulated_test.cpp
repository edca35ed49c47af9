// The Hopper kernels of the delta rule, run on the CPU (tests/kernels/cuda/emulated), against f64.
#include <gtest/gtest.h>

#include <cstdlib>

#include "kernels/cuda/delta_rule_sm90_order.cuh"
#include "tests/kernels/cuda/delta_rule_sm90_run.h"

namespace palimpsest::cuda {

// What the launcher says of the workspace.
int64_t delta_rule_sm90_forward_workspace(const DeltaRuleSm90& op) {
  sm90::DeltaRuleWorkspace w;
  return sm90::carve_workspace(op, false, nullptr, w);
}
int64_t delta_rule_sm90_backward_workspace(const DeltaRuleSm90& op) {
  sm90::DeltaRuleWorkspace w;
  return sm90::carve_workspace(op, true, nullptr, w);
}

namespace {

using namespace sm90;

class Memory {
 public:
  void* allocate(int64_t bytes) {
    constexpr size_t kAlignment = 1024;
    const size_t size = (static_cast<size_t>(bytes) / kAlignment + 1) * kAlignment;
    blocks_.emplace_back(std::aligned_alloc(kAlignment, size));
    std::memset(blocks_.back().get(), 0xff, size);
    return blocks_.back().get();
  }
  static void upload(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
  static void download(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

 private:
  struct Free {
    void operator()(void* block) const { std::free(block); }
  };
  std::vector<std::unique_ptr<void, Free>> blocks_;
};

class Launches {
 public:
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
                  const Arguments&... arguments) {
    gridDim.x = static_cast<unsigned>(blocks);
    emulated::Block::launch(
        blocks, threads, shared_bytes, [&] { kernel(arguments...); },
        [](unsigned block, unsigned thread) {
          blockIdx.x = block;
          threadIdx.x = thread;
        });
  }
  void clear(void* address, int64_t bytes) { std::memset(address, 0, static_cast<size_t>(bytes)); }
};

template <int K>
void run_forward(const DeltaRuleSm90& op, void* workspace) {
  DeltaRuleWorkspace w;
  carve_workspace(op, false, workspace, w);
  Launches run;
  order_forward<K>(run, op, w);
}
template <int K>
void run_backward(const DeltaRuleSm90& op, void* workspace) {
  DeltaRuleWorkspace w;
  carve_workspace(op, true, workspace, w);
  Launches run;
  order_backward<K>(run, op, w, 3);
}

template <int K>
void expect_matches_recurrence(const DeltaRuleCase& c, Keep keep) {
  const DeltaRuleHost host = random_inputs(c, 7);
  Memory memory;
  const DeviceCase<Memory> run(memory, c, host, keep);
  run_forward<K>(run.op(), run.workspace());
  std::memset(run.workspace(), 0xff, static_cast<size_t>(delta_rule_sm90_backward_workspace(run.op())));
  run_backward<K>(run.op(), run.workspace());
  for (const NamedError& e : compare(run.results(), reference_results(c, host), false, true))
    EXPECT_LE(e.error, e.limit) << c.name << ", " << e.name;
}

TEST(DeltaRuleSm90Emulated, VectorDecayMatchesRecurrenceOverDocuments) {
  expect_matches_recurrence<128>(
      {.name = "documents", .lengths = {1, 37, 0, 66}, .V = 64, .states = true, .spacing = 8}, Keep::kAll);
}

// Rows of their own choice, and the calls for states alone.
template <int K>
void expect_states_in_rows(const DeltaRuleCase& c) {
  expect_matches_recurrence<K>(c, Keep::kAll);
  const DeltaRuleHost host = random_inputs(c, 7);
  Memory memory;
  const DeviceCase<Memory> alone(memory, c, host, Keep::kNothing);
  const DeltaRuleSm90 op = alone.states_alone();
  run_forward<K>(op, memory.allocate(delta_rule_sm90_forward_workspace(op)));
  run_backward<K>(op, memory.allocate(delta_rule_sm90_backward_workspace(op)));
  for (const NamedError& e : compare_states(alone.results(), reference_results(c, host)))
    EXPECT_LE(e.error, e.limit) << c.name << ", alone, " << e.name;
}

TEST(DeltaRuleSm90Emulated, StatesLieInRowsThatDocumentsName) {
  for (const bool vector_decay : {true, false}) expect_states_in_rows<64>(rows_of_states(vector_decay, 64, 29));
}

TEST(DeltaRuleSm90Emulated, SegmentsMatchRecurrence) {
  expect_states_in_rows<64>(segments(true, 64, 200, 1));
  expect_states_in_rows<64>(segments(false, 64, 200, 2));
}

TEST(DeltaRuleSm90Emulated, GatesAtTheBoundAndWithoutDecayMatchRecurrence) {
  expect_matches_recurrence<64>(
      {.name = "mixed gates", .lengths = {200}, .K = 64, .V = 128, .states = true, .mixed_gate = true},
      Keep::kMatrices);
}

TEST(DeltaRuleSm90Emulated, GroupedHeadsAndThreeValueTilesMatchRecurrence) {
  expect_matches_recurrence<64>({.name = "grouped heads",
                                 .lengths = {65},
                                 .H = 1,
                                 .HV = 2,
                                 .K = 64,
                                 .V = 192,
                                 .gate = DeltaGateKind::kSoftplus,
                                 .A_log = 1.0F},
                                Keep::kNothing);
}

TEST(DeltaRuleSm90Emulated, ScalarDecayMatchesRecurrence) {
  expect_matches_recurrence<128>(
      {.name = "scalar decay", .lengths = {3, 130}, .H = 1, .HV = 2, .V = 64, .vector_decay = false, .states = true},
      Keep::kAll);
}

TEST(DeltaRuleSm90Emulated, ConstantDecayMatchesRecurrence) {
  expect_matches_recurrence<64>({.name = "constant decay",
                                 .lengths = {70},
                                 .H = 2,
                                 .HV = 2,
                                 .K = 64,
                                 .V = 64,
                                 .vector_decay = false,
                                 .gate = DeltaGateKind::kConstant},
                                Keep::kAll);
}

}  // namespace

}  // namespace palimpsest::cuda
