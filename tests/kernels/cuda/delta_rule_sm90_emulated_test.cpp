// The Hopper kernels of the delta rule, run on the CPU (tests/kernels/cuda/emulated), against f64.
#include <gtest/gtest.h>

#include <cstdlib>

#include "kernels/cuda/delta_rule_sm90_local.cuh"
#include "kernels/cuda/delta_rule_sm90_operands.cuh"
#include "kernels/cuda/delta_rule_sm90_prepare.cuh"
#include "kernels/cuda/delta_rule_sm90_scalar_local.cuh"
#include "kernels/cuda/delta_rule_sm90_scan.cuh"
#include "kernels/cuda/delta_rule_sm90_sums.cuh"
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

template <class Body>
void launch(int64_t blocks, int threads, int64_t shared_bytes, Body body) {
  gridDim.x = static_cast<unsigned>(blocks);
  emulated::Block::launch(blocks, threads, shared_bytes, body, [](unsigned block, unsigned thread) {
    blockIdx.x = block;
    threadIdx.x = thread;
  });
}

// The launches of kernels/cuda/delta_rule_sm90.cu, with few persistent blocks.
template <int K>
class Launcher {
 public:
  Launcher(const DeltaRuleSm90& op, void* workspace, bool backward) : op_(op) {
    carve_workspace(op, backward, workspace, w_);
  }

  void forward() {
    scores();
    launch(num_scans(), kScanThreads, ScanLayout<K>::kBytes, [&] { delta_rule_fwd_scan_kernel<K>(op_, w_); });
  }
  void backward() {
    operands();
    if (op_.m == nullptr) scores();
    if (op_.dq.data == nullptr) {
      launch(num_scans(), kScanThreads, ScanLayout<K>::kBytes, [&] { delta_rule_bwd_scan_kernel<K>(op_, w_); });
      return;
    }
    if (op_.x == nullptr) {
      DeltaRuleSm90 again = op_;
      again.o.data = nullptr;
      again.final_state = nullptr;
      launch(num_scans(), kScanThreads, ScanLayout<K>::kBytes, [&] { delta_rule_fwd_scan_kernel<K>(again, w_); });
    }
    launch(num_scans(), kScanThreads, ScanLayout<K>::kBytes, [&] { delta_rule_bwd_scan_kernel<K>(op_, w_); });
    const int64_t blocks = std::min<int64_t>(items(), 3);
    if (op_.vector_decay) {
      launch(blocks, kLocalThreads, LocalLayout<K>::kBytes, [&] { delta_rule_bwd_local_kernel<K>(op_, w_); });
    } else {
      launch(blocks, kLocalThreads, ScalarLocalLayout<K>::kBytes,
             [&] { delta_rule_scalar_bwd_local_kernel<K>(op_, w_); });
    }
    const int W = op_.vector_decay ? K : 1;
    if (op_.ddt_bias != nullptr)
      launch(op_.HV * ((W + kSumColumns) / kSumColumns), kSumThreads, kSumBytes,
             [&] { delta_rule_bwd_gate_sums_kernel(op_, w_, W); });
    if (op_.HV > op_.H)
      launch((op_.N * op_.H * (K / 8) + kSumThreads - 1) / kSumThreads, kSumThreads, 0,
             [&] { delta_rule_bwd_group_sums_kernel(op_, w_); });
  }

 private:
  int64_t items() const { return num_slots(op_) * op_.HV; }
  int64_t num_scans() const { return op_.num_documents * op_.HV * (op_.V / kValueTile); }
  void operands() {
    if (op_.vector_decay) {
      launch(items(), kPrepareThreads, operands_bytes(K), [&] { delta_rule_operands_kernel<K>(op_, w_); });
    } else {
      launch(items(), kPrepareThreads, ScalarPrepareLayout<K>::kBytes,
             [&] { delta_rule_scalar_prepare_kernel<K, false>(op_, w_); });
    }
  }
  void scores() {
    if (op_.vector_decay) {
      launch(items(), kPrepareThreads, PrepareLayout<K>::kBytes, [&] { delta_rule_prepare_kernel<K>(op_, w_); });
    } else {
      launch(items(), kPrepareThreads, ScalarPrepareLayout<K>::kBytes,
             [&] { delta_rule_scalar_prepare_kernel<K, true>(op_, w_); });
    }
  }

  DeltaRuleSm90 op_;
  DeltaRuleWorkspace w_;
};

template <int K>
void expect_matches_recurrence(const DeltaRuleCase& c, Keep keep) {
  const DeltaRuleHost host = random_inputs(c, 7);
  Memory memory;
  const DeviceCase<Memory> run(memory, c, host, keep);
  Launcher<K>(run.op(), run.workspace(), false).forward();
  std::memset(run.workspace(), 0xff, static_cast<size_t>(delta_rule_sm90_backward_workspace(run.op())));
  Launcher<K>(run.op(), run.workspace(), true).backward();
  for (const NamedError& e : compare(run.results(), reference_results(c, host), false, true))
    EXPECT_LE(e.error, e.limit) << c.name << ", " << e.name;
}

TEST(DeltaRuleSm90Emulated, VectorDecayMatchesRecurrenceOverDocuments) {
  expect_matches_recurrence<128>(
      {.name = "documents", .lengths = {1, 37, 0, 66}, .V = 64, .states = true, .spacing = 8}, Keep::kAll);
}

// Rows of their own choice, and the calls for states alone: the same bits.
template <int K>
void expect_states_in_rows(const DeltaRuleCase& c) {
  expect_matches_recurrence<K>(c, Keep::kAll);
  const DeltaRuleHost host = random_inputs(c, 7);
  Memory memory;
  const DeviceCase<Memory> all(memory, c, host, Keep::kNothing), alone(memory, c, host, Keep::kNothing);
  Launcher<K>(all.op(), all.workspace(), false).forward();
  Launcher<K>(all.op(), all.workspace(), true).backward();
  const DeltaRuleSm90 op = alone.states_alone();
  Launcher<K>(op, memory.allocate(delta_rule_sm90_forward_workspace(op)), false).forward();
  Launcher<K>(op, memory.allocate(delta_rule_sm90_backward_workspace(op)), true).backward();
  EXPECT_EQ(alone.results().final_state, all.results().final_state);
  EXPECT_EQ(alone.results().d_initial_state, all.results().d_initial_state);
}

TEST(DeltaRuleSm90Emulated, StatesLieInRowsThatDocumentsName) {
  for (const bool vector_decay : {true, false})
    expect_states_in_rows<64>({.name = "rows of states",
                               .lengths = {3, 67, 0, 1, 29},
                               .H = 2,
                               .HV = 2,
                               .K = 64,
                               .V = 64,
                               .vector_decay = vector_decay,
                               .states = true,
                               .entering = {-1, 3, -1, -1, 0},
                               .leaving = {2, -1, -1, -1, 0}});
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
