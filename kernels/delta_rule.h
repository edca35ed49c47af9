// The delta-rule family: Kimi Delta Attention (arXiv 2510.26692), Gated DeltaNet (2412.06464), DeltaNet (2406.06484),
// and, without the delta term, gated linear attention, RetNet, Mamba-2 and plain linear attention. Per value head:
//
//   S'_t = Diag(exp g_t) S_{t-1}                              decay first
//   S_t  = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T             then error and write      (delta rule on)
//   S_t  = S'_t + k_t v_t^T                                                             (delta rule off)
//   o_t  = scale * S_t^T q_t                                  then read
//
// S is [K, V], zero at a document's start unless an initial state is given. Value head j reads key head j / (HV / H).
// The op takes raw inputs and applies the l2 norm, the gate and the sigmoid itself.
#pragma once

#include "kernels/documents.h"
#include "kernels/stream.h"

namespace palimpsest {

enum class Decay : uint8_t { kNone, kScalar, kVector };  // g = 0, one g a head, one g a key channel
enum class DeltaRule : uint8_t { kOff, kOn };
enum class Gate : uint8_t {
  kSoftplus,  // g = -exp(A_log) * softplus(gate_logit + dt_bias)
  kBounded,   // g = gate_lower_bound * sigmoid(exp(A_log) * (gate_logit + dt_bias))
  kFixed,  // RetNet: g = log(1 - 2^(-5 - h)) of head h, scalar decay, nothing to learn: no gate_logit, A_log, dt_bias
};

// Two ways to compute the same values. The recurrence goes token by token and is the plain reference; chunkwise works
// on chunks of chunk_size tokens with matrix products and is what training uses.
enum class DeltaForm : uint8_t { kRecurrence, kChunkwise };

// What forward keeps for backward, in DeltaRuleSaved: 0 nothing (backward recomputes), 1 the chunk matrices M and Aqk,
// 2 also X and the state at each chunk's start. The recurrence keeps nothing whatever the level.
enum class SaveLevel : uint8_t { kNothing = 0, kMatrices = 1, kAll = 2 };

constexpr int64_t kMaxKeySize = 256;  // K of the delta-rule ops; V is free

struct DeltaRuleOptions {
  Decay decay = Decay::kVector;
  DeltaRule delta_rule = DeltaRule::kOn;
  Gate gate = Gate::kSoftplus;
  double gate_lower_bound = -5.0;  // kBounded only, < 0
  int64_t first_value_head = 0;    // kFixed only: h of value head 0, where the heads are a part of the model's
  double beta_scale = 1.0;         // beta = beta_scale * sigmoid(beta_logit); 2 allows negative eigenvalues
  bool l2norm_qk = true;           // q, k <- x / sqrt(sum x^2 + l2norm_eps)
  double l2norm_eps = 1e-6;
  double scale = 1.0;  // of the read; K^-1/2 in every published model
  DeltaForm form = DeltaForm::kChunkwise;
  int64_t chunk_size = 64;  // 16, 32 or 64
  SaveLevel save_level = SaveLevel::kAll;
};

// Rows of every [N, ...] tensor may be spaced. f32 (f64) throughout on the CPU; the gate's parameters and the states
// are f32 (f64) on every device.
struct DeltaRuleInputs {
  Tensor q, k;           // [N, H, K]
  Tensor v;              // [N, HV, V]
  Tensor beta_logit;     // [N, HV]; absent without the delta rule
  Tensor gate_logit;     // [N, HV, K] (vector), [N, HV] (scalar), absent (none)
  Tensor A_log;          // [HV]; absent without decay
  Tensor dt_bias;        // [HV, K] (vector) or [HV] (scalar); absent without decay
  Tensor initial_state;  // [states, HV, K, V] or absent: zero. Rows as Documents::entering() says
};

struct DeltaRuleOutputs {
  Tensor o;            // [N, HV, V], overwritten; absent: documents without a final state are skipped
  Tensor final_state;  // [states, HV, K, V] or absent; rows Documents::leaving() overwritten. An empty document's is
                       // its initial state.
};

// Kept from forward to backward. Which are present depends on the form, the level and the backend.
struct DeltaRuleSaved {
  Tensor m;       // [N, HV, C]: row i of its chunk's (I + L)^-1 - I, strictly lower; absent without the delta rule
  Tensor aqk;     // [N, HV, C]: row i of its chunk's masked q k^T products
  Tensor x;       // [N, HV, V]: beta * error, the vector that a token writes
  Tensor states;  // [slots, HV, K, V]: state at the start of each chunk but the first of every document
};

// With d_initial_state alone the others are not computed, and documents without a row in it are skipped.
struct DeltaRuleGrads {
  Tensor dq, dk, dv;       // as q, k, v; overwritten
  Tensor dbeta_logit;      // overwritten; absent without the delta rule
  Tensor dgate_logit;      // overwritten; absent without decay
  Tensor dA_log;           // accumulated; absent without decay
  Tensor ddt_bias;         // accumulated; absent without decay
  Tensor d_initial_state;  // as initial_state: rows Documents::entering() overwritten; or absent
};

struct DeltaRuleShape {
  int64_t N = 0, H = 0, HV = 0, K = 0, V = 0, num_states = 0;
};
DeltaRuleShape delta_rule_shape(const DeltaRuleInputs& in, const Documents& documents);

// Room for what forward keeps, from `arena`. Its size depends on shape.N, never on how the tokens split into documents
// (a document of L tokens needs (L-1)/C states, since its first chunk starts from the initial state).
DeltaRuleSaved allocate_delta_rule_saved(Arena& arena, DType dtype, const DeltaRuleShape& shape,
                                         const DeltaRuleOptions& options);

// Throws a UserError that names the supported sizes when the op cannot serve them on this device.
void check_delta_rule_supported(Device device, const DeltaRuleShape& shape, const DeltaRuleOptions& options);

PALIMPSEST_OP(delta_rule_forward, Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved,
              const DeltaRuleInputs& in, const DeltaRuleOptions& options, const Documents& documents);
// d_o [N, HV, V]; d_final_state as final_state, or absent. Same options and documents as forward.
PALIMPSEST_OP(delta_rule_backward, Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o,
              const Tensor& d_final_state, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
              const DeltaRuleOptions& options, const Documents& documents);

// Matrix-product and state FLOPs of one token and value head, forward, as counted for MFU: 6 K V.
inline double delta_rule_flops(int64_t K, int64_t V) {
  return 6.0 * static_cast<double>(K) * static_cast<double>(V);
}

}  // namespace palimpsest
