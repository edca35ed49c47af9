// The kernels of the Hopper delta rule in their order. Run launches one: run(kernel, blocks, threads, shared bytes,
// arguments...), and run.clear(address, bytes) writes zeros; on a GPU or elsewhere.
//
// Forward: prepare (a chunk and head a block), then the scan over chunks (a segment, head and 64 values a block).
// Backward: the operands again, whatever forward did not keep, the scan back, and the chunk-local kernel.
#pragma once

#include "kernels/cuda/delta_rule_sm90_local.cuh"
#include "kernels/cuda/delta_rule_sm90_operands.cuh"
#include "kernels/cuda/delta_rule_sm90_prepare.cuh"
#include "kernels/cuda/delta_rule_sm90_scalar.cuh"
#include "kernels/cuda/delta_rule_sm90_scalar_local.cuh"
#include "kernels/cuda/delta_rule_sm90_scan.cuh"
#include "kernels/cuda/delta_rule_sm90_sums.cuh"

namespace palimpsest::cuda::sm90 {

template <int K, bool kScores, class Run>
void order_prepare(Run& run, const DeltaRuleSm90& op, const DeltaRuleWorkspace& w) {
  const int64_t blocks = num_slots(op) * op.HV;
  if (op.vector_decay && kScores) {
    run(delta_rule_prepare_kernel<K>, blocks, kPrepareThreads, PrepareLayout<K>::kBytes, op, w);
  } else if (op.vector_decay) {
    run(delta_rule_operands_kernel<K>, blocks, kPrepareThreads, operands_bytes(K), op, w);
  } else {
    run(delta_rule_scalar_prepare_kernel<K, kScores>, blocks, kPrepareThreads, ScalarPrepareLayout<K>::kBytes, op, w);
  }
}

template <int K, class Run>
void order_scan(Run& run, void (*kernel)(DeltaRuleSm90, DeltaRuleWorkspace, ScanPass), const DeltaRuleSm90& op,
                const DeltaRuleWorkspace& w, ScanPass pass) {
  run(kernel, num_segments(op, w.segment) * op.HV * (op.V / kValueTile), kScanThreads, ScanLayout<K>::kBytes, op, w,
      pass);
}

template <int K, class Run>
void order_fold(Run& run, const DeltaRuleSm90& op, const DeltaRuleWorkspace& w, bool forward) {
  run(delta_rule_fold_kernel<K>, op.num_documents * op.HV * (op.V / kFoldColumns), kFoldThreads, K * kFoldColumns * 4,
      op, w, forward);
}

// The maps of segments: scans without values.
template <int K, class Run>
void order_maps(Run& run, const DeltaRuleSm90& op, const DeltaRuleWorkspace& w) {
  run.clear(w.no_value, op.HV * K * static_cast<int64_t>(sizeof(*w.no_value)));
  DeltaRuleSm90 map = op;
  DeltaRuleWorkspace of_maps = w;
  map.V = K;
  map.v = {w.no_value, 0};
  map.o = {};
  of_maps.x = of_maps.states = nullptr;
  order_scan<K>(run, delta_rule_fwd_scan_kernel<K>, map, of_maps, ScanPass::kMaps);
}

template <int K, class Run>
void order_states(Run& run, const DeltaRuleSm90& op, const DeltaRuleWorkspace& w) {
  if (w.segment > 0) {
    order_maps<K>(run, op, w);
    DeltaRuleSm90 of_ends = op;
    DeltaRuleWorkspace ends = w;
    of_ends.o = {};
    ends.x = ends.states = nullptr;
    order_scan<K>(run, delta_rule_fwd_scan_kernel<K>, of_ends, ends, ScanPass::kEnds);
    order_fold<K>(run, op, w, true);
    if (op.o.data == nullptr && w.x == nullptr) return;
  }
  order_scan<K>(run, delta_rule_fwd_scan_kernel<K>, op, w, ScanPass::kResults);
}

template <int K, class Run>
void order_forward(Run& run, const DeltaRuleSm90& op, const DeltaRuleWorkspace& w) {
  order_prepare<K, true>(run, op, w);
  order_states<K>(run, op, w);
}

// local_blocks: how many chunk-local blocks run at once.
template <int K, class Run>
void order_backward(Run& run, const DeltaRuleSm90& op, const DeltaRuleWorkspace& w, int64_t local_blocks) {
  const bool alone = op.dq.data == nullptr;  // d_initial_state alone
  order_prepare<K, false>(run, op, w);
  if (op.m == nullptr || op.aqk == nullptr) order_prepare<K, true>(run, op, w);
  if (!alone && (op.x == nullptr || op.states == nullptr)) {
    DeltaRuleSm90 again = op;
    again.o.data = nullptr;
    again.final_state = nullptr;
    order_states<K>(run, again, w);
  } else if (w.segment > 0) {
    order_maps<K>(run, op, w);
  }
  if (w.segment > 0) {
    DeltaRuleSm90 of_starts = op;
    DeltaRuleWorkspace starts = w;
    of_starts.dv = {};
    starts.dstates = nullptr;
    order_scan<K>(run, delta_rule_bwd_scan_kernel<K>, of_starts, starts, ScanPass::kEnds);
    order_fold<K>(run, op, w, false);
    if (alone) return;
  }
  order_scan<K>(run, delta_rule_bwd_scan_kernel<K>, op, w, ScanPass::kResults);
  if (alone) return;
  const int64_t items = num_slots(op) * op.HV, blocks = items < local_blocks ? items : local_blocks;
  if (op.vector_decay) {
    run(delta_rule_bwd_local_kernel<K>, blocks, kLocalThreads, LocalLayout<K>::kBytes, op, w);
  } else {
    run(delta_rule_scalar_bwd_local_kernel<K>, blocks, kLocalThreads, ScalarLocalLayout<K>::kBytes, op, w);
  }
  const int W = op.vector_decay ? K : 1;
  if (op.ddt_bias != nullptr)
    run(delta_rule_bwd_gate_sums_kernel, op.HV * ((W + kSumColumns) / kSumColumns), kSumThreads, kSumBytes, op, w, W);
  if (op.HV > op.H)
    run(delta_rule_bwd_group_sums_kernel, (op.N * op.H * (K / 8) + kSumThreads - 1) / kSumThreads, kSumThreads, 0, op,
        w);
}

}  // namespace palimpsest::cuda::sm90
