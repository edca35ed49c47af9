// The chunkwise form of the delta rule against the token recurrence in f64: lengths, chunk sizes, save levels, head
// sizes, and gates of every strength.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/random.h"
#include "tests/support/delta_rule_case.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using support::all_close;
using support::DeltaRuleCase;
using support::is_close;
using support::logit_of_gate;
using support::NamedArrays;
using support::random_delta_rule_case;
using support::run_delta_rule;
using support::token_range;

NamedArrays recurrence(DeltaRuleCase c) {
  c.options.form = DeltaForm::kRecurrence;
  return run_delta_rule(c, DType::kF64);
}

std::vector<DeltaRuleOptions> all_kinds() {
  std::vector<DeltaRuleOptions> kinds;
  for (const Decay decay : {Decay::kNone, Decay::kScalar, Decay::kVector})
    for (const DeltaRule delta : {DeltaRule::kOff, DeltaRule::kOn})
      kinds.push_back({.decay = decay, .delta_rule = delta, .scale = 0.2});
  return kinds;
}

std::string name_of_kind(const DeltaRuleOptions& options) {
  return std::string(options.delta_rule == DeltaRule::kOn ? "delta, decay " : "no delta, decay ") +
         std::to_string(static_cast<int>(options.decay));
}

void expect_finite(const NamedArrays& arrays) {
  for (const auto& [name, values] : arrays)
    for (const double value : values) ASSERT_TRUE(std::isfinite(value)) << name;
}

// The same log decay everywhere, through the softplus gate.
void set_gates(DeltaRuleCase& c, const std::function<double(int64_t)>& gate_of) {
  for (const char* name : {"A_log", "dt_bias"}) c.in[name].assign(c.in[name].size(), 0.0);
  for (size_t i = 0; i < c.in["gate_logit"].size(); ++i)
    c.in["gate_logit"][i] = logit_of_gate(gate_of(static_cast<int64_t>(i)));
}

TEST(DeltaRuleChunkwise, MatchesTheRecurrenceAtEveryLength) {
  for (const DeltaRuleOptions& kind : all_kinds()) {
    for (const int64_t T : {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 201}) {
      SCOPED_TRACE(name_of_kind(kind) + ", T = " + std::to_string(T));
      DeltaRuleCase c = random_delta_rule_case(kind, 1, 2, 20, 12, {0, T}, 3);
      const NamedArrays reference = recurrence(c);
      for (const int64_t chunk_size : {16, 32, 64}) {
        c.options.chunk_size = chunk_size;
        EXPECT_TRUE(all_close(run_delta_rule(c, DType::kF64), reference, 1e-11)) << "chunk size " << chunk_size;
        EXPECT_TRUE(all_close(run_delta_rule(c, DType::kF32), reference, 1e-5, 5e-5)) << "chunk size " << chunk_size;
      }
    }
  }
}

TEST(DeltaRuleChunkwise, SaveLevelsAgree) {
  for (const DeltaRuleOptions& kind : all_kinds()) {
    SCOPED_TRACE(name_of_kind(kind));
    DeltaRuleCase c = random_delta_rule_case(kind, 2, 4, 17, 9, {0, 30, 31, 95, 96, 170}, 5);
    for (const int64_t chunk_size : {16, 32}) {
      c.options.chunk_size = chunk_size;
      c.options.save_level = SaveLevel::kAll;
      const NamedArrays all = run_delta_rule(c, DType::kF32);
      for (const SaveLevel level : {SaveLevel::kNothing, SaveLevel::kMatrices}) {
        c.options.save_level = level;
        EXPECT_EQ(run_delta_rule(c, DType::kF32), all) << "level " << static_cast<int>(level);
      }
    }
  }
}

