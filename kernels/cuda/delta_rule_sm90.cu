// Launches of the Hopper delta rule, in the order of kernels/cuda/delta_rule_sm90_order.cuh.
#include "kernels/cuda/delta_rule_sm90.h"

#include "kernels/cuda/delta_rule_sm90_order.cuh"

namespace palimpsest::cuda {

namespace {

using namespace sm90;

constexpr int kAlignment = 1024;  // of dynamic shared memory

// Launches one after the other until one fails.
class Launches {
 public:
  explicit Launches(cudaStream_t queue) : queue_(queue) {}

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
                  const Arguments&... arguments) {
    if (error_ != cudaSuccess || blocks == 0) return;
    const int bytes = shared_bytes + kAlignment;
    error_ = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error_ != cudaSuccess) return;
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<size_t>(bytes), queue_>>>(
        arguments...);
    error_ = cudaGetLastError();
  }
  void clear(void* address, int64_t bytes) {
    if (error_ == cudaSuccess) error_ = cudaMemsetAsync(address, 0, static_cast<size_t>(bytes), queue_);
  }
  cudaError_t error() const { return error_; }

 private:
  cudaStream_t queue_;
  cudaError_t error_ = cudaSuccess;
};

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
  Launches run(queue);
  if (op.K == 64) {
    order_forward<64>(run, op, w);
  } else {
    order_forward<128>(run, op, w);
  }
  return run.error();
}
cudaError_t delta_rule_sm90_backward(const DeltaRuleSm90& op, void* workspace, cudaStream_t queue) {
  DeltaRuleWorkspace w;
  carve_workspace(op, true, workspace, w);
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  Launches run(queue);
  if (op.K == 64) {
    order_backward<64>(run, op, w, processors);
  } else {
    order_backward<128>(run, op, w, processors);
  }
  return run.error();
}

}  // namespace palimpsest::cuda
