// The delta rule on GPUs. Hopper's own kernels (delta_rule_sm90.h) do what they can; the plain ones (delta_rule.cuh)
// the rest: here is their workspace and their order. Both forms run chunkwise.
#include "kernels/cuda/delta_rule.cuh"

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/cuda/delta_rule_sm90.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

namespace {

float* optional_floats(const Tensor& tensor) {
  return tensor.defined() ? tensor.data<float>() : nullptr;
}

ChunkList make_chunks(const Stream& stream, const Documents& documents, int64_t chunk_size) {
  std::vector<int64_t> first_chunk = {0};
  for (int64_t document = 0; document < documents.count(); ++document)
    first_chunk.push_back(first_chunk.back() + ceil_div(documents.length(document), chunk_size));
  return {.documents = upload(stream, documents),
          .first_chunk = upload_numbers(stream, first_chunk),
          .num_chunks = first_chunk.back(),
          .C = static_cast<int>(chunk_size),
          .rows = std::max(static_cast<int>(chunk_size), kUnitColumns)};
}

template <class T>
DecayGate<T> make_gate(const DeltaRuleInputs& in, const DeltaRuleOptions& options) {
  using Kind = typename DecayGate<T>::Kind;
  DecayGate<T> gate;
  if (options.decay == Decay::kNone) return gate;
  gate.vector = options.decay == Decay::kVector;
  gate.W = gate.vector ? in.q.dim(2) : 1;
  gate.kind = options.gate == Gate::kFixed      ? Kind::kFixed
              : options.gate == Gate::kSoftplus ? Kind::kSoftplus
                                                : Kind::kBounded;
  gate.lower_bound = static_cast<float>(options.gate_lower_bound);
  gate.first_value_head = options.first_value_head;
  gate.logit = Rows<T>(in.gate_logit);
  gate.A_log = optional_floats(in.A_log);
  gate.dt_bias = optional_floats(in.dt_bias);
  return gate;
}

// The problem with its workspace from the stream's scratch memory, and what is saved where `saved` has it, else there.
template <class T>
DeltaProblem<T> make_problem(Stream& stream, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
                             const DeltaRuleOptions& options, const Documents& documents) {
  Arena& scratch = stream.scratch();
  const DType dtype = DTypeOf<T>::value;
  const DeltaRuleShape shape = delta_rule_shape(in, documents);
  DeltaProblem<T> p = {};
  p.N = shape.N;
  p.H = shape.H;
  p.HV = shape.HV;
  p.K = shape.K;
  p.V = shape.V;
  p.Kp = ceil_div(shape.K, kUnitColumns) * kUnitColumns;
  p.delta = options.delta_rule == DeltaRule::kOn;
  p.l2norm = options.l2norm_qk;
  p.l2norm_eps = static_cast<float>(options.l2norm_eps);
  p.scale = static_cast<float>(options.scale);
  p.beta_scale = static_cast<float>(options.beta_scale);
  p.chunks = make_chunks(stream, documents, options.chunk_size);
  p.gate = make_gate<T>(in, options);
  p.q = Rows<T>(in.q);
  p.k = Rows<T>(in.k);
  p.v = Rows<T>(in.v);
  p.beta_logit = Rows<T>(in.beta_logit);
  p.q_packed = packed_rows(p.q, p.K);
  p.k_packed = packed_rows(p.k, p.K);
  p.gate_packed = packed_rows(p.gate.logit, p.K);
  p.initial_state = optional_floats(in.initial_state);
  const int64_t N = p.N, HV = p.HV, C = options.chunk_size;
  for (T** operand : {&p.Qb, &p.Kb, &p.Kt}) *operand = scratch.allocate(dtype, Shape{N, HV, p.Kp}).data<T>();
  p.chunk_decay = scratch.allocate(DType::kF32, Shape{N / C + documents.count() + 1, HV, p.Kp}).data<float>();
  for (float** factor : {&p.q_factor, &p.k_factor})
    *factor = scratch.allocate(DType::kF32, Shape{N, p.H}).data<float>();
  p.betas = scratch.allocate(DType::kF32, Shape{N, HV}).data<float>();
  p.m = Rows<T>(saved.m);
  if (p.delta && !saved.m.defined()) p.m = Rows<T>(scratch.allocate(dtype, Shape{N, HV, C}));
  p.aqk = Rows<T>(saved.aqk.defined() ? saved.aqk : scratch.allocate(dtype, Shape{N, HV, C}));
  p.x = Rows<T>(saved.x);
  p.states = optional_floats(saved.states);
  return p;
}

template <class T>
void forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
             const DeltaRuleOptions& options, const Documents& documents) {
  const Arena::Scope scope(stream.scratch());
  const DeltaProblem<T> p = make_problem<T>(stream, saved, in, options, documents);
  launch_prepare(stream, p, Keep::kYes);
  launch_scan(stream, p,
              {.o = Rows<T>(out.o), .x = p.x, .states = p.states, .final_state = optional_floats(out.final_state)});
}