// Chunks are counted from each document's start: documents that end anywhere equal separate runs.
TEST(DeltaRuleChunkwise, DocumentsEqualSeparateRuns) {
  const std::vector<int64_t> offsets = {0, 181, 448, 450};
  for (const DeltaRuleOptions& kind : all_kinds()) {
    SCOPED_TRACE(name_of_kind(kind));
    const DeltaRuleCase packed = random_delta_rule_case(kind, 1, 1, 8, 6, offsets, 7);
    const NamedArrays together = run_delta_rule(packed, DType::kF64);
    for (int64_t document = 0; document < 3; ++document) {
      DeltaRuleCase alone = packed;
      alone.offsets = {0, offsets[document + 1] - offsets[document]};
      for (auto& [name, values] : alone.in) {
        if (name == "A_log" || name == "dt_bias") continue;
        values = name.find("_state") != std::string::npos
                     ? token_range(values, 3, document, document + 1)
                     : token_range(values, offsets.back(), offsets[document], offsets[document + 1]);
      }
      for (const auto& [name, values] : run_delta_rule(alone, DType::kF64)) {
        if (name == "grad.A_log" || name == "grad.dt_bias") continue;
        const bool state = name.find("_state") != std::string::npos;
        EXPECT_EQ(values,
                  state ? token_range(together.at(name), 3, document, document + 1)
                        : token_range(together.at(name), offsets.back(), offsets[document], offsets[document + 1]))
            << name;
      }
    }
  }
}

// One chunk size after the other: T tokens equal T - 1 and one step of the recurrence from the state they leave.
TEST(DeltaRuleChunkwise, PartialChunkLeavesTheStateOfTheRecurrence) {
  for (const DeltaRuleOptions& kind : all_kinds()) {
    for (const int64_t T : {1, 2, 63, 64, 65, 127, 129}) {
      SCOPED_TRACE(name_of_kind(kind) + ", T = " + std::to_string(T));
      const DeltaRuleCase c = random_delta_rule_case(kind, 1, 1, 32, 24, {0, T}, 13);
      const NamedArrays whole = run_delta_rule(c, DType::kF32);
      DeltaRuleCase before = c, last = c;
      before.offsets = {0, T - 1};
      last.offsets = {0, 1};
      last.options.form = DeltaForm::kRecurrence;
      for (const auto& [name, values] : c.in) {
        if (name == "A_log" || name == "dt_bias" || name.find("_state") != std::string::npos) continue;
        before.in[name] = token_range(values, T, 0, T - 1);
        last.in[name] = token_range(values, T, T - 1, T);
      }
      last.in["initial_state"] = run_delta_rule(before, DType::kF32).at("final_state");
      const NamedArrays step = run_delta_rule(last, DType::kF32);
      EXPECT_TRUE(is_close(step.at("final_state"), whole.at("final_state"), 1e-5));
      EXPECT_TRUE(is_close(step.at("output"), token_range(whole.at("output"), T, T - 1, T), 1e-5));
    }
  }
}

TEST(DeltaRuleChunkwise, EveryHeadSizeMatches) {
  for (const int64_t K : {1, 16, 32, 48, 64, 80, 96, 100, 112, 128, 192, 256}) {
    for (const Decay decay : {Decay::kVector, Decay::kScalar}) {
      SCOPED_TRACE(std::to_string(K) + ", decay " + std::to_string(static_cast<int>(decay)));
      const int64_t V = K == 64 ? 512 : K / 2 + 3;
      // A single channel would only have its sign left after the norm.
      const DeltaRuleOptions options = {.decay = decay, .l2norm_qk = K > 1, .scale = std::pow(K, -0.5)};
      const DeltaRuleCase c = random_delta_rule_case(options, 1, 1, K, V, {0, 70}, 17);
      EXPECT_TRUE(all_close(run_delta_rule(c, DType::kF32), recurrence(c), 1e-5, 5e-5));
    }
  }
}

