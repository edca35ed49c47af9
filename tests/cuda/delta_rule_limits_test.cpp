// What other implementations of the delta rule got wrong, on a GPU against the CPU in f64: every head size, gates of
// any strength wherever they stand, lengths, magnitudes, rows of zeros, and what else is in the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/cuda/lab.h"
#include "tests/support/delta_rule_case.h"

namespace palimpsest {
namespace {

using namespace support;

struct Heads {
  int64_t H, HV, K, V;
};

// Numbers that bf16 holds exactly.
void round_inputs(DeltaRuleCase& c) {
  for (auto& [name, values] : c.in)
    for (double& value : values) value = to_float(to_bf16(static_cast<float>(value)));
}

DeltaRuleCase make_case(const DeltaRuleOptions& options, const Heads& heads, const std::vector<int64_t>& offsets) {
  DeltaRuleCase c = random_delta_rule_case(options, heads.H, heads.HV, heads.K, heads.V, offsets, 11);
  round_inputs(c);
  return c;
}

// Every head's decay: exp(g) at all tokens.
void set_gate(DeltaRuleCase& c, double g) {
  std::fill(c.in.at("A_log").begin(), c.in.at("A_log").end(), 0.0);
  std::fill(c.in.at("dt_bias").begin(), c.in.at("dt_bias").end(), 0.0);
  std::fill(c.in.at("gate_logit").begin(), c.in.at("gate_logit").end(), logit_of_gate(g));
  round_inputs(c);
}

NamedArrays on_gpu(const DeltaRuleCase& c, DType dtype) {
  return run_delta_rule(c, dtype, RowSpacing::kNone, Device::kCuda);
}

struct Limits {
  double f32 = 1e-4, bf16 = 2e-2, bf16_parameters = 5e-2;
};

void expect_close(const DeltaRuleCase& c, const Limits& limits = {}) {
  const NamedArrays reference = run_delta_rule(c, DType::kF64);
  EXPECT_TRUE(all_close(on_gpu(c, DType::kF32), reference, limits.f32)) << "f32";
  EXPECT_TRUE(all_close(on_gpu(c, DType::kBF16), reference, limits.bf16, limits.bf16_parameters)) << "bf16";
}

constexpr Decay kDecays[] = {Decay::kScalar, Decay::kVector};

TEST(CudaDeltaRuleLimits, EveryHeadSizeAndGroupMatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  int64_t i = 0;
  for (const int64_t D : {32, 48, 64, 80, 96, 100, 112, 128, 192, 256})
    for (const int64_t T : {64, 200}) {
      constexpr int64_t kGroups[] = {1, 2, 3, 4, 8};
      SCOPED_TRACE(::testing::Message() << "heads of " << D << ", " << T << " tokens");
      expect_close(make_case({.decay = kDecays[i % 2], .scale = 1 / std::sqrt(static_cast<double>(D))},
                             {1, kGroups[i % 5], D, D}, {0, T}));
      ++i;
    }
}

// Shapes of several chunks, heads and documents at once.
TEST(CudaDeltaRuleLimits, ManyChunksAndHeadsMatchTheCpu) {
  SKIP_WITHOUT_GPU();
  for (const Decay decay : kDecays) {
    expect_close(make_case({.decay = decay, .scale = 0.125}, {16, 16, 64, 64}, {0, 1024, 2048}));
    expect_close(make_case({.decay = decay, .scale = 0.125}, {1, 1, 64, 64}, {0, 1}));
    expect_close(make_case({.decay = decay, .scale = 0.09}, {5, 5, 128, 128}, {0, 65, 130, 195}));
    expect_close(make_case({.decay = decay, .scale = 0.125}, {1, 2, 64, 64}, {0, 781, 2048}));
  }
}

TEST(CudaDeltaRuleLimits, ChunkSizesAgree) {
  SKIP_WITHOUT_GPU();
  for (const int64_t T : {64, 128, 256}) {
    std::vector<NamedArrays> results;
    for (const int64_t chunk_size : {16, 32, 64})
      results.push_back(
          on_gpu(make_case({.decay = Decay::kNone, .scale = 0.125, .chunk_size = chunk_size}, {2, 2, 64, 64}, {0, T}),
                 DType::kF32));
    EXPECT_TRUE(all_close(results[0], results[2], 1e-4)) << T;
    EXPECT_TRUE(all_close(results[1], results[2], 1e-4)) << T;
  }
}

TEST(CudaDeltaRuleLimits, GatesOfAnyStrengthMatchTheCpu) {
  SKIP_WITHOUT_GPU();
  for (const Decay decay : kDecays)
    for (const double g : {-1e-30, -5.0, -5.6, -30.0, -80.0, -1000.0}) {
      SCOPED_TRACE(::testing::Message() << "log decay " << g);
      DeltaRuleCase c = make_case({.decay = decay, .scale = 0.09}, {1, 2, 128, 64}, {0, 129});
      set_gate(c, g);
      // Gradients of a gate at its end, and of a state that is forgotten, vanish beside their rounding.
      const NamedArrays reference = run_delta_rule(c, DType::kF64);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const NamedArrays got = on_gpu(c, dtype);
        std::vector<std::string> compared = {"output", "final_state", "grad.q", "grad.k", "grad.v", "grad.beta_logit"};
        if (g > -1) compared.emplace_back("grad.initial_state");
        for (const std::string& name : compared)
          EXPECT_TRUE(is_close(got.at(name), reference.at(name), dtype == DType::kF32 ? 1e-4 : 2e-2)) << name;
        for (const auto& [name, values] : got)
          EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); })) << name;
      }
    }
}