// With the gradient of the initial state alone, what flows to the tokens is not wanted.
bool wants_all(const DeltaRuleGrads& grads) {
  return grads.dq.defined() || !grads.d_initial_state.defined();
}

template <class T>
void backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o, const Tensor& d_final_state,
              const DeltaRuleSaved& saved, const DeltaRuleInputs& in, const DeltaRuleOptions& options,
              const Documents& documents) {
  Arena& scratch = stream.scratch();
  const Arena::Scope scope(scratch);
  DeltaProblem<T> p = make_problem<T>(stream, saved, in, options, documents);
  const int64_t N = p.N, HV = p.HV, slots = std::max<int64_t>(N - 1, 0) / options.chunk_size;
  const auto floats = [&](Shape shape) { return scratch.allocate(DType::kF32, shape).template data<float>(); };
  // 1. what forward did not keep
  launch_prepare(stream, p, saved.aqk.defined() ? Keep::kNo : Keep::kYes);
  if (!saved.x.defined()) {
    p.x = Rows<T>(scratch.allocate(DTypeOf<T>::value, Shape{N, HV, p.V}));
    p.states = floats(Shape{slots, HV, p.K, p.V});
    launch_scan(stream, p, {.o = {}, .x = p.x, .states = p.states, .final_state = nullptr});
  }
  // 2. through the chunks in reverse
  float* d_states = floats(Shape{slots, HV, p.K, p.V});
  float* dbeta_shares = p.delta ? floats(Shape{ceil_div(p.V, kUnitColumns), N, HV}) : nullptr;
  launch_reverse_scan(stream, p,
                      {.dv = Rows<T>(grads.dv),
                       .d_states = d_states,
                       .d_initial = optional_floats(grads.d_initial_state),
                       .dbeta_shares = dbeta_shares,
                       .d_o = Rows<T>(d_o),
                       .d_final_state = optional_floats(d_final_state)});
  if (!wants_all(grads)) return;
  // 3. inside them
  float *dq = floats(Shape{N, HV, p.Kp}), *dk = floats(Shape{N, HV, p.Kp}), *dg = nullptr;
  if (p.gate.has_gradient())
    dg = p.gate.vector ? floats(Shape{N, HV, p.Kp}) : floats(Shape{ceil_div(p.Kp, kSlice), N, HV});
  launch_local(stream, p,
               {.dq = dq,
                .dk = dk,
                .dg = dg,
                .d_o = Rows<T>(d_o),
                .dv = Rows<T>(grads.dv),
                .d_states = d_states,
                .d_final_state = optional_floats(d_final_state)});
  // 4. to the raw inputs
  launch_finish(stream, p,
                {.dq = Rows<T>(grads.dq),
                 .dk = Rows<T>(grads.dk),
                 .dbeta_logit = Rows<T>(grads.dbeta_logit),
                 .dgate_logit = Rows<T>(grads.dgate_logit),
                 .dA_log = optional_floats(grads.dA_log),
                 .ddt_bias = optional_floats(grads.ddt_bias),
                 .dq_normalised = dq,
                 .dk_normalised = dk,
                 .dg = dg,
                 .dbeta_shares = dbeta_shares});
}

// ---- bf16 operands of few channels ----

// Such products would leave tensor cores half empty; in f32 nothing but the operands themselves is rounded.
constexpr int64_t kMostChannelsInF32 = 32;

bool runs_in_f32(const DeltaRuleInputs& in) {
  return in.q.dtype() == DType::kBF16 && in.q.dim(2) <= kMostChannelsInF32;
}

// f32 beside a bf16 tensor, in scratch memory; absent where that is.
Tensor allocate_wide(const Stream& stream, const Tensor& x) {
  return x.defined() ? stream.scratch().allocate(DType::kF32, x.shape()) : Tensor();
}

Tensor widened(const Stream& stream, const Tensor& x) {
  const Tensor wide = allocate_wide(stream, x);
  if (x.defined()) widen_to_f32(stream, wide, x);
  return wide;
}

DeltaRuleInputs widened(const Stream& stream, const DeltaRuleInputs& in) {
  DeltaRuleInputs wide = in;
  for (Tensor* x : {&wide.q, &wide.k, &wide.v, &wide.beta_logit, &wide.gate_logit}) *x = widened(stream, *x);
  return wide;
}

