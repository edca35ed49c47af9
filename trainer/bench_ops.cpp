#include "trainer/bench_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "kernels/adamw.h"
#include "kernels/cross_entropy.h"
#include "kernels/delta_rule.h"
#include "kernels/device.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/linear.h"
#include "kernels/random.h"
#include "kernels/rms_norm.h"
#include "kernels/short_conv.h"
#include "kernels/swiglu.h"
#include "model/head.h"
#include "trainer/bench_attention.h"
#include "trainer/bench_experts.h"
#include "trainer/bench_sequence.h"

namespace palimpsest {

namespace {

// Numbers of a tensor that are drawn; then they come again, at no multiple of a row, since drawing takes longer than an
// op does.
constexpr int64_t kDrawn = 1'000'003;

}  // namespace

template <class T, class Draw>
Tensor BenchPlace::drawn(DType dtype, Shape shape, Draw&& draw) {
  const Tensor tensor = memory_.allocate(dtype, shape);
  const uint64_t stream = hash_of("bench kernels") + num_tensors_++;
  if (stream_.is_planning()) return tensor;
  const Tensor numbers = tensor.view({tensor.numel()}), first = numbers.rows(0, std::min(kDrawn, tensor.numel()));
  HostCopy host(first);
  T* values = host.tensor().data<T>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < first.numel(); ++i) values[i] = draw(stream, static_cast<uint64_t>(i));
  host.store();
  for (int64_t begin = kDrawn; begin < numbers.numel(); begin += kDrawn) {
    const int64_t count = std::min(kDrawn, numbers.numel() - begin);
    transfer(stream_, numbers.rows(begin, count), first.rows(0, count));
  }
  return tensor;
}

namespace {

// One that bf16 holds, so that an op's error is not that of its inputs.
float random_number(uint64_t stream, uint64_t i) {
  return to_float(to_bf16(static_cast<float>(2.0 * random_uniform(1, stream, i) - 1.0)));
}

}  // namespace

Tensor BenchPlace::random(Shape shape) {
  if (dtype_ != DType::kBF16) return wide_random(shape);
  return drawn<BF16>(dtype_, shape, [](uint64_t stream, uint64_t i) { return to_bf16(random_number(stream, i)); });
}

Tensor BenchPlace::wide_random(Shape shape) {
  return dtype_ == DType::kF64 ? drawn<double>(dtype_, shape, random_number)
                               : drawn<float>(DType::kF32, shape, random_number);
}

Tensor BenchPlace::wide_zeros(Shape shape) {
  return zeros(dtype_ == DType::kF64 ? DType::kF64 : DType::kF32, shape);
}

Tensor BenchPlace::zeros(Shape shape) {
  return zeros(dtype_, shape);
}

Tensor BenchPlace::zeros(DType dtype, Shape shape) {
  const Tensor tensor = memory_.allocate(dtype, shape);
  fill_zero(stream_, tensor);
  return tensor;
}

Tensor BenchPlace::ids(int64_t count, int64_t num_ids) {
  return drawn<int32_t>(DType::kI32, {count}, [&](uint64_t stream, uint64_t i) {
    return static_cast<int32_t>(random_bits(1, stream, i) % static_cast<uint64_t>(num_ids));
  });
}

