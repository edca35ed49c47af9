// Every op on a GPU against the CPU in f64, over odd sizes.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/linear.h"
#include "kernels/mla_heads.h"
#include "kernels/part_sums.h"
#include "kernels/random.h"
#include "kernels/rms_norm.h"
#include "kernels/rotary.h"
#include "kernels/short_conv.h"
#include "kernels/swiglu.h"
#include "tests/cuda/lab.h"
#include "tests/cuda/op_cases.h"

namespace palimpsest {
namespace {

using namespace support;

TEST(CudaElementwise, MatchesTheCpu) {
  for (const int64_t N : odd_lengths())
    for (const int64_t gap : {0, 3, 4})
      for (const int64_t columns : {37, 256})
        expect_same_on_gpu([=](Lab& lab) {
          const Shape shape = {N, 3, columns};
          const Tensor a = lab.input("a", shape, 1, gap), b = lab.input("b", shape, 1, 4 * gap);
          const Tensor sum = lab.output("sum", shape, gap), dy = lab.in_place("dy", shape);
          add(lab.stream(), sum, a, b);
          add(lab.stream(), sum, sum, a);
          copy(lab.stream(), lab.output("copy", shape, gap), a);
          fill_zero(lab.stream(), lab.output("zero", shape, gap));
          sigmoid_gate_forward(lab.stream(), lab.output("gated", shape), a, b);
          sigmoid_gate_backward(lab.stream(), lab.output("dx", shape, gap), lab.output("dz", shape), dy, a, b);
          sigmoid_gate_backward(lab.stream(), dy, lab.output("dz again", shape), dy, a, b);
        });
}

// Beside bf16 the residual stream may be f32.
TEST(CudaElementwise, WideStreamMatchesTheCpu) {
  for (const int64_t gap : {0, 3, 4})
    expect_same_on_gpu([=](Lab& lab) {
      const Shape shape = {65, 37 + 4 * gap};
      const Tensor x = lab.weight("x", shape), b = lab.input("b", shape, 1, gap);
      add(lab.stream(), lab.statistics("sum", shape), x, b);
      copy(lab.stream(), lab.output("rounded", shape, gap), x);
    });
}

// A rounding for each part would be twice as far off.
TEST(CudaElementwise, PartsAreSummedInF32AndRoundedOnce) {
  for (const int64_t columns : {37, 256})
    expect_same_on_gpu(
        [=](Lab& lab) {
          const Shape shape = {65, columns};
          const Tensor own = lab.input("own", shape), parts = lab.input("parts", {7 * 65, columns});
          add_parts(lab.stream(), lab.output("sum", shape), own, parts);
          const Tensor in_place = lab.in_place("in place", shape);
          add_parts(lab.stream(), in_place, in_place, parts);
        },
        {.f32 = 1e-6, .bf16 = 2.2e-3});
}

// More than one launch takes; of all some have gaps, or lengths that no pack divides.
TEST(CudaElementwise, ManyCopiesMatchTheCpu) {
  expect_same_on_gpu([](Lab& lab) {
    std::vector<CopyOperands> operands;
    for (int64_t i = 0; i < 121; ++i) {
      const Shape shape = {1 + i % 7 * 40, i % 5 == 0 ? 37 : 40};
      const std::string which = std::to_string(i);
      operands.push_back(
          {.y = lab.output("y" + which, shape, i % 4 == 1 ? 8 : 0), .x = lab.weight("x" + which, shape)});
    }
    copy_all(lab.stream(), operands);
  });
}

TEST(CudaLinear, MatchesTheCpu) {
  struct Sizes {
    int64_t N, I, O, gap;
  };
  for (const auto& [N, I, O, gap] : {Sizes{200, 64, 128, 0}, Sizes{65, 37, 19, 3}, Sizes{1, 128, 8, 8},
                                     Sizes{130, 256, 72, 8}, Sizes{63, 1, 1, 0}, Sizes{3, 8, 1000, 1}})
    expect_same_on_gpu(
        [=](Lab& lab) {
          const Tensor x = lab.input("x", {N, I}, 1, gap), dy = lab.input("dy", {N, O}, 1, gap);
          // A weight in the operands' type, and one in f32.
          const auto with_weight = [&](const std::string& kind, const Tensor& w) {
            linear_forward(lab.stream(), lab.output("y" + kind, {N, O}, gap), x, w, Write::kOverwrite);
            linear_forward(lab.stream(), lab.in_place("y more" + kind, {N, O}, 1, gap), x, w, Write::kAccumulate);
            linear_backward_input(lab.stream(), lab.output("dx" + kind, {N, I}), dy, w, Write::kOverwrite);
            linear_backward_input(lab.stream(), lab.in_place("dx more" + kind, {N, I}), dy, w, Write::kAccumulate);
          };
          with_weight(" own", lab.input("w", {O, I}, 0.2, gap));
          with_weight(" wide", lab.weight("wide w", {O, I}, 0.2));
          linear_backward_weight(lab.stream(), lab.accumulated("dw", {O, I}), dy, x);
        },
        {.f32 = 2e-6, .bf16 = 6e-3});
}

TEST(CudaEmbedding, MatchesTheCpu) {
  for (const int64_t D : {37, 128})
    for (const int64_t begin : {0, 5})
      expect_same_on_gpu([=](Lab& lab) {
        constexpr int64_t N = 700, kVocabulary = 23;
        std::vector<int64_t> ids;
        for (int64_t i = 0; i < N; ++i) ids.push_back(static_cast<int64_t>(random_bits(1, 2, i) % kVocabulary));
        const Tensor tokens = lab.integers("tokens", ids);
        const VocabRange range = {.begin = begin, .total = kVocabulary};
        const Tensor table = lab.weight("table", {kVocabulary - 2 * begin, D});
        embedding_forward(lab.stream(), lab.output("x", {N, D}, 1), tokens, table, range);
        embedding_backward(lab.stream(), lab.accumulated("dtable", {kVocabulary - 2 * begin, D}),
                           lab.input("dx", {N, D}, 1, 4), tokens, range);
        embedding_forward(lab.stream(), lab.statistics("wide x", {N, D}), tokens, table, range);
        embedding_backward(lab.stream(), lab.accumulated("dtable of wide", {kVocabulary - 2 * begin, D}),
                           lab.weight("wide dx", {N, D}), tokens, range);
      });
}

// Where there is memory to try what the library proposes, what is kept gives the bits of its first proposal.
TEST(CudaLinear, AChoiceOfAlgorithmsLeavesTheBits) {
  SKIP_WITHOUT_GPU();
  constexpr int64_t N = 2048, I = 1024, O = 1000;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto results = Lab(Device::kCuda, dtype).run([](Lab& lab) {
      Arena& scratch = lab.stream().scratch();
      const Tensor x = lab.input("x", {N, I}), w = lab.input("w", {O, I}, 0.2), dy = lab.input("dy", {N, O});
      const auto multiply = [&](const std::string& when) {
        linear_forward(lab.stream(), lab.output("y " + when, {N, O}, 8), x, w, Write::kOverwrite);
        linear_backward_input(lab.stream(), lab.output("dx " + when, {N, I}), dy, w, Write::kOverwrite);
        const Tensor dw = lab.statistics("dw " + when, {O, I});
        fill_zero(lab.stream(), dw);
        linear_backward_weight(lab.stream(), dw, dy, x);
      };
      const auto with_room = [&](int64_t bytes) {
        const Arena::Scope scope(scratch);
        scratch.allocate(DType::kU8, {bytes});
      };
      {
        const Arena::Scope all_taken(scratch);
        if (!scratch.is_planning()) scratch.allocate(DType::kU8, {scratch.capacity() - (int64_t{33} << 20)});
        multiply("first");
      }
      with_room(int64_t{64} << 20);
      multiply("chosen");
      multiply("again");
    });
    for (const char* name : {"y ", "dx ", "dw "}) {
      const std::vector<double>& first = results.at(std::string(name) + "first");
      EXPECT_TRUE(results.at(std::string(name) + "chosen") == first) << name_of(dtype) << " " << name;
      EXPECT_TRUE(results.at(std::string(name) + "again") == first) << name_of(dtype) << " " << name;
    }
  }
}

// More tokens than are sorted at once; some rows have one token, some more than a warp has lanes.
TEST(CudaEmbedding, ManyTokensMatchTheCpu) {
  for (const auto& [N, D] : {std::pair{4999, 264}, std::pair{10241, 5}, std::pair{2048, 36}})
    expect_same_on_gpu([N = N, D = D](Lab& lab) {
      constexpr int64_t kVocabulary = 3000;
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < N; ++i) {
        const auto bits = static_cast<int64_t>(random_bits(1, 2, i) >> 1);
        ids.push_back(bits % 3 == 0 ? 7 + bits / 3 % 5 : bits / 3 % kVocabulary);
      }
      embedding_backward(lab.stream(), lab.accumulated("dtable", {kVocabulary - 20, D}), lab.input("dx", {N, D}, 1, 8),
                         lab.integers("tokens", ids), {.begin = 9, .total = kVocabulary});
    });
}