// Nothing is kept for backward, which computes it again.
DeltaRuleOptions without_saving(DeltaRuleOptions options) {
  options.save_level = SaveLevel::kNothing;
  return options;
}

void forward_in_f32(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleInputs& in,
                    const DeltaRuleOptions& options, const Documents& documents) {
  const Arena::Scope scope(stream.scratch());
  DeltaRuleOutputs wide = out;
  wide.o = allocate_wide(stream, out.o);
  forward<float>(stream, wide, {}, widened(stream, in), without_saving(options), documents);
  if (out.o.defined()) round_to_bf16(stream, out.o, wide.o);
}

void backward_in_f32(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o, const Tensor& d_final_state,
                     const DeltaRuleInputs& in, const DeltaRuleOptions& options, const Documents& documents) {
  const Arena::Scope scope(stream.scratch());
  DeltaRuleGrads wide = grads;
  for (Tensor* gradient : {&wide.dq, &wide.dk, &wide.dv, &wide.dbeta_logit, &wide.dgate_logit})
    *gradient = allocate_wide(stream, *gradient);
  backward<float>(stream, wide, widened(stream, d_o), d_final_state, {}, widened(stream, in), without_saving(options),
                  documents);
  for (const auto& [narrow, result] :
       {std::pair{grads.dq, wide.dq}, std::pair{grads.dk, wide.dk}, std::pair{grads.dv, wide.dv},
        std::pair{grads.dbeta_logit, wide.dbeta_logit}, std::pair{grads.dgate_logit, wide.dgate_logit}})
    if (narrow.defined()) round_to_bf16(stream, narrow, result);
}

// ---- Hopper's kernels, see delta_rule_sm90.h ----

bool is_hopper() {
  int device = 0, major = 0, minor = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

template <class T>
DeltaRows<T> delta_rows(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.data<bf16>(), tensor.row_stride()};
}
bf16* kept(const Tensor& tensor) {
  return tensor.defined() ? static_cast<bf16*>(tensor.raw()) : nullptr;  // in a layout of those kernels
}

// The call as those kernels take it, without what belongs to one direction; nothing where they cannot do it. The answer
// is the same in forward and backward, which must agree on what is saved.
std::optional<DeltaRuleSm90> hopper_call(const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
                                         const DeltaRuleOptions& options, const Documents& documents) {
  const bool fits = in.q.dtype() == DType::kBF16 && options.form == DeltaForm::kChunkwise && options.chunk_size == 64 &&
                    options.delta_rule == DeltaRule::kOn;
  if (!fits || !is_hopper()) return std::nullopt;
  const DeltaRuleShape shape = delta_rule_shape(in, documents);
  if (shape.N < options.chunk_size) return std::nullopt;  // nothing to gain, and the plain kernels round less
  const bool has_gate = in.gate_logit.defined();
  DeltaRuleSm90 op;
  op.N = shape.N;
  op.H = shape.H;
  op.HV = shape.HV;
  op.K = shape.K;
  op.V = shape.V;
  op.num_documents = documents.count();
  op.vector_decay = options.decay == Decay::kVector;
  op.gate = !has_gate                         ? DeltaGateKind::kConstant
            : options.gate == Gate::kSoftplus ? DeltaGateKind::kSoftplus
                                              : DeltaGateKind::kBounded;
  op.gate_lower_bound = static_cast<float>(options.gate_lower_bound);
  op.constant_decays = options.decay != Decay::kNone && options.gate == Gate::kFixed;
  op.first_value_head = options.first_value_head;
  op.beta_scale = static_cast<float>(options.beta_scale);
  op.l2norm_eps = static_cast<float>(options.l2norm_eps);
  op.scale = static_cast<float>(options.scale);
  op.l2norm_qk = options.l2norm_qk;
  op.q = delta_rows<const bf16>(in.q);
  op.k = delta_rows<const bf16>(in.k);
  op.v = delta_rows<const bf16>(in.v);
  op.beta_logit = delta_rows<const bf16>(in.beta_logit);
  op.gate_logit = delta_rows<const bf16>(in.gate_logit);
  op.A_log = optional_floats(in.A_log);
  op.dt_bias = optional_floats(in.dt_bias);
  op.initial_state = optional_floats(in.initial_state);
  op.m = kept(saved.m);
  op.aqk = kept(saved.aqk);
  op.x = kept(saved.x);
  op.states = kept(saved.states);
  if (!delta_rule_sm90_serves(op)) return std::nullopt;
  return op;
}