// At the edges of chunks and of what is computed at once within them.
TEST(CudaDeltaRuleLimits, OneTokenThatForgetsAllMatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  for (const Decay decay : kDecays)
    for (const int64_t position : {0, 15, 16, 31, 63, 64}) {
      SCOPED_TRACE(position);
      DeltaRuleCase c = make_case({.decay = decay, .scale = 0.125}, {1, 1, 64, 64}, {0, 128});
      set_gate(c, -0.01);
      const int64_t channels = decay == Decay::kVector ? c.K : 1;
      std::vector<double>& logits = c.in.at("gate_logit");
      std::fill_n(logits.begin() + position * channels, channels, 1000.0);
      expect_close(c);
    }
}

TEST(CudaDeltaRuleLimits, ErrorsDoNotGrowWithLength) {
  SKIP_WITHOUT_GPU();
  double shortest = 0;
  for (const int64_t T : {512, 2048, 8192, 20468}) {
    DeltaRuleCase c = make_case({.decay = Decay::kScalar, .scale = 0.125}, {1, 2, 64, 64}, {0, T});
    set_gate(c, -0.01);
    c.in.erase("initial_state");
    const double error =
        relative_error(on_gpu(c, DType::kBF16).at("output"), run_delta_rule(c, DType::kF64).at("output"));
    if (T == 512) shortest = error;
    EXPECT_LE(error, 1e-2) << T;
    EXPECT_LE(error, 2 * shortest) << T;
  }
}

TEST(CudaDeltaRuleLimits, OutputsAreLinearInValues) {
  SKIP_WITHOUT_GPU();
  for (const Decay decay : kDecays) {
    DeltaRuleCase c = make_case({.decay = decay, .scale = 0.125}, {2, 2, 64, 64}, {0, 512});
    for (const char* name : {"initial_state", "grad_final_state"}) c.in.erase(name);
    const std::vector<double> values = c.in.at("v"), outputs = run_delta_rule(c, DType::kF64).at("output");
    for (const double factor : {1e4, 1e-4})
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        std::vector<double> expected = outputs;
        for (double& output : expected) output *= factor;
        for (size_t i = 0; i < values.size(); ++i) c.in.at("v")[i] = factor * values[i];
        EXPECT_TRUE(is_close(on_gpu(c, dtype).at("output"), expected, 1e-2)) << factor;
      }
  }
}

TEST(CudaDeltaRuleLimits, RowsOfZerosAreSafe) {
  SKIP_WITHOUT_GPU();
  for (const Decay decay : kDecays) {
    DeltaRuleCase c = make_case({.decay = decay, .scale = 0.125}, {1, 1, 64, 64}, {0, 100});
    for (const char* name : {"q", "k"}) std::fill_n(c.in.at(name).begin(), 64 * 64, 0.0);  // of 64 tokens
    for (const char* name : {"grad_output", "grad_final_state"})
      std::fill(c.in.at(name).begin(), c.in.at(name).end(), 0.0);
    for (const DType dtype : {DType::kF32, DType::kBF16})
      for (const auto& [name, values] : on_gpu(c, dtype)) {
        const bool is_gradient = name.starts_with("grad.");
        EXPECT_TRUE(std::all_of(values.begin(), values.end(), [&](double x) {
          return is_gradient ? x == 0.0 : std::isfinite(x);
        })) << name;
      }
  }
}

// The same document alone and eight times over.
TEST(CudaDeltaRuleLimits, ADocumentDoesNotDependOnTheBatch) {
  SKIP_WITHOUT_GPU();
  constexpr int64_t kTokens = 200, kCopies = 8;
  for (const Decay decay : kDecays) {
    const DeltaRuleOptions options = {.decay = decay, .scale = 0.125};
    const DeltaRuleCase one = make_case(options, {1, 2, 64, 64}, {0, kTokens});
    std::vector<int64_t> offsets = {0};
    for (int64_t i = 1; i <= kCopies; ++i) offsets.push_back(i * kTokens);
    DeltaRuleCase many = one;
    many.offsets = offsets;
    const auto is_parameter = [](const std::string& name) {
      return name.ends_with("A_log") || name.ends_with("dt_bias");
    };
    for (auto& [name, values] : many.in) {
      if (is_parameter(name)) continue;
      values.clear();
      for (int64_t i = 0; i < kCopies; ++i) values.insert(values.end(), one.in.at(name).begin(), one.in.at(name).end());
    }
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const NamedArrays alone = on_gpu(one, dtype), together = on_gpu(many, dtype);
      for (const auto& [name, values] : alone) {
        const std::vector<double>& all = together.at(name);
        if (is_parameter(name)) continue;
        for (int64_t i = 0; i < kCopies; ++i)
          EXPECT_TRUE(std::equal(values.begin(), values.end(), all.begin() + i * static_cast<int64_t>(values.size())))
              << name << " of copy " << i;
      }
    }
  }
}

}  // namespace
}  // namespace palimpsest