TEST(CudaRmsNorm, MatchesTheCpu) {
  for (const NormWeight kind : {NormWeight::kPlain, NormWeight::kOneCentred})
    for (const auto& [N, D, gap] :
         {std::tuple{200, 1024, 8}, std::tuple{65, 128, 0}, std::tuple{63, 37, 3}, std::tuple{1, 5, 0},
          std::tuple{33, 1000, 4}, std::tuple{35, 1000, 8}, std::tuple{37, 1032, 4}})
      expect_same_on_gpu([=, N = N, D = D, gap = gap](Lab& lab) {
        const Shape shape = {N, D};
        const Tensor x = lab.input("x", shape, 2, gap), w = lab.weight("w", {D}), rstd = lab.statistics("rstd", {N});
        rms_norm_forward(lab.stream(), lab.output("y", shape), rstd, x, w, 1e-5, kind, lab.output("kept", shape, gap));
        const Tensor dy = lab.in_place("dy", shape), dw = lab.accumulated("dw", {D});
        rms_norm_backward(lab.stream(), lab.output("dx", shape, gap), dw, dy, x, w, rstd, kind);
        rms_norm_backward(lab.stream(), dy, dw, dy, x, w, rstd, kind);
      });
}

TEST(CudaRmsNorm, TakesAWideStreamAndAddsToItsGradient) {
  for (const auto& [N, D] : {std::pair{200, 1024}, std::pair{63, 37}, std::pair{31, 1028}})
    expect_same_on_gpu([N = N, D = D](Lab& lab) {
      const Shape shape = {N, D};
      const Tensor x = lab.weight("x", shape, 2), w = lab.weight("w", {D}), rstd = lab.statistics("rstd", {N});
      const Tensor dy = lab.input("dy", shape), narrow = lab.input("narrow", shape);
      rms_norm_forward(lab.stream(), lab.output("y", shape), rstd, x, w, 1e-5, NormWeight::kPlain,
                       lab.statistics("kept", shape));
      rms_norm_forward(lab.stream(), lab.output("y again", shape), rstd, x, w, 1e-5, NormWeight::kPlain,
                       lab.output("rounded", shape, 4));
      rms_norm_backward(lab.stream(), lab.in_place("dx", shape), lab.accumulated("dw", {D}), dy, x, w, rstd,
                        NormWeight::kPlain, Write::kAccumulate);
      rms_norm_backward(lab.stream(), lab.output("dx alone", shape), lab.accumulated("dw 2", {D}), dy, x, w, rstd,
                        NormWeight::kPlain);
      rms_norm_backward(lab.stream(), lab.in_place("narrow dx", shape), lab.accumulated("dw 3", {D}), dy, narrow, w,
                        rstd, NormWeight::kPlain, Write::kAccumulate);
    });
}

