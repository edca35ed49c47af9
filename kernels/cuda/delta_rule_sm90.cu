// Launches of the Hopper delta rule. Forward: prepare (a chunk and head a block), then the scan over chunks (a
// document, head and 64 values a block). Backward: the operands again, whatever forward did not keep, the scan back,
// and the chunk-local kernel.
#include "kernels/cuda/delta_rule_sm90.h"

#include "kernels/cuda/delta_rule_sm90_local.cuh"
#include "kernels/cuda/delta_rule_sm90_operands.cuh"
#include "kernels/cuda/delta_rule_sm90_prepare.cuh"
#include "kernels/cuda/delta_rule_sm90_scalar.cuh"
#include "kernels/cuda/delta_rule_sm90_scalar_local.cuh"
#include "kernels/cuda/delta_rule_sm90_scan.cuh"
#include "kernels/cuda/delta_rule_sm90_sums.cuh"

namespace palimpsest::cuda {

namespace {

using namespace sm90;

constexpr int kAlignment = 1024;  // of dynamic shared memory

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, cudaStream_t queue,
                   Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  const int bytes = shared_bytes + kAlignment;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess)
    return error;
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<size_t>(bytes), queue>>>(
      arguments...);
  return cudaGetLastError();
}

// Calls launches one after the other until one fails.
class Launches {
 public:
  template <class... Arguments>
  void operator()(Arguments... arguments) {
    if (error_ == cudaSuccess) error_ = launch(arguments...);
  }
  cudaError_t error() const { return error_; }

 private:
  cudaError_t error_ = cudaSuccess;
};

template <int K, bool kScores>
void prepare(Launches& run, const DeltaRuleSm90& op, const DeltaRuleWorkspace& w, cudaStream_t queue) {
  const int64_t blocks = num_slots(op) * op.HV;
  if (op.vector_decay && kScores) {
    run(delta_rule_prepare_kernel<K>, blocks, kPrepareThreads, PrepareLayout<K>::kBytes, queue, op, w);
  } else if (op.vector_decay) {
    run(delta_rule_operands_kernel<K>, blocks, kPrepareThreads, operands_bytes(K), queue, op, w);
  } else {
    run(delta_rule_scalar_prepare_kernel<K, kScores>, blocks, kPrepareThreads, ScalarPrepareLayout<K>::kBytes, queue,
        op, w);
  }
}

int64_t num_scans(const DeltaRuleSm90& op) {
  return op.num_documents * op.HV * (op.V / kValueTile);
}

template <int K>
cudaError_t forward(const DeltaRuleSm90& op, const DeltaRuleWorkspace& w, cudaStream_t queue) {
  Launches run;
  prepare<K, true>(run, op, w, queue);
  run(delta_rule_fwd_scan_kernel<K>, num_scans(op), kScanThreads, ScanLayout<K>::kBytes, queue, op, w);
  return run.error();
}

template <int K>
cudaError_t backward(const DeltaRuleSm90& op, const DeltaRuleWorkspace& w, cudaStream_t queue) {
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  Launches run;
  prepare<K, false>(run, op, w, queue);
  if (op.m == nullptr || op.aqk == nullptr) prepare<K, true>(run, op, w, queue);
  if (op.dq.data == nullptr) {
    run(delta_rule_bwd_scan_kernel<K>, num_scans(op), kScanThreads, ScanLayout<K>::kBytes, queue, op, w);
    return run.error();
  }
  if (op.x == nullptr || op.states == nullptr) {
    DeltaRuleSm90 again = op;
    again.o.data = nullptr;
    again.final_state = nullptr;
    run(delta_rule_fwd_scan_kernel<K>, num_scans(op), kScanThreads, ScanLayout<K>::kBytes, queue, again, w);
  }
  run(delta_rule_bwd_scan_kernel<K>, num_scans(op), kScanThreads, ScanLayout<K>::kBytes, queue, op, w);
  const int64_t items = num_slots(op) * op.HV;
  const int64_t blocks = items < processors ? items : processors;
  if (op.vector_decay) {
    run(delta_rule_bwd_local_kernel<K>, blocks, kLocalThreads, LocalLayout<K>::kBytes, queue, op, w);
  } else {
    run(delta_rule_scalar_bwd_local_kernel<K>, blocks, kLocalThreads, ScalarLocalLayout<K>::kBytes, queue, op, w);
  }
  const int W = op.vector_decay ? K : 1;
  if (op.ddt_bias != nullptr)
    run(delta_rule_bwd_gate_sums_kernel, op.HV * ((W + kSumColumns) / kSumColumns), kSumThreads, kSumBytes, queue, op,
        w, W);
  if (op.HV > op.H)
    run(delta_rule_bwd_group_sums_kernel, (op.N * op.H * (K / 8) + kSumThreads - 1) / kSumThreads, kSumThreads, 0,
        queue, op, w);
  return run.error();
}

bool moves_whole(const void* data, int64_t stride) {
  return data == nullptr || (reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0);
}

}  // namespace

bool delta_rule_sm90_serves(const DeltaRuleSm90& op) {
  if ((op.K != 64 && op.K != 128) || op.V % kValueTile != 0 || op.H == 0 || op.HV % op.H != 0) return false;
  bool aligned = !op.vector_decay || (op.dt_bias != nullptr && reinterpret_cast<uintptr_t>(op.dt_bias) % 16 == 0);
  for (const auto& rows : {op.q, op.k, op.v, op.d_o, op.vector_decay ? op.gate_logit : op.q})
    aligned = aligned && moves_whole(rows.data, rows.stride);
  for (const auto& rows : {op.o, op.dq, op.dk, op.dv, op.vector_decay ? op.dgate_logit : op.dq})
    aligned = aligned && moves_whole(rows.data, rows.stride);
  for (const void* data : {op.m, op.aqk, op.x, op.states}) aligned = aligned && moves_whole(data, 0);
  return aligned;
}

int64_t delta_rule_sm90_forward_workspace(const DeltaRuleSm90& op) {
  DeltaRuleWorkspace w;
  return carve_workspace(op, false, nullptr, w);
}
int64_t delta_rule_sm90_backward_workspace(const DeltaRuleSm90& op) {
  DeltaRuleWorkspace w;
  return carve_workspace(op, true, nullptr, w);
}

cudaError_t delta_rule_sm90_forward(const DeltaRuleSm90& op, void* workspace, cudaStream_t queue) {
  DeltaRuleWorkspace w;
  carve_workspace(op, false, workspace, w);
  return op.K == 64 ? forward<64>(op, w, queue) : forward<128>(op, w, queue);
}
cudaError_t delta_rule_sm90_backward(const DeltaRuleSm90& op, void* workspace, cudaStream_t queue) {
  DeltaRuleWorkspace w;
  carve_workspace(op, true, workspace, w);
  return op.K == 64 ? backward<64>(op, w, queue) : backward<128>(op, w, queue);
}

}  // namespace palimpsest::cuda