void place_documents(const Stream& stream, DeltaRuleSm90& op, const Documents& documents) {
  const DocumentList list = upload(stream, documents);
  op.offsets = list.offsets;
  op.entering = list.entering_rows;
  op.leaving = list.leaving_rows;
}

// Runs `body` with so many bytes of workspace.
template <class Body>
void with_workspace(Stream& stream, int64_t bytes, Body body) {
  constexpr uintptr_t kAlignment = 1024;
  const Tensor room = stream.scratch().allocate(DType::kU8, {bytes + static_cast<int64_t>(kAlignment)});
  if (stream.is_planning()) return;
  const auto address = reinterpret_cast<uintptr_t>(room.raw());
  CUDA_CHECK(body(reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment)));
}

// False where those kernels cannot do it.
bool hopper_forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved, const DeltaRuleInputs& in,
                    const DeltaRuleOptions& options, const Documents& documents) {
  std::optional<DeltaRuleSm90> op = hopper_call(saved, in, options, documents);
  if (!op) return false;
  const Arena::Scope scope(stream.scratch());
  place_documents(stream, *op, documents);
  op->o = delta_rows<bf16>(out.o);
  op->final_state = optional_floats(out.final_state);
  CHECK(delta_rule_sm90_serves(*op), "o is ", out.o.str(), ", with rows ", out.o.row_stride(), " apart");
  note_path(stream, "sm_90a");
  with_workspace(stream, delta_rule_sm90_forward_workspace(*op),
                 [&](void* workspace) { return delta_rule_sm90_forward(*op, workspace, queue_of(stream)); });
  return true;
}

bool hopper_backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o, const Tensor& d_final_state,
                     const DeltaRuleSaved& saved, const DeltaRuleInputs& in, const DeltaRuleOptions& options,
                     const Documents& documents) {
  std::optional<DeltaRuleSm90> op = hopper_call(saved, in, options, documents);
  if (!op) return false;
  const Arena::Scope scope(stream.scratch());
  place_documents(stream, *op, documents);
  op->d_o = delta_rows<const bf16>(d_o);
  op->d_final_state = optional_floats(d_final_state);
  op->dq = delta_rows<bf16>(grads.dq);
  op->dk = delta_rows<bf16>(grads.dk);
  op->dv = delta_rows<bf16>(grads.dv);
  op->dbeta_logit = delta_rows<bf16>(grads.dbeta_logit);
  op->dgate_logit = delta_rows<bf16>(grads.dgate_logit);
  op->dA_log = optional_floats(grads.dA_log);
  op->ddt_bias = optional_floats(grads.ddt_bias);
  op->d_initial_state = optional_floats(grads.d_initial_state);
  if (!delta_rule_sm90_serves(*op)) {
    // What forward kept is not for the plain kernels, which compute it again.
    DeltaRuleOptions again = options;
    again.save_level = SaveLevel::kNothing;
    note_path(stream, "plain");
    backward<bf16>(stream, grads, d_o, d_final_state, {}, in, again, documents);
    return true;
  }
  note_path(stream, "sm_90a");
  with_workspace(stream, delta_rule_sm90_backward_workspace(*op),
                 [&](void* workspace) { return delta_rule_sm90_backward(*op, workspace, queue_of(stream)); });
  return true;
}

}  // namespace

void delta_rule_forward(Stream& stream, const DeltaRuleOutputs& out, const DeltaRuleSaved& saved,
                        const DeltaRuleInputs& in, const DeltaRuleOptions& options, const Documents& documents) {
  if (hopper_forward(stream, out, saved, in, options, documents)) return;
  note_path(stream, "plain");
  if (runs_in_f32(in)) return forward_in_f32(stream, out, in, options, documents);
  with_float(in.q.dtype(), [&](auto zero) { forward<decltype(zero)>(stream, out, saved, in, options, documents); });
}

void delta_rule_backward(Stream& stream, const DeltaRuleGrads& grads, const Tensor& d_o, const Tensor& d_final_state,
                         const DeltaRuleSaved& saved, const DeltaRuleInputs& in, const DeltaRuleOptions& options,
                         const Documents& documents) {
  if (hopper_backward(stream, grads, d_o, d_final_state, saved, in, options, documents)) return;
  note_path(stream, "plain");
  if (runs_in_f32(in)) return backward_in_f32(stream, grads, d_o, d_final_state, in, options, documents);
  with_float(in.q.dtype(), [&](auto zero) {
    backward<decltype(zero)>(stream, grads, d_o, d_final_state, saved, in, options, documents);
  });
}

}  // namespace palimpsest::cuda