TEST(CudaRmsNorm, HeadsShareAWeight) {
  expect_same_on_gpu([](Lab& lab) {
    const Shape shape = {65, 3, 64};
    const Tensor x = lab.input("x", shape, 2, 5), w = lab.weight("w", {64}), rstd = lab.statistics("rstd", {65, 3});
    rms_norm_forward(lab.stream(), lab.output("y", shape), rstd, x, w, 1e-6, NormWeight::kPlain);
    rms_norm_backward(lab.stream(), lab.output("dx", shape, 8), lab.accumulated("dw", {64}), lab.input("dy", shape), x,
                      w, rstd, NormWeight::kPlain);
  });
}

TEST(CudaGatedRmsNorm, MatchesTheCpu) {
  for (const GateActivation activation : {GateActivation::kSigmoid, GateActivation::kSilu})
    for (const auto& [N, V, gap] :
         {std::tuple{1, 37, 1}, std::tuple{63, 128, 1}, std::tuple{65, 37, 1}, std::tuple{200, 128, 1},
          std::tuple{65, 128, 4}, std::tuple{63, 132, 4}, std::tuple{200, 128, 8}, std::tuple{1, 128, 8},
          std::tuple{63, 72, 8}, std::tuple{67, 136, 8}, std::tuple{65, 256, 8}, std::tuple{3, 264, 8}})
      expect_same_on_gpu([=, N = N, V = V, gap = gap](Lab& lab) {
        const Shape shape = {N, 3, V};
        const int64_t other_gap = gap == 8 ? 16 : 4;
        const Tensor o = lab.input("o", shape, 2), z = lab.input("z", shape, 1, other_gap), w = lab.weight("w", {V});
        const Tensor rstd = lab.statistics("rstd", {N, 3});
        gated_rms_norm_forward(lab.stream(), lab.output("y", shape, gap), rstd, o, z, w, 1e-5, activation);
        gated_rms_norm_backward(lab.stream(), lab.output("d_o", shape, 4 * gap), lab.output("dz", shape, other_gap),
                                lab.accumulated("dw", {V}), lab.input("dy", shape), o, z, w, rstd, activation);
        gated_rms_norm_backward(lab.stream(), lab.output("d_o again", shape), lab.output("dz again", shape),
                                lab.accumulated("dw again", {V}), lab.input("dy", shape), o, z, w, rstd, activation,
                                lab.output("y again", shape, gap));
      });
}

