#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/delta_rule.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/linear.h"
#include "kernels/random.h"
#include "kernels/rms_norm.h"
#include "kernels/rotary.h"
#include "kernels/short_conv.h"
#include "kernels/swiglu.h"
#include "model/head.h"
#include "model/rope.h"
#include "trainer/bench.h"
#include "trainer/json_object.h"
#include "trainer/workbench.h"

namespace palimpsest {

namespace {

constexpr double kSecondsAnOp = 0.2;  // runs of one op go on for this long, and for three runs at least
constexpr int kMinRuns = 3;

// Times ops, or, on planning arenas, finds out how much memory they take.
class OpTimer {
 public:
  OpTimer(Stream& stream, Arena& memory, Console& console) : stream_(stream), memory_(memory), console_(console) {}

  Stream& stream() const { return stream_; }

  // Values of the size that activations have.
  Tensor random(Shape shape) {
    const Tensor tensor = memory_.allocate(DType::kF32, shape);
    if (stream_.is_planning()) return tensor;
    float* values = tensor.data<float>();
    const uint64_t stream = hash_of("bench kernels") + static_cast<uint64_t>(memory_.used());
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < tensor.numel(); ++i)
      values[i] = static_cast<float>(2.0 * random_uniform(1, stream, static_cast<uint64_t>(i)) - 1.0);
    return tensor;
  }
  Tensor zeros(DType dtype, Shape shape) {
    const Tensor tensor = memory_.allocate(dtype, shape);
    if (!stream_.is_planning()) std::fill_n(static_cast<std::byte*>(tensor.raw()), tensor.bytes(), std::byte{0});
    return tensor;
  }
  Tensor token_ids(int64_t count, int64_t vocab_size) {
    const Tensor tensor = memory_.allocate(DType::kI32, {count});
    if (stream_.is_planning()) return tensor;
    for (int64_t i = 0; i < count; ++i)
      tensor.data<int32_t>()[i] = static_cast<int32_t>(
          random_bits(1, hash_of("bench tokens"), static_cast<uint64_t>(i)) % static_cast<uint64_t>(vocab_size));
    return tensor;
  }

  DeltaRuleSaved delta_rule_saved(const DeltaRuleShape& shape, const DeltaRuleOptions& options) {
    return allocate_delta_rule_saved(memory_, DType::kF32, shape, options);
  }

  // `touched`: what the op reads or writes, for GB/s.
  void time(const std::string& name, const std::string& sizes, double flops, std::initializer_list<Tensor> touched,
            const std::function<void()>& op) {
    if (stream_.is_planning()) return op();
    op();
    double best = std::numeric_limits<double>::infinity(), total = 0.0;
    for (int run = 0; run < kMinRuns || total < kSecondsAnOp; ++run) {
      const double begin = console_.seconds();
      op();
      const double taken = console_.seconds() - begin;
      best = std::min(best, taken);
      total += taken;
    }
    double bytes = 0.0;
    for (const Tensor& tensor : touched) bytes += static_cast<double>(tensor.bytes());
    results_.push_back({name, sizes, 1e3 * best, 1e-9 * flops / best, 1e-9 * bytes / best});
  }

  // Runs a group of ops whose tensors are given back afterwards.
  void group(const std::function<void()>& ops) {
    Arena::Scope scope(memory_);
    ops();
  }

  std::vector<KernelBench> take_results() {
    return std::move(results_);
  }

