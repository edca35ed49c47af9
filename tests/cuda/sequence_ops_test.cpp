// What sequence parallelism asks of a GPU, against the CPU in f64: attention to earlier keys, affine maps of states,
// documents whose states lie in rows of their own choice, and states alone.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/affine_state.h"
#include "kernels/attention.h"
#include "kernels/delta_rule.h"
#include "kernels/short_conv.h"
#include "tests/cuda/lab.h"
#include "tests/cuda/op_cases.h"

namespace palimpsest {
namespace {

using namespace support;

struct PrefixSizes {
  int64_t N, num_keys, H, HKV, K, V, gap;
};

TEST(CudaAttentionPrefix, MatchesTheCpu) {
  for (const PrefixSizes& sizes : {PrefixSizes{1, 1, 1, 1, 64, 64, 0}, PrefixSizes{63, 130, 2, 2, 192, 128, 0},
                                   PrefixSizes{65, 37, 4, 2, 64, 64, 8}, PrefixSizes{200, 3, 3, 1, 37, 19, 3},
                                   PrefixSizes{130, 257, 1, 1, 256, 256, 0}, PrefixSizes{3, 200, 2, 1, 128, 96, 8}})
    expect_same_on_gpu([=](Lab& lab) {
      const auto& [N, num_keys, H, HKV, K, V, gap] = sizes;
      run_attention_prefix(lab, {H, HKV, K, V, gap, 1 / std::sqrt(static_cast<double>(K))}, N, num_keys);
    });
}

// Two ways over the same keys: those of the document itself, then two blocks before them; and all at once.
TEST(CudaAttentionPrefix, BlockByBlockIsAttentionToAllKeys) {
  expect_same_on_gpu([](Lab& lab) {
    constexpr int64_t N = 70, kAll = 270, H = 2, kSize = 64;
    const Tensor q = lab.input("q", {N, H, kSize});
    const Tensor k = lab.input("k", {kAll, H, kSize}), v = lab.input("v", {kAll, H, kSize});
    const Tensor o = lab.output("o", {N, H, kSize}), lse = lab.statistics("lse", {N, H});
    if (lab.stream().device() == Device::kCpu) {
      attention_forward(lab.stream(), o, lse, q, k, v, 0.125, Documents::single(N), Documents::single(kAll));
      return;
    }
    const Documents own = Documents::single(N);
    attention_forward(lab.stream(), o, lse, q, k.rows(200, N), v.rows(200, N), 0.125, own, own);
    attention_prefix_forward(lab.stream(), o, lse, q, k.rows(0, 67), v.rows(0, 67), 0.125);
    attention_prefix_forward(lab.stream(), o, lse, q, k.rows(67, 133), v.rows(67, 133), 0.125);
  });
}

TEST(CudaAffineState, MatchesTheCpu) {
  for (const auto& [HV, K, V] : {std::tuple{3, 5, 7}, std::tuple{2, 128, 96}})
    expect_same_on_gpu([HV = HV, K = K, V = V](Lab& lab) {
      const Tensor maps = lab.statistics("maps", {2, HV, K, V + K});
      affine_identity(lab.stream(), maps);
      const Tensor map = lab.weight("map", {1, HV, K, V + K}, 0.2);
      for (const AffineDirection direction : {AffineDirection::kForward, AffineDirection::kAdjoint})
        affine_apply(lab.stream(),
                     lab.accumulated(direction == AffineDirection::kForward ? "state" : "d_state", {1, HV, K, V}), map,
                     direction);
    });
}

// Five documents, one of them empty: the second and the last begin with states, the first and the last leave theirs.
Documents documents_with_rows() {
  return Documents({0, 3, 70, 70, 71, 271}).with_states(4, {-1, 3, -1, -1, 0}, {2, -1, -1, -1, 0});
}

// Rows of states that no document has stay as they are.
TEST(CudaShortConv, StatesLieInRowsThatDocumentsName) {
  const Documents documents = documents_with_rows();
  for (const auto& [W, C] : {std::pair{2, 37}, std::pair{3, 37}, std::pair{4, 37}, std::pair{4, 36}})
    expect_same_on_gpu([&, W = W, C = C](Lab& lab) {
      const int64_t N = documents.num_tokens();
      const Shape states = {4, W - 1, C};
      const Tensor x = lab.input("x", {N, C}), w = lab.weight("w", {C, 1, W}), initial = lab.input("initial", states);
      short_conv_forward(lab.stream(), lab.output("y", {N, C}), x, w, initial, documents, ConvActivation::kSilu);
      short_conv_final_state(lab.stream(), lab.in_place("final", states), x, initial, documents);
      short_conv_backward(lab.stream(), lab.output("dx", {N, C}), lab.accumulated("dw", {C, 1, W}),
                          lab.in_place("d_initial", states), lab.input("dy", {N, C}), x, w, initial,
                          lab.input("d_final", states), documents, ConvActivation::kSilu);
    });
}

class DeltaRuleRows {
 public:
  DeltaRuleRows(Lab& lab, const DeltaRuleOptions& options, const Documents& documents, int64_t K, int64_t V)
      : lab_(lab), options_(options), documents_(documents), states_({documents.num_states(), kHV, K, V}) {
    const int64_t N = documents.num_tokens();
    const bool vector = options.decay == Decay::kVector;
    in_ = {.q = lab.input("q", {N, kH, K}),
           .k = lab.input("k", {N, kH, K}),
           .v = lab.input("v", {N, kHV, V}),
           .beta_logit = lab.input("beta_logit", {N, kHV}),
           .gate_logit = lab.input("gate_logit", vector ? Shape{N, kHV, K} : Shape{N, kHV}),
           .A_log = lab.weight("A_log", {kHV}, 0.3),
           .dt_bias = lab.weight("dt_bias", vector ? Shape{kHV, K} : Shape{kHV}, 0.3),
           .initial_state = lab.weight("initial", states_, 0.3)};
    d_o_ = lab.input("d_o", {N, kHV, V});
    d_final_ = lab.weight("d_final", states_, 0.3);
  }