void expect_same_convolution(const Documents& documents, int64_t C, int64_t W, bool carries, int64_t row_gap) {
  expect_same_on_gpu([&, C, W, carries, row_gap](Lab& lab) {
    const int64_t N = documents.num_tokens();
    const Shape state_shape = {documents.count(), W - 1, C};
    const Tensor x = lab.input("x", {N, C}, 1, 5 * row_gap), w = lab.weight("w", {C, 1, W});
    const Tensor dy = lab.input("dy", {N, C});
    const ConvActivation activation = W == 3 ? ConvActivation::kNone : ConvActivation::kSilu;
    Tensor initial, d_initial, d_final;
    if (carries) {
      initial = lab.input("initial", state_shape);
      d_final = lab.input("d_final", state_shape);
      d_initial = lab.output("d_initial", state_shape);
    }
    short_conv_forward(lab.stream(), lab.output("y", {N, C}, 3 * row_gap), x, w, initial, documents, activation);
    short_conv_final_state(lab.stream(), lab.output("final", state_shape), x, initial, documents);
    short_conv_backward(lab.stream(), lab.output("dx", {N, C}, 2 * row_gap), lab.accumulated("dw", {C, 1, W}),
                        d_initial, dy, x, w, initial, d_final, documents, activation);
  });
}

TEST(CudaShortConv, MatchesTheCpu) {
  for (const Documents& documents : odd_documents())
    for (const int64_t W : {1, 2, 3, 4})
      for (const bool carries : {false, true}) expect_same_convolution(documents, 261, W, carries, 1);
}

// Rows that can be moved in packs; more channels than a block has, and fewer.
TEST(CudaShortConv, MatchesTheCpuInPacks) {
  std::vector<Documents> all = odd_documents();
  all.push_back(Documents({0, 2, 64, 66, 66, 129, 130, 131, 192, 321}));
  for (const Documents& documents : all)
    for (const bool carries : {false, true})
      for (const int64_t C : {44, 520}) expect_same_convolution(documents, C, 4, carries, 4);
}

TEST(CudaRotary, MatchesTheCpu) {
  for (const RotaryPairs pairs : {RotaryPairs::kInterleaved, RotaryPairs::kHalfSplit})
    for (const int64_t N : odd_lengths())
      expect_same_on_gpu([=](Lab& lab) {
        std::vector<int64_t> positions;
        for (int64_t i = 0; i < N; ++i) positions.push_back(i * 1999);
        std::vector<double> frequencies = {1.0, 0.37, 0.011};
        const Tensor at = lab.integers("positions", positions), inv_freq(frequencies.data(), DType::kF64, {3});
        const RotaryOptions options = {.offset = 2, .pairs = pairs, .amplitude = 1.2};
        rotary_forward(lab.stream(), lab.in_place("x", {N, 3, 9}, 1, 3), at, inv_freq, options);
        rotary_backward(lab.stream(), lab.in_place("dx", {N, 9}), at, inv_freq, options);
      });
}