 private:
  Stream& stream_;
  Arena& memory_;
  Console& console_;
  std::vector<KernelBench> results_;
};

struct Sizes {
  int64_t rows, T, N, D, V;
  const ModelConfig& model;
};

void time_linear(OpTimer& t, const Sizes& s, const char* what, int64_t in, int64_t out) {
  const int64_t N = s.N;
  const Tensor x = t.random({N, in}), w = t.random({out, in}), y = t.random({N, out}),
               dw = t.zeros(DType::kF32, {out, in});
  const double flops = 2.0 * static_cast<double>(N) * static_cast<double>(in) * static_cast<double>(out);
  const std::string sizes = fmt::format("[{}, {}] -> {}, {}", N, in, out, what);
  t.time("linear_forward", sizes, flops, {x, w, y}, [&] { linear_forward(t.stream(), y, x, w, Write::kOverwrite); });
  t.time("linear_backward_input", sizes, flops, {x, w, y},
         [&] { linear_backward_input(t.stream(), x, y, w, Write::kOverwrite); });
  t.time("linear_backward_weight", sizes, flops, {x, dw, dw, y}, [&] { linear_backward_weight(t.stream(), dw, y, x); });
}

void time_delta_rule(OpTimer& t, const Sizes& s, DeltaForm form) {
  const KdaConfig& kda = s.model.kda;
  const int64_t N = s.N, H = kda.num_heads, HV = kda.num_value_heads.value_or(H), K = kda.head_dim;
  const Documents documents = Documents::rows(s.rows, s.T);
  DeltaRuleOptions options;
  options.scale = 1.0 / std::sqrt(static_cast<double>(K));
  options.form = form;
  if (kda.gate_lower_bound) {
    options.gate = Gate::kBounded;
    options.gate_lower_bound = *kda.gate_lower_bound;
  }
  const auto inputs = [&] {
    return DeltaRuleInputs{.q = t.random({N, H, K}),
                           .k = t.random({N, H, K}),
                           .v = t.random({N, HV, K}),
                           .beta_logit = t.random({N, HV}),
                           .gate_logit = t.random({N, HV, K}),
                           .A_log = t.zeros(DType::kF32, {HV}),
                           .dt_bias = t.zeros(DType::kF32, {HV, K})};
  };
  const DeltaRuleInputs in = inputs(), d_in = inputs();
  const Tensor o = t.random({N, HV, K}), d_o = t.random({N, HV, K});
  const DeltaRuleSaved saved = t.delta_rule_saved(delta_rule_shape(in, documents), options);
  const double flops = static_cast<double>(N * HV) * delta_rule_flops(K, K);
  const std::string sizes = fmt::format("{} x {} tokens, {} heads of {}, {}", s.rows, s.T, HV, K,
                                        form == DeltaForm::kChunkwise ? "chunkwise" : "recurrence");
  t.time("delta_rule_forward", sizes, flops, {in.q, in.k, in.v, in.gate_logit, o},
         [&] { delta_rule_forward(t.stream(), {.o = o}, saved, in, options, documents); });
  const DeltaRuleGrads grads = {.dq = d_in.q,
                                .dk = d_in.k,
                                .dv = d_in.v,
                                .dbeta_logit = d_in.beta_logit,
                                .dgate_logit = d_in.gate_logit,
                                .dA_log = d_in.A_log,
                                .ddt_bias = d_in.dt_bias};
  t.time("delta_rule_backward", sizes, 2 * flops,
         {in.q, in.k, in.v, in.gate_logit, d_o, d_in.q, d_in.k, d_in.v, d_in.gate_logit},
         [&] { delta_rule_backward(t.stream(), grads, d_o, {}, saved, in, options, documents); });
}

void time_short_conv(OpTimer& t, const Sizes& s) {
  const KdaConfig& kda = s.model.kda;
  const int64_t C = 3 * kda.num_heads * kda.head_dim;
  const Documents documents = Documents::rows(s.rows, s.T);
  const Tensor x = t.random({s.N, C}), y = t.random({s.N, C}), dx = t.random({s.N, C});
  const Tensor w = t.random({C, 1, kda.conv_size}), dw = t.zeros(DType::kF32, {C, 1, kda.conv_size});
  const std::string sizes = fmt::format("[{}, {}], {} taps", s.N, C, kda.conv_size);
  t.time("short_conv_forward", sizes, 0, {x, y},
         [&] { short_conv_forward(t.stream(), y, x, w, {}, documents, ConvActivation::kSilu); });
  t.time("short_conv_backward", sizes, 0, {x, y, dx},
         [&] { short_conv_backward(t.stream(), dx, dw, {}, y, x, w, {}, {}, documents, ConvActivation::kSilu); });
}

void time_attention(OpTimer& t, const Sizes& s) {
  const MlaConfig& mla = s.model.mla;
  const int64_t N = s.N, H = mla.num_heads, K = mla.qk_nope_head_dim + mla.qk_rope_head_dim, V = mla.v_head_dim;
  const Documents documents = Documents::rows(s.rows, s.T);
  const double scale = 1.0 / std::sqrt(static_cast<double>(K));
  const Tensor q = t.random({N, H, K}), k = t.random({N, H, K}), v = t.random({N, H, V});
  const Tensor o = t.random({N, H, V}), d_o = t.random({N, H, V}), lse = t.random({N, H});
  const Tensor dq = t.random({N, H, K}), dk = t.random({N, H, K}), dv = t.random({N, H, V});
  const double flops = static_cast<double>(N * H * (K + V)) * static_cast<double>(s.T + 1);
  const std::string sizes = fmt::format("{} x {} tokens, {} heads of {} / {}", s.rows, s.T, H, K, V);
  t.time("attention_forward", sizes, flops, {q, k, v, o},
         [&] { attention_forward(t.stream(), o, lse, q, k, v, scale, documents, documents); });
  t.time("attention_backward", sizes, 2 * flops, {q, k, v, o, d_o, dq, dk, dv}, [&] {
    attention_backward(t.stream(), {dq, dk, dv, d_o, q, k, v, o, lse, scale}, documents);
  });
}

void time_rotary(OpTimer& t, const Sizes& s) {
  const MlaConfig& mla = s.model.mla;
  const int64_t size = std::max<int64_t>(2, mla.qk_rope_head_dim / 2 * 2);
  const Rope rope(RopeKind::kInterleaved, 0, size, mla.rope_theta);
  const Tensor x = t.random({s.N, mla.num_heads, size}), positions = t.token_ids(s.N, s.T);
  const std::string sizes = fmt::format("[{}, {}, {}]", s.N, mla.num_heads, size);
  t.time("rotary_forward", sizes, 0, {x, x}, [&] { rope.forward(t.stream(), x, positions); });
  t.time("rotary_backward", sizes, 0, {x, x}, [&] { rope.backward(t.stream(), x, positions); });
}

void time_norms(OpTimer& t, const Sizes& s) {
  const Tensor x = t.random({s.N, s.D}), y = t.random({s.N, s.D}), dx = t.random({s.N, s.D});
  const Tensor w = t.random({s.D}), dw = t.zeros(DType::kF32, {s.D}), rstd = t.random({s.N});
  std::string sizes = fmt::format("[{}, {}]", s.N, s.D);
  t.time("rms_norm_forward", sizes, 0, {x, y},
         [&] { rms_norm_forward(t.stream(), y, rstd, x, w, 1e-5, NormWeight::kPlain); });
  t.time("rms_norm_backward", sizes, 0, {x, y, dx},
         [&] { rms_norm_backward(t.stream(), dx, dw, y, x, w, rstd, NormWeight::kPlain); });
  const int64_t H = s.model.kda.num_heads, K = s.model.kda.head_dim;
  const Tensor o = t.random({s.N, H, K}), z = t.random({s.N, H, K}), n = t.random({s.N, H, K});
  const Tensor d_o = t.random({s.N, H, K}), dz = t.random({s.N, H, K});
  const Tensor head_w = t.random({K}), d_head_w = t.zeros(DType::kF32, {K}), head_rstd = t.random({s.N, H});
  sizes = fmt::format("[{}, {}, {}]", s.N, H, K);
  t.time("gated_rms_norm_forward", sizes, 0, {o, z, n},
         [&] { gated_rms_norm_forward(t.stream(), n, head_rstd, o, z, head_w, 1e-5, GateActivation::kSigmoid); });
  t.time("gated_rms_norm_backward", sizes, 0, {o, z, n, d_o, dz}, [&] {
    gated_rms_norm_backward(t.stream(), d_o, dz, d_head_w, n, o, z, head_w, head_rstd, GateActivation::kSigmoid);
  });
}

void time_feed_forward(OpTimer& t, const Sizes& s) {
  const int64_t F = s.model.mlp.intermediate_size;
  const Tensor gate_up = t.random({s.N, 2 * F}), d_gate_up = t.random({s.N, 2 * F});
  const Tensor h = t.random({s.N, F}), dh = t.random({s.N, F});
  const std::string sizes = fmt::format("[{}, 2 x {}]", s.N, F);
  t.time("swiglu_forward", sizes, 0, {gate_up, h}, [&] { swiglu_forward(t.stream(), h, gate_up); });
  t.time("swiglu_backward", sizes, 0, {gate_up, dh, d_gate_up, h},
         [&] { swiglu_backward(t.stream(), d_gate_up, h, dh, gate_up); });
}

void time_vocabulary(OpTimer& t, const Sizes& s) {
  const Tensor table = t.random({s.V, s.D}), x = t.random({s.N, s.D}), d_table = t.zeros(DType::kF32, {s.V, s.D});
  const Tensor tokens = t.token_ids(s.N, s.V);
  std::string sizes = fmt::format("[{}, {}] of {} rows", s.N, s.D, s.V);
  t.time("embedding_forward", sizes, 0, {x, x}, [&] { embedding_forward(t.stream(), x, tokens, table); });
  t.time("embedding_backward", sizes, 0, {x, x, x}, [&] { embedding_backward(t.stream(), d_table, x, tokens); });
  const int64_t n = std::min(s.N, head_block_rows(s.V, DType::kF32));
  const Tensor logits = t.random({n, s.V}), stats = t.random({n, 3}), loss = t.random({n});
  const Tensor targets = tokens.rows(0, n);
  sizes = fmt::format("[{}, {}]", n, s.V);
  t.time("cross_entropy_stats", sizes, 0, {logits},
         [&] { cross_entropy_stats(t.stream(), stats, logits, targets, 0); });
  t.time("cross_entropy_loss", sizes, 0, {stats, loss},
         [&] { cross_entropy_loss(t.stream(), loss, {}, stats, targets, 0.0); });
  t.time("cross_entropy_backward", sizes, 0, {logits, logits},
         [&] { cross_entropy_backward(t.stream(), logits, stats, targets, 0, 0.0, 1.0); });
}

void time_optimizer(OpTimer& t, const Sizes& s) {
  const Tensor value = t.random({s.V, s.D}), m = t.zeros(DType::kF32, {s.V, s.D}), v = t.zeros(DType::kF32, {s.V, s.D});
  const Tensor grad = t.random({s.V, s.D}), control = t.zeros(DType::kF64, {kStepControlSize});
  const std::string sizes = fmt::format("[{}, {}]", s.V, s.D);
  t.time("accumulate_norm_squared", sizes, 0, {grad}, [&] { accumulate_norm_squared(t.stream(), control, grad); });
  prepare_step(t.stream(), control, 1.0);
  t.time("adamw_step", sizes, 0, {value, value, m, m, v, v, grad},
         [&] { adamw_step(t.stream(), value, m, v, grad, control, {.lr = 1e-4}); });
  t.time("add", sizes, 0, {m, v, grad}, [&] { add(t.stream(), m, v, grad); });
  t.time("copy", sizes, 0, {m, grad}, [&] { copy(t.stream(), m, grad); });
}

void time_all(OpTimer& t, const Sizes& s) {
  const int64_t F = s.model.mlp.intermediate_size;
  t.group([&] { time_linear(t, s, "square", s.D, s.D); });
  t.group([&] { time_linear(t, s, "feed-forward up", s.D, 2 * F); });
  t.group([&] { time_linear(t, s, "feed-forward down", F, s.D); });
  t.group([&] { time_delta_rule(t, s, DeltaForm::kChunkwise); });
  t.group([&] { time_delta_rule(t, s, DeltaForm::kRecurrence); });
  t.group([&] { time_short_conv(t, s); });
  t.group([&] { time_attention(t, s); });
  t.group([&] { time_rotary(t, s); });
  t.group([&] { time_norms(t, s); });
  t.group([&] { time_feed_forward(t, s); });
  t.group([&] { time_vocabulary(t, s); });
  t.group([&] { time_optimizer(t, s); });
}

}  // namespace

