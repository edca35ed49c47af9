// The delta rule with decay on Hopper's tensor cores: chunkwise, bf16 operands, f32 accumulation and states. Serves
// key sizes 64 and 128, value sizes in multiples of 64, the delta rule on; kernels/delta_rule.h is the contract.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace palimpsest::cuda {

enum class DeltaGateKind : int { kSoftplus, kBounded, kConstant };

// One head of a token: data[token * stride + head * size]. Strides are multiples of 8 elements and data lies on a
// 16-byte boundary where rows are moved whole (everything but the logits of beta and of a scalar gate).
template <class T>
struct DeltaRows {
  T* data = nullptr;
  int64_t stride = 0;
};

// All pointers lie on the GPU. Those of outputs that are not wanted, of absent states and of levels that are not
// saved are null.
struct DeltaRuleSm90 {
  int64_t N = 0, H = 0, HV = 0, K = 0, V = 0, num_documents = 0;
  const int64_t* offsets = nullptr;  // [num_documents + 1]
  // [num_documents] rows of the states below that a document begins with and leaves, -1: zero, not wanted. Null: its
  // own number.
  const int64_t *entering = nullptr, *leaving = nullptr;
  bool vector_decay = true;  // else one decay a head
  DeltaGateKind gate = DeltaGateKind::kSoftplus;
  float gate_lower_bound = -5.0F;  // kBounded
  // kConstant: head h (counted from first_value_head) decays by log(1 - 2^(-5-h)), or not at all
  bool constant_decays = false;
  int64_t first_value_head = 0;
  float beta_scale = 1.0F, l2norm_eps = 1e-6F, scale = 1.0F;
  bool l2norm_qk = true;
  int segment = -1;  // chunks that a block of the scans goes through; 0: whole documents, -1: what suits the sizes

  DeltaRows<const __nv_bfloat16> q, k;        // [N, H, K]
  DeltaRows<const __nv_bfloat16> v;           // [N, HV, V]
  DeltaRows<const __nv_bfloat16> beta_logit;  // [N, HV]
  DeltaRows<const __nv_bfloat16> gate_logit;  // [N, HV, K] or [N, HV]
  const float* A_log = nullptr;               // [HV]
  const float* dt_bias = nullptr;             // [HV, K] or [HV]
  const float* initial_state = nullptr;       // [states, HV, K, V]

  DeltaRows<__nv_bfloat16> o;    // [N, HV, V]
  float* final_state = nullptr;  // [states, HV, K, V]

  // Kept from forward to backward, in layouts of these kernels: tiles as they lie in shared memory.
  __nv_bfloat16* m = nullptr;       // N HV 64 numbers: M - I of every chunk
  __nv_bfloat16* aqk = nullptr;     // N HV 64: scale q k^T with decay
  __nv_bfloat16* x = nullptr;       // [N, HV, V]
  __nv_bfloat16* states = nullptr;  // max(N - 1, 0) / 64 times HV K V: S^T at each chunk's start but documents' firsts

  DeltaRows<const __nv_bfloat16> d_o;            // [N, HV, V]
  const float* d_final_state = nullptr;          // [states, HV, K, V]
  DeltaRows<__nv_bfloat16> dq, dk;               // [N, H, K]; null, with all others: d_initial_state alone
  DeltaRows<__nv_bfloat16> dv;                   // [N, HV, V]
  DeltaRows<__nv_bfloat16> dbeta_logit;          // [N, HV]
  DeltaRows<__nv_bfloat16> dgate_logit;          // as gate_logit
  float *dA_log = nullptr, *ddt_bias = nullptr;  // accumulated
  float* d_initial_state = nullptr;              // [states, HV, K, V]
};

// Whether these kernels can do it: sizes, strides and alignment. They need compute capability 9.0 besides.
bool delta_rule_sm90_serves(const DeltaRuleSm90& op);

// Bytes of workspace, which lies on a 1024-byte boundary.
int64_t delta_rule_sm90_forward_workspace(const DeltaRuleSm90& op);
int64_t delta_rule_sm90_backward_workspace(const DeltaRuleSm90& op);

cudaError_t delta_rule_sm90_forward(const DeltaRuleSm90& op, void* workspace, cudaStream_t queue);
cudaError_t delta_rule_sm90_backward(const DeltaRuleSm90& op, void* workspace, cudaStream_t queue);

}  // namespace palimpsest::cuda