TEST(CudaSwiglu, MatchesTheCpu) {
  for (const int64_t N : odd_lengths())
    for (const int64_t F : {37, 264})
      expect_same_on_gpu([=](Lab& lab) {
        const Tensor gate_up = lab.input("gate_up", {N, 2 * F}, 1, 4), dh = lab.input("dh", {N, F});
        swiglu_forward(lab.stream(), lab.output("h", {N, F}), gate_up);
        swiglu_backward(lab.stream(), lab.output("d_gate_up", {N, 2 * F}), lab.output("h again", {N, F}, 4), dh,
                        gate_up);
        swiglu_backward(lab.stream(), lab.output("d_gate_up alone", {N, 2 * F}), {}, dh, gate_up);
      });
}

TEST(CudaSwiglu, MatchesTheCpuInPacks) {
  for (const int64_t N : odd_lengths())
    for (const int64_t F : {40, 1104})
      expect_same_on_gpu([=](Lab& lab) {
        const Tensor gate_up = lab.in_place("gate_up", {N, 2 * F}, 3, 8), dh = lab.input("dh", {N, F});
        swiglu_forward(lab.stream(), lab.output("h", {N, F}), gate_up);
        swiglu_backward(lab.stream(), gate_up, lab.output("h again", {N, F}, 8), dh, gate_up);
      });
}

TEST(CudaMlaHeads, MatchesTheCpu) {
  struct Sizes {
    int64_t nope, rope, value, gap;
  };
  for (const int64_t N : odd_lengths())
    for (const auto& [nope, rope, value, gap] :
         {Sizes{20, 6, 12, 5}, Sizes{24, 8, 12, 8}, Sizes{128, 64, 128, 8}, Sizes{24, 8, 40, 16}})
      expect_same_on_gpu([=, nope = nope, rope = rope, value = value, gap = gap](Lab& lab) {
        constexpr int64_t H = 3;
        const Tensor kv = lab.input("kv", {N, H, nope + value}, 1, gap), k_pe = lab.input("k_pe", {N, rope}, 1, gap);
        mla_keys_values_forward(lab.stream(), lab.output("k", {N, H, nope + rope}), lab.output("v", {N, H, value}), kv,
                                k_pe);
        mla_keys_values_backward(lab.stream(), lab.output("dkv", {N, H, nope + value}, gap),
                                 lab.output("dk_pe", {N, rope}, gap), lab.input("dk", {N, H, nope + rope}),
                                 lab.input("dv", {N, H, value}));
      });
}

TEST(CudaAttention, MatchesTheCpu) {
  for (const Documents& documents : odd_documents())
    for (AttentionSizes sizes :
         {AttentionSizes{2, 2, 192, 128, 0}, AttentionSizes{4, 2, 64, 64, 8}, AttentionSizes{3, 1, 37, 19, 3},
          AttentionSizes{1, 1, 256, 256, 0}, AttentionSizes{1, 1, 96, 72, 0}, AttentionSizes{2, 2, 128, 96, 0}}) {
      sizes.scale = 1 / std::sqrt(static_cast<double>(sizes.K));
      expect_same_on_gpu([&](Lab& lab) { run_attention(lab, sizes, documents); });
    }
}

TEST(CudaAttention, QueriesSeeEarlierKeys) {
  expect_same_on_gpu([](Lab& lab) {
    const Documents queries({0, 1, 4, 70}), keys({0, 90, 93, 290});
    const Tensor q = lab.input("q", {70, 2, 64}), k = lab.input("k", {290, 2, 64}), v = lab.input("v", {290, 2, 32});
    attention_forward(lab.stream(), lab.output("o", {70, 2, 32}), lab.statistics("lse", {70, 2}), q, k, v, 0.125,
                      queries, keys);
  });
}