namespace {

using Ops = std::vector<BenchOp>;

void add_linear(Ops& ops, const BenchSizes& s, const char* what, int64_t in, int64_t out) {
  const int64_t N = s.N;
  const double flops = 2.0 * static_cast<double>(N) * static_cast<double>(in) * static_cast<double>(out);
  const std::string sizes = fmt::format("[{}, {}] -> {}, {}", N, in, out, what);
  ops.push_back({"linear_forward", "", [=](BenchPlace& place) {
                   const Tensor x = place.random({N, in}), w = place.wide_random({out, in}), y = place.zeros({N, out});
                   return PreparedOp{sizes, flops, {x, w}, {y}, [=, &place] {
                                       linear_forward(place.stream(), y, x, w, Write::kOverwrite);
                                     }};
                 }});
  ops.push_back(
      {"linear_backward_input", "", [=](BenchPlace& place) {
         const Tensor dy = place.random({N, out}), w = place.wide_random({out, in}), dx = place.zeros({N, in});
         return PreparedOp{sizes, flops, {dy, w}, {dx}, [=, &place] {
                             linear_backward_input(place.stream(), dx, dy, w, Write::kOverwrite);
                           }};
       }});
  ops.push_back(
      {"linear_backward_weight", "", [=](BenchPlace& place) {
         const Tensor dy = place.random({N, out}), x = place.random({N, in}), dw = place.wide_zeros({out, in});
         return PreparedOp{
             sizes, flops, {dy, x, dw}, {dw}, [=, &place] { linear_backward_weight(place.stream(), dw, dy, x); }};
       }});
}

// A mixer of the delta-rule family.
struct DeltaRuleKind {
  std::string name;
  int64_t num_heads, num_value_heads, key_size, value_size;
  DeltaRuleOptions options;
};

DeltaRuleKind kda_kind(const KdaConfig& kda) {
  DeltaRuleKind kind = {"kda",        kda.num_heads, kda.num_value_heads.value_or(kda.num_heads),
                        kda.head_dim, kda.head_dim,  {}};
  if (kda.gate_lower_bound) {
    kind.options.gate = Gate::kBounded;
    kind.options.gate_lower_bound = *kda.gate_lower_bound;
  }
  return kind;
}

DeltaRuleKind gdn_kind(const GdnConfig& gdn) {
  return {"gdn",
          gdn.num_heads,
          gdn.num_value_heads.value_or(gdn.num_heads),
          gdn.head_dim,
          gdn.value_head_dim.value_or(gdn.head_dim),
          {.decay = Decay::kScalar}};
}

// Tensors of the delta rule, the op's options and the sizes, shared by forward and backward.
struct DeltaRuleBench {
  DeltaRuleBench(BenchPlace& place, const BenchSizes& s, const DeltaRuleKind& kind, DeltaForm form)
      : documents(s.documents()), options(kind.options) {
    const int64_t N = s.N, H = kind.num_heads, HV = kind.num_value_heads, K = kind.key_size, V = kind.value_size;
    options.scale = 1.0 / std::sqrt(static_cast<double>(K));
    options.form = form;
    const bool vector = options.decay == Decay::kVector;
    in = {.q = place.random({N, H, K}),
          .k = place.random({N, H, K}),
          .v = place.random({N, HV, V}),
          .beta_logit = place.random({N, HV}),
          .gate_logit = place.random(vector ? Shape{N, HV, K} : Shape{N, HV}),
          .A_log = place.wide_zeros({HV}),
          .dt_bias = place.wide_zeros(vector ? Shape{HV, K} : Shape{HV})};
    o = place.zeros({N, HV, V});
    saved = allocate_delta_rule_saved(place.memory(), place.dtype(), delta_rule_shape(in, documents), options);
    flops = static_cast<double>(N * HV) * delta_rule_flops(K, V);
    sizes = fmt::format("{} x {} tokens, {} / {} heads of {} / {}", s.rows, s.T, H, HV, K, V);
  }
  Documents documents;
  DeltaRuleOptions options;
  DeltaRuleInputs in;
  Tensor o;
  DeltaRuleSaved saved;
  double flops;
  std::string sizes;
};

void add_delta_rule(Ops& ops, const BenchSizes& s, const DeltaRuleKind& kind, DeltaForm form) {
  const char* name = form == DeltaForm::kChunkwise ? "chunkwise" : "recurrence";
  ops.push_back({kind.name + "_forward", name, [=](BenchPlace& place) {
                   const DeltaRuleBench b(place, s, kind, form);
                   return PreparedOp{b.sizes, b.flops, {b.in.q, b.in.k, b.in.v, b.in.gate_logit}, {b.o}, [=, &place] {
                                       delta_rule_forward(place.stream(), {.o = b.o}, b.saved, b.in, b.options,
                                                          b.documents);
                                     }};
                 }});
  ops.push_back({kind.name + "_backward", name, [=](BenchPlace& place) {
                   const DeltaRuleBench b(place, s, kind, form);
                   delta_rule_forward(place.stream(), {.o = b.o}, b.saved, b.in, b.options, b.documents);
                   const auto like = [&](const Tensor& x) { return place.zeros(x.dtype(), x.shape()); };
                   const DeltaRuleGrads grads = {.dq = like(b.in.q),
                                                 .dk = like(b.in.k),
                                                 .dv = like(b.in.v),
                                                 .dbeta_logit = like(b.in.beta_logit),
                                                 .dgate_logit = like(b.in.gate_logit),
                                                 .dA_log = like(b.in.A_log),
                                                 .ddt_bias = like(b.in.dt_bias)};
                   const Tensor d_o = place.random(b.o.shape());
                   return PreparedOp{b.sizes,
                                     2 * b.flops,
                                     {b.in.q, b.in.k, b.in.v, b.in.gate_logit, d_o},
                                     {grads.dq, grads.dk, grads.dv, grads.dgate_logit},
                                     [=, &place] {
                                       delta_rule_backward(place.stream(), grads, d_o, {}, b.saved, b.in, b.options,
                                                           b.documents);
                                     }};
                 }});
}

void add_short_conv(Ops& ops, const BenchSizes& s) {
  const KdaConfig& kda = s.model.kda;
  const int64_t N = s.N, C = 3 * kda.num_heads * kda.head_dim, taps = kda.conv_size;
  const std::string sizes = fmt::format("[{}, {}], {} taps", N, C, taps);
  ops.push_back({"short_conv_forward", "", [=](BenchPlace& place) {
                   const Tensor x = place.random({N, C}), w = place.wide_random({C, 1, taps}), y = place.zeros({N, C});
                   return PreparedOp{sizes, 0, {x}, {y}, [=, &place] {
                                       short_conv_forward(place.stream(), y, x, w, {}, s.documents(),
                                                          ConvActivation::kSilu);
                                     }};
                 }});
  ops.push_back(
      {"short_conv_backward", "", [=](BenchPlace& place) {
         const Tensor dy = place.random({N, C}), x = place.random({N, C}), w = place.wide_random({C, 1, taps});
         const Tensor dx = place.zeros({N, C}), dw = place.wide_zeros({C, 1, taps});
         return PreparedOp{sizes, 0, {dy, x}, {dx}, [=, &place] {
                             short_conv_backward(place.stream(), dx, dw, {}, dy, x, w, {}, {}, s.documents(),
                                                 ConvActivation::kSilu);
                           }};
       }});
}

void add_norms(Ops& ops, const BenchSizes& s) {
  const int64_t N = s.N, D = s.D, H = s.model.kda.num_heads, K = s.model.kda.head_dim;
  const std::string sizes = fmt::format("[{}, {}]", N, D), head_sizes = fmt::format("[{}, {}, {}]", N, H, K);
  constexpr double kEps = 1e-5;
  ops.push_back({"rms_norm_forward", "", [=](BenchPlace& place) {
                   const Tensor x = place.random({N, D}), w = place.wide_random({D});
                   const Tensor y = place.zeros({N, D}), rstd = place.wide_zeros({N});
                   return PreparedOp{sizes, 0, {x}, {y}, [=, &place] {
                                       rms_norm_forward(place.stream(), y, rstd, x, w, kEps, NormWeight::kPlain);
                                     }};
                 }});
  ops.push_back({"rms_norm_backward", "", [=](BenchPlace& place) {
                   const Tensor dy = place.random({N, D}), x = place.random({N, D}), w = place.wide_random({D});
                   const Tensor rstd = place.wide_random({N}), dx = place.zeros({N, D}), dw = place.wide_zeros({D});
                   return PreparedOp{sizes, 0, {dy, x}, {dx}, [=, &place] {
                                       rms_norm_backward(place.stream(), dx, dw, dy, x, w, rstd, NormWeight::kPlain);
                                     }};
                 }});
  ops.push_back({"gated_rms_norm_forward", "", [=](BenchPlace& place) {
                   const Tensor o = place.random({N, H, K}), z = place.random({N, H, K}), w = place.wide_random({K});
                   const Tensor y = place.zeros({N, H, K}), rstd = place.wide_zeros({N, H});
                   return PreparedOp{head_sizes, 0, {o, z}, {y}, [=, &place] {
                                       gated_rms_norm_forward(place.stream(), y, rstd, o, z, w, kEps,
                                                              GateActivation::kSigmoid);
                                     }};
                 }});
  ops.push_back({"gated_rms_norm_backward", "", [=](BenchPlace& place) {
                   const Tensor dy = place.random({N, H, K}), o = place.random({N, H, K}), z = place.random({N, H, K});
                   const Tensor w = place.wide_random({K}), rstd = place.wide_random({N, H});
                   const Tensor d_o = place.zeros({N, H, K}), dz = place.zeros({N, H, K}), dw = place.wide_zeros({K});
                   const Tensor y = place.zeros({N, H, K});
                   return PreparedOp{head_sizes, 0, {dy, o, z}, {d_o, dz, y}, [=, &place] {
                                       gated_rms_norm_backward(place.stream(), d_o, dz, dw, dy, o, z, w, rstd,
                                                               GateActivation::kSigmoid, y);
                                     }};
                 }});
}

void add_swiglu(Ops& ops, const BenchSizes& s) {
  const int64_t N = s.N, F = s.model.mlp.intermediate_size;
  const std::string sizes = fmt::format("[{}, 2 x {}]", N, F);
  ops.push_back(
      {"swiglu_forward", "", [=](BenchPlace& place) {
         const Tensor gate_up = place.random({N, 2 * F}), h = place.zeros({N, F});
         return PreparedOp{sizes, 0, {gate_up}, {h}, [=, &place] { swiglu_forward(place.stream(), h, gate_up); }};
       }});
  ops.push_back({"swiglu_backward", "", [=](BenchPlace& place) {
                   const Tensor gate_up = place.random({N, 2 * F}), dh = place.random({N, F});
                   const Tensor d_gate_up = place.zeros({N, 2 * F}), h = place.zeros({N, F});
                   return PreparedOp{sizes, 0, {gate_up, dh}, {d_gate_up, h}, [=, &place] {
                                       swiglu_backward(place.stream(), d_gate_up, h, dh, gate_up);
                                     }};
                 }});
}

void add_vocabulary(Ops& ops, const BenchSizes& s) {
  const int64_t N = s.N, D = s.D, V = s.V;
  const std::string sizes = fmt::format("[{}, {}] of {} rows", N, D, V);
  ops.push_back(
      {"embedding_forward", "", [=](BenchPlace& place) {
         const Tensor table = place.wide_random({V, D}), tokens = place.ids(N, V), x = place.zeros({N, D});
         return PreparedOp{sizes, 0, {x}, {x}, [=, &place] { embedding_forward(place.stream(), x, tokens, table); }};
       }});
  ops.push_back({"embedding_backward", "", [=](BenchPlace& place) {
                   const Tensor dx = place.random({N, D}), tokens = place.ids(N, V), dtable = place.wide_zeros({V, D});
                   // Of the table it touches as many rows as there are tokens; all are compared.
                   return PreparedOp{sizes, 0, {dx}, {dtable}, [=, &place] {
                                       embedding_backward(place.stream(), dtable, dx, tokens);
                                     }};
                 }});
  const int64_t n = std::min(N, head_block_rows(V, DType::kF32));
  const std::string head_sizes = fmt::format("[{}, {}]", n, V);
  ops.push_back(
      {"cross_entropy_stats", "", [=](BenchPlace& place) {
         const Tensor logits = place.random({n, V}), targets = place.ids(n, V), stats = place.wide_zeros({n, 3});
         return PreparedOp{head_sizes, 0, {logits}, {stats}, [=, &place] {
                             cross_entropy_stats(place.stream(), stats, logits, targets, 0);
                           }};
       }});
  ops.push_back(
      {"cross_entropy_backward", "", [=](BenchPlace& place) {
         const Tensor logits = place.random({n, V}), targets = place.ids(n, V), stats = place.wide_zeros({n, 3});
         cross_entropy_stats(place.stream(), stats, logits, targets, 0);
         return PreparedOp{head_sizes, 0, {logits}, {logits}, [=, &place] {
                             cross_entropy_backward(place.stream(), logits, stats, targets, 0, 0.0, 1.0);
                           }};
       }});
}

void add_optimizer(Ops& ops, const BenchSizes& s) {
  const Shape shape = {s.V, s.D};
  const std::string sizes = fmt::format("[{}, {}]", s.V, s.D);
  ops.push_back({"accumulate_norm_squared", "", [=](BenchPlace& place) {
                   const Tensor grad = place.wide_random(shape), control = place.zeros(DType::kF64, {kStepControlSize});
                   return PreparedOp{sizes, 0, {grad}, {control}, [=, &place] {
                                       accumulate_norm_squared(place.stream(), control, grad);
                                     }};
                 }});
  ops.push_back({"adamw_step", "", [=](BenchPlace& place) {
                   const Tensor value = place.wide_random(shape), m = place.wide_zeros(shape),
                                v = place.wide_zeros(shape);
                   const Tensor grad = place.wide_random(shape), control = place.zeros(DType::kF64, {kStepControlSize});
                   accumulate_norm_squared(place.stream(), control, grad);
                   prepare_step(place.stream(), control, 1.0);
                   return PreparedOp{sizes, 0, {value, m, v, grad}, {value, m, v}, [=, &place] {
                                       adamw_step(place.stream(), value, m, v, grad, control, {.lr = 1e-4});
                                     }};
                 }});
  ops.push_back({"add", "", [=](BenchPlace& place) {
                   const Tensor a = place.random(shape), b = place.random(shape), y = place.zeros(shape);
                   return PreparedOp{sizes, 0, {a, b}, {y}, [=, &place] { add(place.stream(), y, a, b); }};
                 }});
}

}  // namespace

std::vector<BenchOp> bench_ops(const Config& config) {
  const BenchSizes s(config);
  const int64_t F = config.model.mlp.intermediate_size;
  Ops ops;
  add_linear(ops, s, "square", s.D, s.D);
  add_linear(ops, s, "feed-forward up", s.D, 2 * F);
  add_linear(ops, s, "feed-forward down", F, s.D);
  for (const DeltaRuleKind& kind : {kda_kind(config.model.kda), gdn_kind(config.model.gdn)}) {
    add_delta_rule(ops, s, kind, DeltaForm::kChunkwise);
    if (device_of(config) == Device::kCpu) add_delta_rule(ops, s, kind, DeltaForm::kRecurrence);
  }
  add_short_conv(ops, s);
  add_attention_ops(ops, s);
  add_norms(ops, s);
  add_swiglu(ops, s);
  add_vocabulary(ops, s);
  add_expert_ops(ops, config);
  add_sequence_ops(ops, config);
  add_optimizer(ops, s);
  return ops;
}

}  // namespace palimpsest