TEST(DeltaRuleChunkwise, GatesOfAnyStrength) {
  for (const Decay decay : {Decay::kVector, Decay::kScalar}) {
    for (const double gate : {-1e-4, -5.0, -5.4, -5.6, -10.0, -30.0, -80.0, -1000.0}) {
      SCOPED_TRACE("gate " + std::to_string(gate) + ", decay " + std::to_string(static_cast<int>(decay)));
      const DeltaRuleOptions options = {.decay = decay, .scale = 0.125};
      DeltaRuleCase c = random_delta_rule_case(options, 1, 2, 64, 32, {0, 129}, 19);
      set_gates(c, [&](int64_t) { return gate; });
      const NamedArrays reference = recurrence(c), got = run_delta_rule(c, DType::kF32);
      expect_finite(got);
      EXPECT_TRUE(all_close(got, reference, 1e-5, 5e-5));
      if (gate > -30.0) continue;
      // All that is read is what the token wrote: scale * beta (q . k) v.
      std::vector<double> written;
      for (int64_t t = 0; t < 129; ++t) {
        double qk = 0, qq = 0, kk = 0;
        for (int64_t i = 0; i < c.K; ++i) {
          const double q = c.in["q"][t * c.K + i], k = c.in["k"][t * c.K + i];
          qk += q * k, qq += q * q, kk += k * k;
        }
        qk /= std::sqrt(qq + 1e-6) * std::sqrt(kk + 1e-6);
        for (int64_t head = 0; head < c.HV; ++head)
          for (int64_t j = 0; j < c.V; ++j)
            written.push_back(0.125 / (1 + std::exp(-c.in["beta_logit"][t * c.HV + head])) * qk *
                              c.in["v"][(t * c.HV + head) * c.V + j]);
      }
      EXPECT_TRUE(is_close(got.at("output"), written, 1e-6));
    }
  }
}

TEST(DeltaRuleChunkwise, CompleteForgettingAmongGatesNearZero) {
  for (const Decay decay : {Decay::kVector, Decay::kScalar}) {
    DeltaRuleCase c = random_delta_rule_case({.decay = decay, .scale = 0.125}, 1, 1, 64, 32, {0, 256}, 23);
    set_gates(c, [&](int64_t i) { return random_uniform(7, 1, static_cast<uint64_t>(i)) < 0.01 ? -1000.0 : -1e-3; });
    const NamedArrays got = run_delta_rule(c, DType::kF32);
    expect_finite(got);
    EXPECT_TRUE(all_close(got, recurrence(c), 1e-5, 5e-5));
  }
}

TEST(DeltaRuleChunkwise, OneStrongGateAtEveryBorder) {
  for (const Decay decay : {Decay::kVector, Decay::kScalar}) {
    for (const int64_t position : {0, 15, 16, 31, 32, 63, 64, 127}) {
      SCOPED_TRACE(position);
      DeltaRuleCase c = random_delta_rule_case({.decay = decay, .scale = 0.25}, 1, 1, 16, 8, {0, 128}, 29);
      const int64_t channels = decay == Decay::kVector ? 16 : 1;
      set_gates(c, [&](int64_t i) { return i / channels == position ? -1000.0 : -0.01; });
      const NamedArrays got = run_delta_rule(c, DType::kF32);
      expect_finite(got);
      EXPECT_TRUE(all_close(got, recurrence(c), 1e-5, 5e-5));
    }
  }
}

// Half the channels at the bound and half near 0, over many chunks.
TEST(DeltaRuleChunkwise, MixedStrongAndWeakChannels) {
  DeltaRuleCase c = random_delta_rule_case({.gate = Gate::kBounded, .scale = 0.125}, 1, 2, 64, 64, {0, 1024}, 31);
  for (size_t i = 0; i < c.in["gate_logit"].size(); ++i) c.in["gate_logit"][i] += i % 2 == 0 ? 12.0 : -12.0;
  const NamedArrays got = run_delta_rule(c, DType::kF32);
  expect_finite(got);
  EXPECT_TRUE(all_close(got, recurrence(c), 2e-5, 1e-4));
}

// Softplus gates with rates from 1 to 16, as models make them, and logits that drive sums of g to thousands.
TEST(DeltaRuleChunkwise, StrongSoftplusGates) {
  for (const Decay decay : {Decay::kVector, Decay::kScalar}) {
    for (const double spread : {1.0, 25.0}) {
      SCOPED_TRACE(spread);
      DeltaRuleCase c = random_delta_rule_case({.decay = decay, .scale = 0.2}, 1, 4, 24, 16, {0, 200}, 37);
      c.in["A_log"] = {0.0, std::log(2.0), std::log(8.0), std::log(16.0)};
      for (double& value : c.in["gate_logit"]) value *= spread;
      const NamedArrays got = run_delta_rule(c, DType::kF32);
      expect_finite(got);
      EXPECT_TRUE(all_close(got, recurrence(c), 1e-5, 5e-5));
    }
  }
}