TEST(CudaCrossEntropy, MatchesTheCpu) {
  for (const auto& [N, vocabulary, gap] : {std::tuple{1, 1000, 3}, std::tuple{63, 37, 3}, std::tuple{65, 1000, 8},
                                           std::tuple{200, 37, 0}, std::tuple{5, 20008, 0}})
    expect_same_on_gpu([N = N, vocabulary = vocabulary, gap = gap](Lab& lab) {
      constexpr int64_t kBegin = 4;
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < N; ++i)
        ids.push_back(i % 7 == 3 ? kIgnoreTarget : static_cast<int64_t>(random_bits(1, 3, i)) % (vocabulary + 8));
      for (int64_t& id : ids) id = id < kIgnoreTarget ? -id : id;
      const Tensor targets = lab.integers("targets", ids);
      const Tensor logits = lab.in_place("logits", {N, vocabulary}, 3, gap);
      const Tensor stats = lab.statistics("stats", {N, 3}),
                   merged = lab.statistics("merged", {N % 5 == 0 ? N / 5 : N, 3});
      cross_entropy_stats(lab.stream(), stats, logits, targets, kBegin);
      cross_entropy_merge_stats(lab.stream(), merged, stats);
      const Tensor loss = lab.statistics("loss", {N}), z = lab.statistics("z", {N});
      cross_entropy_loss(lab.stream(), loss, z, stats, targets, 1e-3);
      sum_into(lab.stream(), lab.accumulated_wide("sum", {2.5}), loss);
      cross_entropy_backward(lab.stream(), logits, stats, targets, kBegin, 1e-3, 0.25);
    });
}

TEST(CudaAdamw, MatchesTheCpu) {
  for (const int64_t n : {1, 1003, 40000})
    expect_same_on_gpu([=](Lab& lab) {
      const Tensor control = lab.accumulated_wide("control", {0.5, 0, 2, 0});
      const Tensor grad = lab.weight("grad", {n}), sum = lab.wide("sum", {1.0});
      const Tensor param = lab.accumulated("param", {n}), m = lab.accumulated("m", {n});
      const Tensor v = lab.statistics("v", {n}), sgd = lab.accumulated("sgd", {n});
      fill_zero(lab.stream(), v);
      accumulate_norm_squared(lab.stream(), control, grad);
      require_finite(lab.stream(), control, sum);
      prepare_step(lab.stream(), control, 3.0);
      for (int step = 0; step < 2; ++step)
        adamw_step(lab.stream(), param, m, v, grad, control, {.lr = 1e-2, .weight_decay = 0.1});
      sgd_step(lab.stream(), sgd, grad, control, 0.1);
    });
}

// More than one launch takes, of every length and alignment.
TEST(CudaAdamw, ManyAtOnceMatchTheCpu) {
  expect_same_on_gpu([](Lab& lab) {
    const Tensor control = lab.accumulated_wide("control", {0.5, 0, 2, 0});
    std::vector<Tensor> grads;
    std::vector<AdamwOperands> operands;
    for (int64_t i = 0; i < 107; ++i) {
      const int64_t n = i % 3 == 0 ? 4 * i + 4 : 11 * i + 1;
      const std::string which = std::to_string(i);
      grads.push_back(lab.weight("grad" + which, {n}));
      operands.push_back({.param = lab.accumulated("param" + which, {n}),
                          .m = lab.accumulated("m" + which, {n}),
                          .v = lab.statistics("v" + which, {n}),
                          .grad = grads.back(),
                          .weight_decay = i % 2 == 0 ? 0.1 : 0.0});
      fill_zero(lab.stream(), operands.back().v);
    }
    accumulate_norm_squared(lab.stream(), control, grads);
    prepare_step(lab.stream(), control, 3.0);
    adamw_step(lab.stream(), operands, control, {.lr = 1e-2});
  });
}

TEST(CudaAdamw, StepsThatAreNotFiniteAreSkipped) {
  expect_same_on_gpu([](Lab& lab) {
    const Tensor control = lab.accumulated_wide("control", {1.0, 7, 2, 7}), grad = lab.weight("grad", {100});
    require_finite(lab.stream(), control, lab.wide("loss", {HUGE_VAL}));
    prepare_step(lab.stream(), control, 1.0);
    fill_zero(lab.stream(), control.rows(kNormSquared, 1));
    const Tensor param = lab.accumulated("param", {100}), m = lab.accumulated("m", {100}),
                 v = lab.accumulated("v", {100});
    adamw_step(lab.stream(), param, m, v, grad, control, {.lr = 1.0});
    sgd_step(lab.stream(), param, grad, control, 1.0);
  });
}

}  // namespace
}  // namespace palimpsest
