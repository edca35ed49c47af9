#include "trainer/bench_experts.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/expert_rows.h"
#include "kernels/router.h"

namespace palimpsest {

namespace {

struct Sizes {
  explicit Sizes(const Config& config)
      : N(std::min(config.train.micro_batch, config.train.sequences_per_step) * config.data.sequence_length),
        k(config.model.moe.experts_per_token),
        E(config.model.moe.num_experts) {}
  int64_t N, k, E;
};

// The rows of tokens that chose at random.
ExpertRows drawn_rows(BenchPlace& place, const Sizes& s) {
  const ExpertRows rows = {.offsets = place.memory().allocate(DType::kI32, {s.E + 1}),
                           .row_of = place.memory().allocate(DType::kI32, {s.N, s.k}),
                           .token_of = place.memory().allocate(DType::kI32, {s.N * s.k})};
  sort_by_expert(place.stream(), rows, place.ids(s.N * s.k, s.E).view({s.N, s.k}));
  return rows;
}

void add_routing(std::vector<BenchOp>& ops, const Sizes& s, const MoeConfig& moe) {
  const RouterOptions options = {.score = moe.router,
                                 .num_groups = moe.num_groups,
                                 .top_groups = moe.top_groups,
                                 .renormalize = moe.renormalize,
                                 .scale = moe.routed_scaling_factor};
  const std::string sizes = fmt::format("{} tokens, {} of {} experts", s.N, s.k, s.E);
  ops.push_back({"router_forward", "", [=](BenchPlace& place) {
                   const Tensor logits = place.wide_random({s.N, s.E});
                   const Routing routing = {.scores = place.wide_zeros({s.N, s.E}),
                                            .experts = place.memory().allocate(DType::kI32, {s.N, s.k}),
                                            .weights = place.wide_zeros({s.N, s.k})};
                   return PreparedOp{sizes, 0.0, {logits}, {routing.scores, routing.weights}, [=, &place] {
                                       router_forward(place.stream(), routing, logits, {}, options);
                                     }};
                 }});
  ops.push_back({"router_backward", "", [=](BenchPlace& place) {
                   const Tensor logits = place.wide_random({s.N, s.E}), d_weights = place.wide_random({s.N, s.k});
                   const Routing routing = {.scores = place.wide_zeros({s.N, s.E}),
                                            .experts = place.memory().allocate(DType::kI32, {s.N, s.k}),
                                            .weights = place.wide_zeros({s.N, s.k})};
                   const Tensor d_logits = place.zeros({s.N, s.E});
                   router_forward(place.stream(), routing, logits, {}, options);
                   return PreparedOp{sizes, 0.0, {routing.scores, d_weights}, {d_logits}, [=, &place] {
                                       router_backward(place.stream(), d_logits, d_weights, routing, {}, options);
                                     }};
                 }});
}

void add_rows(std::vector<BenchOp>& ops, const Sizes& s, int64_t D) {
  const int64_t R = s.N * s.k;
  const std::string sizes = fmt::format("{} rows of {} tokens, {} columns", R, s.N, D);
  ops.push_back({"gather_expert_rows", "", [=](BenchPlace& place) {
                   const ExpertRows of = drawn_rows(place, s);
                   const Tensor x = place.random({s.N, D}), rows = place.zeros({R, D});
                   return PreparedOp{sizes, 0.0, {x}, {rows}, [=, &place] {
                                       gather_expert_rows(place.stream(), rows, x, of.token_of);
                                     }};
                 }});
  ops.push_back({"sum_expert_rows", "", [=](BenchPlace& place) {
                   const ExpertRows of = drawn_rows(place, s);
                   const Tensor rows = place.random({R, D}), y = place.zeros({s.N, D});
                   return PreparedOp{sizes, 0.0, {rows}, {y}, [=, &place] {
                                       sum_expert_rows(place.stream(), y, rows, of.row_of, Write::kOverwrite);
                                     }};
                 }});
  ops.push_back({"scale_expert_rows_forward", "", [=](BenchPlace& place) {
                   const ExpertRows of = drawn_rows(place, s);
                   const Tensor x = place.random({R, D}), weights = place.wide_random({s.N, s.k});
                   const Tensor y = place.zeros({R, D});
                   return PreparedOp{sizes, 0.0, {x}, {y}, [=, &place] {
                                       scale_expert_rows_forward(place.stream(), y, x, weights, of.row_of);
                                     }};
                 }});
  ops.push_back({"scale_expert_rows_backward", "", [=](BenchPlace& place) {
                   const ExpertRows of = drawn_rows(place, s);
                   const Tensor x = place.random({R, D}), dy = place.random({R, D});
                   const Tensor weights = place.wide_random({s.N, s.k}), d_weights = place.wide_zeros({s.N, s.k});
                   const Tensor dx = place.zeros({R, D});
                   return PreparedOp{sizes, 0.0, {dy, x}, {dx, d_weights}, [=, &place] {
                                       scale_expert_rows_backward(place.stream(), dx, d_weights, dy, x, weights,
                                                                  of.row_of);
                                     }};
                 }});
}

// The gate of shared experts, a number a token.
void add_token_gate(std::vector<BenchOp>& ops, const Sizes& s, int64_t D) {
  const std::string sizes = fmt::format("[{}, {}]", s.N, D);
  ops.push_back(
      {"token_gate_forward", "", [=](BenchPlace& place) {
         const Tensor x = place.random({s.N, D}), z = place.random({s.N, 1}), y = place.zeros({s.N, D});
         return PreparedOp{sizes, 0.0, {x}, {y}, [=, &place] { token_gate_forward(place.stream(), y, x, z); }};
       }});
  ops.push_back({"token_gate_backward", "", [=](BenchPlace& place) {
                   const Tensor dy = place.random({s.N, D}), x = place.random({s.N, D}), z = place.random({s.N, 1});
                   const Tensor dx = place.zeros({s.N, D}), dz = place.zeros({s.N, 1});
                   return PreparedOp{sizes, 0.0, {dy, x}, {dx, dz}, [=, &place] {
                                       token_gate_backward(place.stream(), dx, dz, dy, x, z);
                                     }};
                 }});
}

void add_grouped_linear(std::vector<BenchOp>& ops, const Sizes& s, const char* what, int64_t in, int64_t out) {
  const int64_t R = s.N * s.k, E = s.E;
  const double flops = 2.0 * static_cast<double>(R) * static_cast<double>(in) * static_cast<double>(out);
  const std::string sizes = fmt::format("[{}, {}] -> {}, {} experts, {}", R, in, out, E, what);
  ops.push_back({"grouped_linear_forward", "", [=](BenchPlace& place) {
                   const Tensor offsets = drawn_rows(place, s).offsets;
                   const Tensor x = place.random({R, in}), w = place.wide_random({E * out, in});
                   const Tensor y = place.zeros({R, out});
                   return PreparedOp{sizes, flops, {x, w}, {y}, [=, &place] {
                                       grouped_linear_forward(place.stream(), y, x, w, offsets);
                                     }};
                 }});
  ops.push_back({"grouped_linear_backward_input", "", [=](BenchPlace& place) {
                   const Tensor offsets = drawn_rows(place, s).offsets;
                   const Tensor dy = place.random({R, out}), w = place.wide_random({E * out, in});
                   const Tensor dx = place.zeros({R, in});
                   return PreparedOp{sizes, flops, {dy, w}, {dx}, [=, &place] {
                                       grouped_linear_backward_input(place.stream(), dx, dy, w, offsets);
                                     }};
                 }});
  ops.push_back({"grouped_linear_backward_weight", "", [=](BenchPlace& place) {
                   const Tensor offsets = drawn_rows(place, s).offsets;
                   const Tensor dy = place.random({R, out}), x = place.random({R, in});
                   const Tensor dw = place.wide_zeros({E * out, in});
                   return PreparedOp{sizes, flops, {dy, x, dw}, {dw}, [=, &place] {
                                       grouped_linear_backward_weight(place.stream(), dw, dy, x, offsets);
                                     }};
                 }});
}

}  // namespace

void add_expert_ops(std::vector<BenchOp>& ops, const Config& config) {
  const Sizes s(config);
  if (s.E == 0) return;
  const int64_t D = config.model.hidden_size, F = config.model.moe.intermediate_size;
  add_routing(ops, s, config.model.moe);
  add_rows(ops, s, D);
  add_token_gate(ops, s, D);
  add_grouped_linear(ops, s, "gate and up", D, 2 * F);
  add_grouped_linear(ops, s, "down", F, D);
}

}  // namespace palimpsest