  void all() {
    const DeltaRuleSaved saved =
        allocate_delta_rule_saved(lab_.arena(), lab_.dtype(), delta_rule_shape(in_, documents_), options_);
    delta_rule_forward(lab_.stream(),
                       {.o = lab_.output("o", in_.v.shape()), .final_state = lab_.accumulated("final", states_)}, saved,
                       in_, options_, documents_);
    delta_rule_backward(lab_.stream(),
                        {.dq = lab_.output("dq", in_.q.shape()),
                         .dk = lab_.output("dk", in_.k.shape()),
                         .dv = lab_.output("dv", in_.v.shape()),
                         .dbeta_logit = lab_.output("dbeta_logit", in_.beta_logit.shape()),
                         .dgate_logit = lab_.output("dgate_logit", in_.gate_logit.shape()),
                         .dA_log = lab_.accumulated("dA_log", in_.A_log.shape()),
                         .ddt_bias = lab_.accumulated("ddt_bias", in_.dt_bias.shape()),
                         .d_initial_state = lab_.accumulated("d_initial", states_)},
                        d_o_, d_final_, saved, in_, options_, documents_);
    delta_rule_backward(lab_.stream(), {.d_initial_state = lab_.accumulated("d_initial alone", states_)}, d_o_,
                        d_final_, saved, in_, options_, documents_);
    DeltaRuleOptions nothing = options_;
    nothing.save_level = SaveLevel::kNothing;
    delta_rule_forward(lab_.stream(), {.final_state = lab_.accumulated("final alone", states_)}, {}, in_, nothing,
                       documents_);
  }

 private:
  static constexpr int64_t kH = 2, kHV = 4;
  Lab& lab_;
  DeltaRuleOptions options_;
  const Documents& documents_;
  Shape states_;
  DeltaRuleInputs in_;
  Tensor d_o_, d_final_;
};

TEST(CudaDeltaRule, StatesLieInRowsThatDocumentsName) {
  const Documents documents = documents_with_rows();
  for (const Decay decay : {Decay::kVector, Decay::kScalar})
    for (const SaveLevel level : {SaveLevel::kNothing, SaveLevel::kAll})
      // The first two are served by Hopper's own kernels in bf16.
      for (const auto& [K, V] : {std::pair{128, 128}, std::pair{64, 192}, std::pair{37, 19}})
        expect_same_on_gpu(
            [&, K = K, V = V](Lab& lab) {
              DeltaRuleRows(lab, {.decay = decay, .scale = 0.125, .save_level = level}, documents, K, V).all();
            },
            {.f32 = 2e-5, .bf16 = 3e-2});
}

// Few heads and many tokens, whose state decays slowly: in bf16 Hopper's own kernels cut the document.
TEST(CudaDeltaRule, ALongDocumentOfFewHeadsMatchesTheCpu) {
  const Documents documents = Documents({0, 3300}).with_states(2, {1}, {0});
  for (const Decay decay : {Decay::kVector, Decay::kScalar})
    for (const SaveLevel level : {SaveLevel::kNothing, SaveLevel::kAll})
      expect_same_on_gpu(
          [&](Lab& lab) {
            const DeltaRuleOptions options = {
                .decay = decay, .gate = Gate::kBounded, .gate_lower_bound = -0.01, .scale = 0.125, .save_level = level};
            DeltaRuleRows(lab, options, documents, 64, 64).all();
          },
          {.f32 = 2e-5, .bf16 = 3e-2});
}

}  // namespace
}  // namespace palimpsest