// A gate of exactly 0 is no gate.
TEST(DeltaRuleChunkwise, ZeroGateEqualsNoGate) {
  for (const Decay decay : {Decay::kVector, Decay::kScalar}) {
    for (const int64_t T : {7, 50, 64, 65, 500}) {
      SCOPED_TRACE(T);
      DeltaRuleCase gated = random_delta_rule_case({.decay = decay, .scale = 0.25}, 1, 2, 16, 8, {0, T}, 41);
      gated.in["gate_logit"].assign(gated.in["gate_logit"].size(), -1000.0);
      DeltaRuleCase ungated = gated;
      ungated.options.decay = Decay::kNone;
      for (const char* name : {"gate_logit", "A_log", "dt_bias"}) ungated.in.erase(name);
      EXPECT_TRUE(all_close(run_delta_rule(gated, DType::kF32), run_delta_rule(ungated, DType::kF32), 1e-6));
      // dg itself, through a gate that is 0 to rounding but has a slope.
      set_gates(gated, [](int64_t) { return -1e-9; });
      EXPECT_TRUE(is_close(run_delta_rule(gated, DType::kF32).at("grad.gate_logit"),
                           recurrence(gated).at("grad.gate_logit"), 1e-5));
    }
  }
}

TEST(DeltaRuleChunkwise, ErrorDoesNotGrowWithLength) {
  double shortest = 0;
  for (const int64_t T : {512, 2048, 8192}) {
    DeltaRuleCase c = random_delta_rule_case({.decay = Decay::kScalar, .scale = 0.2}, 1, 1, 24, 16, {0, T}, 43);
    c.in.erase("initial_state");
    set_gates(c, [](int64_t) { return -0.01; });
    const double error =
        support::relative_error(run_delta_rule(c, DType::kF32).at("output"), recurrence(c).at("output"));
    if (shortest == 0) shortest = error;
    EXPECT_LT(error, 1e-5);
    EXPECT_LT(error, 2 * shortest);
  }
}

// Extremes of the write: repeated keys, which make the chunk's triangular system as bad as it gets, beta 0 and 2.
TEST(DeltaRuleChunkwise, RepeatedKeysAndExtremeBetas) {
  for (const double logit : {-200.0, -30.0, 0.0, 30.0}) {
    for (const double beta_scale : {1.0, 2.0}) {
      SCOPED_TRACE("beta logit " + std::to_string(logit) + ", scale " + std::to_string(beta_scale));
      DeltaRuleCase c = random_delta_rule_case({.beta_scale = beta_scale, .scale = 0.25}, 1, 1, 16, 8, {0, 130}, 47);
      for (int64_t i = 0; i < 130 * 16; ++i) c.in["k"][i] = c.in["k"][i % 16];
      for (size_t i = 0; i < c.in["beta_logit"].size(); i += 2) c.in["beta_logit"][i] = logit;
      set_gates(c, [](int64_t) { return -1e-3; });
      const NamedArrays got = run_delta_rule(c, DType::kF32);
      expect_finite(got);
      EXPECT_TRUE(all_close(got, recurrence(c), 3e-5, 2e-4));
    }
  }
}

TEST(DeltaRuleChunkwise, KeysThatAreNotNormalised) {
  DeltaRuleCase c = random_delta_rule_case({.l2norm_qk = false, .scale = 0.25}, 1, 1, 16, 8, {0, 201}, 53);
  for (double& value : c.in["k"]) value *= 0.1;
  EXPECT_TRUE(all_close(run_delta_rule(c, DType::kF32), recurrence(c), 1e-5, 5e-5));
}

}  // namespace
}  // namespace palimpsest
