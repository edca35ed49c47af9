// Routed experts on a GPU against the CPU in f64.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/adamw.h"
#include "kernels/elementwise.h"
#include "kernels/expert_rows.h"
#include "kernels/random.h"
#include "kernels/router.h"
#include "tests/cuda/lab.h"
#include "tests/cuda/op_cases.h"

namespace palimpsest {
namespace {

using namespace support;

struct RouterCase {
  int64_t N, E, k;
  RouterOptions options;
  bool has_bias;
};

TEST(CudaRouter, MatchesTheCpu) {
  const RouterScore sigmoid = RouterScore::kSigmoid, softmax = RouterScore::kSoftmax;
  for (const RouterCase& c : {RouterCase{1, 1, 1, {.score = sigmoid, .renormalize = false}, false},
                              RouterCase{63, 64, 8, {.score = sigmoid, .scale = 2.446}, true},
                              RouterCase{65, 24, 3, {.score = sigmoid, .num_groups = 4, .top_groups = 2}, true},
                              RouterCase{200, 5, 5, {.score = sigmoid, .num_groups = 5, .top_groups = 5}, false},
                              RouterCase{130, 300, 10, {.score = softmax}, false},
                              RouterCase{3, 64, 2, {.score = softmax, .renormalize = false, .scale = 0.5}, false}})
    expect_same_on_gpu([&](Lab& lab) {
      const Shape chosen = {c.N, c.k};
      const Routing routing = {.scores = lab.statistics("scores", {c.N, c.E}),
                               .experts = lab.output_integers("experts", chosen),
                               .weights = lab.statistics("weights", chosen)};
      const Tensor bias = c.has_bias ? lab.weight("bias", {c.E}, 0.1) : Tensor();
      router_forward(lab.stream(), routing, lab.weight("logits", {c.N, c.E}), bias, c.options);
      const Tensor d_weights = lab.weight("d_weights", chosen);
      const Tensor slope = lab.wide("slope", std::vector<double>(static_cast<size_t>(c.E), 0.25));
      router_backward(lab.stream(), lab.output("d_logits", {c.N, c.E}, 3), d_weights, routing, {}, c.options);
      router_backward(lab.stream(), lab.output("d_logits with slope", {c.N, c.E}), d_weights, routing, slope,
                      c.options);
    });
}

TEST(CudaRouter, SendsTokensWithoutScoresSomewhere) {
  expect_same_on_gpu([](Lab& lab) {
    const Tensor logits = lab.weight("logits", {3, 8}, HUGE_VAL);  // infinite and not a number
    const Routing routing = {.scores = lab.arena().allocate(lab.statistics_dtype(), {3, 8}),
                             .experts = lab.output_integers("experts", {3, 2}),
                             .weights = lab.arena().allocate(lab.statistics_dtype(), {3, 2})};
    router_forward(lab.stream(), routing, logits, {}, {.score = RouterScore::kSoftmax});
  });
}

TEST(CudaRouter, CountsAndBalanceMatchTheCpu) {
  for (const auto& [N, E] : {std::pair{1, 3}, std::pair{600, 300}})
    expect_same_on_gpu([N = N, E = E](Lab& lab) {
      std::vector<int64_t> offsets = {0};
      std::vector<double> zero(static_cast<size_t>(E), 0.0), other, load;
      for (int64_t e = 0; e < E; ++e) {
        offsets.push_back(offsets.back() + e % 5);
        other.push_back(static_cast<double>(e) * 0.5);
      }
      const Tensor tallied = lab.accumulated_wide("load", other), mass = lab.accumulated_wide("mass", zero);
      const Tensor alone = lab.accumulated_wide("load alone", zero);
      const Tensor scores = lab.weight("scores", {N, E});
      tally_experts(lab.stream(), tallied, mass, lab.integers("offsets", offsets), scores);
      tally_experts(lab.stream(), alone, {}, lab.integers("offsets again", offsets), scores);
      add(lab.stream(), alone, alone, tallied);
      std::vector<double> layers(static_cast<size_t>(3 * E));
      for (size_t i = 0; i < layers.size(); ++i) layers[i] = static_cast<double>(i % 7);
      balance_experts(lab.stream(), lab.accumulated_wide("sum", {2.0}), lab.accumulated_wide("slope", zero),
                      lab.wide("loads", layers).view({3, E}), lab.wide("masses", layers).view({3, E}),
                      {.top_k = 2, .coefficient = 0.01, .slope_scale = 3.0});
      for (const double finite : {0.0, 1.0}) {
        const std::string name = finite == 0.0 ? "skipped" : "applied";
        std::vector<double> control(kStepControlSize, 0.0);
        control[kFinite] = finite;
        selection_bias_step(lab.stream(), lab.accumulated("bias " + name, {E - 1}), tallied, 1, 1e-3,
                            lab.wide("control " + name, control));
      }
    });
}

TEST(CudaExpertRows, MatchTheCpu) {
  struct Sizes {
    int64_t N, k, E, D;
  };
  for (const auto& [N, k, E, D] :
       {Sizes{1, 1, 1, 1}, Sizes{63, 2, 5, 37}, Sizes{65, 3, 40, 64}, Sizes{200, 8, 9, 520}, Sizes{700, 2, 1500, 8}})
    expect_same_on_gpu([N = N, k = k, E = E, D = D](Lab& lab) {
      std::vector<int64_t> chosen;
      for (int64_t i = 0; i < N * k; ++i) {
        // All different in a token, and most of them the first experts.
        const auto draw = static_cast<int64_t>(random_bits(1, 5, static_cast<uint64_t>(i / k)) % (i % 3 == 0 ? 2 : E));
        chosen.push_back((draw + i % k) % E);
      }
      const Tensor experts = lab.integers("experts", chosen).view({N, k});
      const ExpertRows rows = {.offsets = lab.output_integers("offsets", {E + 1}),
                               .row_of = lab.output_integers("row_of", {N, k}),
                               .token_of = lab.output_integers("token_of", {N * k})};
      const int64_t R = N * k, gap = D % 4 == 0 ? 4 : 3;
      sort_by_expert(lab.stream(), rows, experts);
      gather_expert_rows(lab.stream(), lab.output("rows", {R, D}, gap), lab.input("x", {N, D}, 1, gap), rows.token_of);
      const Tensor y_rows = lab.input("y rows", {R, D}), weights = lab.weight("weights", {N, k});
      sum_expert_rows(lab.stream(), lab.output("y", {N, D}, gap), y_rows, rows.row_of, Write::kOverwrite);
      sum_expert_rows(lab.stream(), lab.in_place("y more", {N, D}), y_rows, rows.row_of, Write::kAccumulate);
      scale_expert_rows_forward(lab.stream(), lab.output("scaled", {R, D}), y_rows, weights, rows.row_of);
      const Tensor dy = lab.in_place("dy", {R, D}, 1, gap);
      scale_expert_rows_backward(lab.stream(), lab.output("dx", {R, D}), lab.statistics("d_weights", {N, k}), dy,
                                 y_rows, weights, rows.row_of);
      scale_expert_rows_backward(lab.stream(), dy, lab.statistics("d_weights again", {N, k}), dy, y_rows, weights,
                                 rows.row_of);
      scale_expert_rows_forward(lab.stream(), dy, dy, weights, rows.row_of);
    });
}

TEST(CudaGroupedLinear, MatchesTheCpu) {
  struct Sizes {
    int64_t O, I, gap;
  };
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{0, 0, 1, 131, 131, 200, 457}, std::vector<int64_t>{0, 63}, std::vector<int64_t>{0, 1, 1},
        std::vector<int64_t>{0, 3, 128, 256, 293}})
    for (const auto& [O, I, gap] :
         {Sizes{64, 96, 0}, Sizes{200, 136, 8}, Sizes{37, 19, 3}, Sizes{1, 1, 0}, Sizes{256, 32, 0}})
      expect_same_on_gpu([&, O = O, I = I, gap = gap](Lab& lab) { run_grouped_linear(lab, offsets, O, I, gap); },
                         {.f32 = 2e-6, .bf16 = 6e-3});
}

TEST(CudaTokenGate, MatchesTheCpu) {
  for (const int64_t D : {1, 37, 520})
    expect_same_on_gpu([=](Lab& lab) {
      const int64_t N = 65, gap = D % 4 == 0 ? 4 : 3;
      const Tensor x = lab.input("x", {N, D}, 1, gap), z = lab.input("z", {N, 1});
      const Tensor dy = lab.in_place("dy", {N, D}, 1, gap);
      token_gate_forward(lab.stream(), lab.output("y", {N, D}), x, z);
      token_gate_backward(lab.stream(), lab.output("dx", {N, D}, gap), lab.output("dz", {N, 1}), dy, x, z);
      token_gate_backward(lab.stream(), dy, lab.output("dz again", {N, 1}), dy, x, z);
    });
}

}  // namespace
}  // namespace palimpsest