std::vector<KernelBench> bench_kernels(const Config& config, Console& console) {
  const int64_t rows = std::min(config.train.micro_batch, config.train.sequences_per_step);
  const Sizes sizes = {.rows = rows,
                       .T = config.data.sequence_length,
                       .N = rows * config.data.sequence_length,
                       .D = config.model.hidden_size,
                       .V = config.model.vocab_size,
                       .model = config.model};
  set_threads(config);
  const Device device = device_of(config);
  Arena planned_memory = Arena::planning("tensors", device), planned_scratch = Arena::planning("scratch", device);
  Stream planning(device, planned_scratch);
  OpTimer rehearsal(planning, planned_memory, console);
  time_all(rehearsal, sizes);
  Arena memory("tensors", device, planned_memory.peak()), scratch("scratch", device, planned_scratch.peak());
  Stream stream(device, scratch);
  OpTimer timer(stream, memory, console);
  time_all(timer, sizes);
  return timer.take_results();
}

std::string to_text(const std::vector<KernelBench>& benches) {
  std::string text = fmt::format("{:<26} {:>10} {:>10} {:>8}  {}\n", "op", "ms", "GFLOP/s", "GB/s", "sizes, f32");
  for (const KernelBench& bench : benches)
    text += fmt::format("{:<26} {:>10.3f} {:>10} {:>8.1f}  {}\n", bench.name, bench.ms,
                        bench.gflops_per_second > 0 ? fmt::format("{:.1f}", bench.gflops_per_second) : "",
                        bench.gbytes_per_second, bench.sizes);
  return text;
}

std::string to_json(const std::vector<KernelBench>& benches) {
  std::string items;
  for (const KernelBench& bench : benches)
    items += (items.empty() ? "" : ",\n ") + JsonObject()
                                                 .add("op", bench.name)
                                                 .add("sizes", bench.sizes)
                                                 .add("ms", bench.ms)
                                                 .add("gflops_per_second", bench.gflops_per_second)
                                                 .add("gbytes_per_second", bench.gbytes_per_second)
                                                 .text();
  return "[" + items + "]";
}

}  // namespace palimpsest
