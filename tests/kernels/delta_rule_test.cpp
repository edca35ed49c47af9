// What the delta rule computes and what it leaves alone, in every form.
#include "kernels/delta_rule.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "tests/support/delta_rule_case.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using support::all_close;
using support::DeltaRuleCase;
using support::is_close;
using support::logit_of_gate;
using support::NamedArrays;
using support::plain_delta_rule;
using support::random_delta_rule_case;
using support::RowSpacing;
using support::run_delta_rule;
using support::token_range;

// The kinds of the family, with two gates and two ranges of beta among them.
struct Kind {
  const char* name;
  DeltaRuleOptions options;
};

std::vector<Kind> all_kinds() {
  return {
      {"kda", {.decay = Decay::kVector, .scale = 0.3}},
      {"kda_bounded", {.decay = Decay::kVector, .gate = Gate::kBounded, .beta_scale = 2.0, .scale = 0.3}},
      {"gdn", {.decay = Decay::kScalar, .beta_scale = 2.0, .scale = 0.3}},
      {"gdn_bounded", {.decay = Decay::kScalar, .gate = Gate::kBounded, .gate_lower_bound = -2.0, .scale = 0.3}},
      {"deltanet", {.decay = Decay::kNone, .beta_scale = 2.0, .scale = 0.3}},
      {"gla", {.decay = Decay::kVector, .delta_rule = DeltaRule::kOff, .l2norm_qk = false, .scale = 0.3}},
      {"mamba2", {.decay = Decay::kScalar, .delta_rule = DeltaRule::kOff, .l2norm_qk = false, .scale = 0.3}},
      {"retnet",
       {.decay = Decay::kScalar,
        .delta_rule = DeltaRule::kOff,
        .gate = Gate::kFixed,
        .l2norm_qk = false,
        .scale = 0.3}},
      {"linear", {.decay = Decay::kNone, .delta_rule = DeltaRule::kOff, .l2norm_qk = false, .scale = 0.3}},
  };
}

std::vector<DeltaForm> both_forms() {
  return {DeltaForm::kRecurrence, DeltaForm::kChunkwise};
}

// Calls body(case) for every kind and form.
template <class Body>
void for_every_kind_and_form(int64_t H, int64_t HV, int64_t K, int64_t V, const std::vector<int64_t>& offsets,
                             Body body) {
  for (const Kind& kind : all_kinds()) {
    for (const DeltaForm form : both_forms()) {
      SCOPED_TRACE(std::string(kind.name) + (form == DeltaForm::kRecurrence ? ", recurrence" : ", chunkwise"));
      DeltaRuleOptions options = kind.options;
      options.form = form;
      options.chunk_size = 16;
      body(random_delta_rule_case(options, H, HV, K, V, offsets, 11));
    }
  }
}

TEST(DeltaRule, MatchesAPlainLoop) {
  for_every_kind_and_form(3, 6, 32, 48, {0, 67, 134}, [](const DeltaRuleCase& c) {
    const NamedArrays plain = plain_delta_rule(c);
    EXPECT_TRUE(all_close(run_delta_rule(c, DType::kF64, RowSpacing::kGaps), plain, 1e-12));
    EXPECT_TRUE(all_close(run_delta_rule(c, DType::kF32), plain, 5e-6));
  });
}

TEST(DeltaRule, ComparisonNoticesADeliberateFault) {
  for_every_kind_and_form(1, 2, 5, 7, {0, 37}, [](const DeltaRuleCase& c) {
    const NamedArrays reference = run_delta_rule(c, DType::kF64);
    for (const auto& [name, values] : c.in) {
      if (name == "grad_output" || name == "grad_final_state") continue;
      DeltaRuleCase faulty = c;
      for (double& value : faulty.in[name]) value = -value;  // a sign flipped
      EXPECT_FALSE(is_close(run_delta_rule(faulty, DType::kF64).at("output"), reference.at("output"), 1e-3)) << name;
    }
  });
}

// S = 4, gate 0.5, beta 0.5, k = v = 1: decayed to 2, error 1 - 2, written 2 - 0.5. Error before decay would give 0.5.
TEST(DeltaRule, DecaysThenMeasuresTheErrorThenWritesThenReads) {
  for (const Decay decay : {Decay::kScalar, Decay::kVector}) {
    for (const DeltaForm form : both_forms()) {
      const DeltaRuleCase c = {.options = {.decay = decay, .l2norm_qk = false, .scale = 3.0, .form = form},
                               .offsets = {0, 1},
                               .in = {{"q", {2}},
                                      {"k", {1}},
                                      {"v", {1}},
                                      {"beta_logit", {0}},
                                      {"gate_logit", {logit_of_gate(std::log(0.5))}},
                                      {"A_log", {0}},
                                      {"dt_bias", {0}},
                                      {"initial_state", {4}},
                                      {"grad_output", {1}}}};
      const NamedArrays result = run_delta_rule(c, DType::kF64);
      EXPECT_NEAR(result.at("final_state")[0], 1.5, 1e-12);
      EXPECT_NEAR(result.at("output")[0], 3.0 * 1.5 * 2, 1e-12);
    }
  }
}

TEST(DeltaRule, GroupedValueHeadsEqualRepeatedKeys) {
  for (const int64_t ratio : {1, 2, 3, 4, 8}) {
    SCOPED_TRACE(ratio);
    const int64_t H = 2, HV = H * ratio, K = 8, N = 41;
    for_every_kind_and_form(H, HV, K, 5, {0, 20, N}, [&](const DeltaRuleCase& grouped) {
      DeltaRuleCase repeated = grouped;
      repeated.H = HV;
      for (const char* name : {"q", "k"}) {
        repeated.in[name].clear();
        for (int64_t t = 0; t < N; ++t)
          for (int64_t head = 0; head < HV; ++head)
            for (int64_t i = 0; i < K; ++i)
              repeated.in[name].push_back(grouped.in.at(name)[(t * H + head / ratio) * K + i]);
      }
      NamedArrays expected = run_delta_rule(repeated, DType::kF64);
      for (const char* name : {"grad.q", "grad.k"}) {
        std::vector<double> sums(grouped.in.at("q").size(), 0.0);
        for (int64_t t = 0; t < N; ++t)
          for (int64_t head = 0; head < HV; ++head)
            for (int64_t i = 0; i < K; ++i)
              sums[(t * H + head / ratio) * K + i] += expected[name][(t * HV + head) * K + i];
        expected[name] = sums;
      }
      EXPECT_TRUE(all_close(run_delta_rule(grouped, DType::kF64), expected, 1e-13));
      EXPECT_TRUE(all_close(run_delta_rule(grouped, DType::kF32), expected, 1e-5));
    });
  }
}

// Gradients of the tokens and the states, without the sums over tokens.
NamedArrays per_token(NamedArrays arrays) {
  for (const char* sum : {"grad.A_log", "grad.dt_bias"}) arrays.erase(sum);
  return arrays;
}

TEST(DeltaRule, DocumentsDoNotTouchEachOther) {
  const std::vector<int64_t> offsets = {0, 37, 38, 102, 232};
  for_every_kind_and_form(2, 2, 9, 6, offsets, [&](const DeltaRuleCase& c) {
    const NamedArrays before = run_delta_rule(c, DType::kF32);
    DeltaRuleCase changed = c;
    for (auto& [name, values] : changed.in) {
      const int64_t parts = name.find("_state") != std::string::npos ? 4 : 232;
      if (name == "A_log" || name == "dt_bias") continue;
      const int64_t begin = parts == 4 ? 1 : offsets[1], end = parts == 4 ? 2 : offsets[2];
      const int64_t row = static_cast<int64_t>(values.size()) / parts;
      for (int64_t i = begin * row; i < end * row; ++i) values[i] = 3.0 - values[i];
    }
    const NamedArrays after = run_delta_rule(changed, DType::kF32);
    for (const auto& [name, values] : per_token(before)) {
      const bool state = name.find("_state") != std::string::npos;
      const int64_t parts = state ? 4 : 232;
      EXPECT_EQ(token_range(values, parts, 0, state ? 1 : offsets[1]),
                token_range(after.at(name), parts, 0, state ? 1 : offsets[1]))
          << name;
      EXPECT_EQ(token_range(values, parts, state ? 2 : offsets[2], parts),
                token_range(after.at(name), parts, state ? 2 : offsets[2], parts))
          << name;
      EXPECT_NE(values, after.at(name)) << name;
    }
  });
}

TEST(DeltaRule, EmptyDocumentsAreHarmless) {
  for_every_kind_and_form(1, 2, 6, 5, {0, 5, 70}, [&](const DeltaRuleCase& c) {
    const NamedArrays expected = run_delta_rule(c, DType::kF64);
    const int64_t state = c.HV * c.K * c.V;
    DeltaRuleCase spread = c;
    spread.offsets = {0, 0, 5, 5, 70, 70};
    for (const char* name : {"initial_state", "grad_final_state"}) {
      std::vector<double>& values = spread.in[name];
      values.assign(5 * state, 0.25);
      std::copy_n(c.in.at(name).begin(), state, values.begin() + state);
      std::copy_n(c.in.at(name).begin() + state, state, values.begin() + 3 * state);
    }
    const NamedArrays got = run_delta_rule(spread, DType::kF64);
    for (const auto& [name, values] : expected) {
      if (name.find("_state") == std::string::npos) {
        EXPECT_EQ(got.at(name), values) << name;
        continue;
      }
      // The final state of an empty document is its initial state, and the gradient passes through.
      const std::vector<double> quarter(static_cast<size_t>(state), 0.25);
      for (const int64_t empty : {0, 2, 4}) EXPECT_EQ(token_range(got.at(name), 5, empty, empty + 1), quarter) << name;
      EXPECT_EQ(token_range(got.at(name), 5, 1, 2), token_range(values, 2, 0, 1)) << name;
      EXPECT_EQ(token_range(got.at(name), 5, 3, 4), token_range(values, 2, 1, 2)) << name;
    }
  });
  for_every_kind_and_form(1, 1, 3, 2, {0, 0, 0}, [&](const DeltaRuleCase& c) {
    const NamedArrays got = run_delta_rule(c, DType::kF64);
    EXPECT_EQ(got.at("final_state"), c.in.at("initial_state"));
    EXPECT_EQ(got.at("grad.initial_state"), c.in.at("grad_final_state"));
  });
}

TEST(DeltaRule, ResultOfASequenceDoesNotDependOnItsBatch) {
  const int64_t T = 67, B = 8;
  for_every_kind_and_form(1, 2, 10, 6, {0, T}, [&](const DeltaRuleCase& single) {
    const NamedArrays alone = run_delta_rule(single, DType::kF32);
    DeltaRuleCase batch = single;
    batch.offsets.clear();
    for (int64_t b = 0; b <= B; ++b) batch.offsets.push_back(b * T);
    for (auto& [name, values] : batch.in) {
      if (name == "A_log" || name == "dt_bias") continue;
      const std::vector<double> row = values;
      for (int64_t b = 1; b < B; ++b) values.insert(values.end(), row.begin(), row.end());
    }
    const NamedArrays together = run_delta_rule(batch, DType::kF32);
    for (const auto& [name, values] : per_token(alone))
      for (int64_t b = 0; b < B; ++b) EXPECT_EQ(token_range(together.at(name), B, b, b + 1), values) << name;
    if (single.in.count("A_log") == 0) return;
    for (const char* name : {"grad.A_log", "grad.dt_bias"}) {
      std::vector<double> eightfold = alone.at(name);
      for (double& value : eightfold) value *= static_cast<double>(B);
      EXPECT_TRUE(is_close(together.at(name), eightfold, 1e-6)) << name;
    }
  });
}

TEST(DeltaRule, ResultsDoNotDependOnTheNumberOfThreads) {
  const int threads = omp_get_max_threads();
  for_every_kind_and_form(2, 4, 32, 28, {0, 33, 50, 121}, [&](const DeltaRuleCase& c) {
    omp_set_num_threads(1);
    const NamedArrays one = run_delta_rule(c, DType::kF32);
    omp_set_num_threads(3);
    EXPECT_EQ(run_delta_rule(c, DType::kF32), one);
  });
  omp_set_num_threads(threads);
}

// Inputs at token t change nothing before t, nor the gradients of a loss on tokens before t: bit for bit.
TEST(DeltaRule, IsCausal) {
  const int64_t N = 50, t = 29;
  for_every_kind_and_form(1, 1, 8, 6, {0, N}, [&](DeltaRuleCase c) {
    c.in["grad_final_state"].assign(c.in["grad_final_state"].size(), 0.0);
    std::fill(c.in["grad_output"].begin() + t * c.V, c.in["grad_output"].end(), 0.0);
    const NamedArrays before = run_delta_rule(c, DType::kF32);
    for (const char* name : {"q", "k", "v", "beta_logit", "gate_logit"}) {
      if (c.in.count(name) == 0) continue;
      DeltaRuleCase changed = c;
      const int64_t row = static_cast<int64_t>(c.in[name].size()) / N;
      for (int64_t i = t * row; i < N * row; ++i) changed.in[name][i] += 5.0;
      const NamedArrays after = run_delta_rule(changed, DType::kF32);
      EXPECT_NE(after.at("output"), before.at("output")) << name;
      for (const auto& [result, values] : before) {
        if (result == "final_state" || result == "output") continue;
        EXPECT_EQ(after.at(result), values) << result << " after a change of " << name;
      }
      EXPECT_EQ(token_range(after.at("output"), N, 0, t), token_range(before.at("output"), N, 0, t)) << name;
    }
  });
}

TEST(DeltaRule, IsLinearInVOverEightDecades) {
  for_every_kind_and_form(1, 1, 32, 16, {0, 512}, [&](DeltaRuleCase c) {
    c.in["initial_state"].assign(c.in["initial_state"].size(), 0.0);
    const NamedArrays reference = run_delta_rule(c, DType::kF32);
    for (const double factor : {1e4, 1e-4}) {
      DeltaRuleCase scaled = c;
      for (double& value : scaled.in["v"]) value *= factor;
      NamedArrays result = run_delta_rule(scaled, DType::kF32);
      for (double& value : result["output"]) value /= factor;
      EXPECT_TRUE(is_close(result["output"], reference.at("output"), 1e-5)) << factor;
    }
  });
}

TEST(DeltaRule, ZeroKeysAndQueriesAreSafe) {
  for_every_kind_and_form(1, 2, 8, 6, {0, 40}, [&](DeltaRuleCase c) {
    for (const char* name : {"q", "k"})
      for (int64_t i = 0; i < 10 * c.K; ++i) c.in[name][i] = 0;
    const NamedArrays plain = plain_delta_rule(c);
    EXPECT_TRUE(all_close(run_delta_rule(c, DType::kF32), plain, 5e-6));
    for (const auto& [name, values] : run_delta_rule(c, DType::kF32))
      for (const double value : values) ASSERT_TRUE(std::isfinite(value)) << name;
    for (auto& [name, values] : c.in)
      if (name.rfind("grad_", 0) == 0) values.assign(values.size(), 0.0);
    for (const auto& [name, values] : run_delta_rule(c, DType::kF32)) {
      if (name.rfind("grad.", 0) != 0) continue;
      for (const double value : values) ASSERT_EQ(value, 0.0) << name << ": zero in, not zero out";
    }
  });
}

TEST(DeltaRule, FirstTokenOfADocumentFromZeroStateHasZeroGateGradient) {
  for_every_kind_and_form(2, 2, 8, 6, {0, 1, 40, 60}, [&](DeltaRuleCase c) {
    if (c.in.count("gate_logit") == 0) return;
    c.in.erase("initial_state");
    const std::vector<double> gradient = run_delta_rule(c, DType::kF32).at("grad.gate_logit");
    for (const int64_t first : {0, 1, 40})
      for (const double value : token_range(gradient, 60, first, first + 1)) EXPECT_EQ(value, 0.0);
    for (const double value : token_range(gradient, 60, 2, 3)) EXPECT_NE(value, 0.0);
  });
}

TEST(DeltaRule, AbsentStatesAreZeros) {
  for_every_kind_and_form(1, 2, 5, 4, {0, 20, 53}, [&](const DeltaRuleCase& c) {
    DeltaRuleCase zeros = c, absent = c;
    for (const char* name : {"initial_state", "grad_final_state"}) {
      zeros.in[name].assign(c.in.at(name).size(), 0.0);
      absent.in.erase(name);
    }
    NamedArrays expected = run_delta_rule(zeros, DType::kF64);
    expected.erase("grad.initial_state");
    EXPECT_EQ(run_delta_rule(absent, DType::kF64), expected);
  });
}

TEST(DeltaRule, AddsToTheGradientsOfGateParametersAndOverwritesTheRest) {
  const DeltaRuleCase c = random_delta_rule_case({.scale = 0.5}, 1, 2, 4, 3, {0, 9}, 5);
  const NamedArrays once = run_delta_rule(c, DType::kF64);
  std::map<std::string, support::OwnedTensor> tensors;
  const auto tensor = [&](const std::string& name) -> const Tensor& {
    return tensors.emplace(name, support::OwnedTensor(DType::kF64, c.shape_of(name))).first->second;
  };
  const auto input = [&](const std::string& name) {
    support::set_values(tensor(name), c.in.at(name));
    return tensors.at(name).tensor();
  };
  DeltaRuleInputs in = support::delta_rule_inputs(input);
  in.initial_state = input("initial_state");
  const DeltaRuleGrads grads = {.dq = tensor("grad.q"),
                                .dk = tensor("grad.k"),
                                .dv = tensor("grad.v"),
                                .dbeta_logit = tensor("grad.beta_logit"),
                                .dgate_logit = tensor("grad.gate_logit"),
                                .dA_log = tensor("grad.A_log"),
                                .ddt_bias = tensor("grad.dt_bias"),
                                .d_initial_state = tensor("grad.initial_state")};
  support::fill(grads.dA_log, 100);
  support::fill(grads.ddt_bias, 100);
  const Documents documents(c.offsets);
  Arena activations("activations", Device::kCpu, 1 << 20);
  const DeltaRuleSaved saved =
      allocate_delta_rule_saved(activations, DType::kF64, delta_rule_shape(in, documents), c.options);
  support::CpuStream stream;
  delta_rule_forward(stream, {.o = tensor("output")}, saved, in, c.options, documents);
  for (int repeat = 0; repeat < 2; ++repeat)
    delta_rule_backward(stream, grads, input("grad_output"), input("grad_final_state"), saved, in, c.options,
                        documents);
  for (const auto& [name, values] : once) {
    if (name == "final_state") continue;
    std::vector<double> expected = values;
    if (name == "grad.A_log" || name == "grad.dt_bias")
      for (double& value : expected) value = 100 + 2 * value;
    EXPECT_TRUE(is_close(tensors.at(name).tensor(), expected, 1e-14)) << name;
  }
}

TEST(DeltaRule, KeepsTheStatesOfAllChunksButTheFirst) {
  Arena arena = Arena::planning("activations", Device::kCpu);
  const auto slots = [&](int64_t N, int64_t chunk_size) {
    return allocate_delta_rule_saved(arena, DType::kF32, {.N = N, .H = 1, .HV = 2, .K = 3, .V = 5, .num_states = 1},
                                     {.chunk_size = chunk_size})
        .states.dim(0);
  };
  EXPECT_EQ(slots(1, 16), 0);
  EXPECT_EQ(slots(16, 16), 0);
  EXPECT_EQ(slots(17, 16), 1);
  EXPECT_EQ(slots(2048, 64), 31);
  const DeltaRuleSaved nothing =
      allocate_delta_rule_saved(arena, DType::kF32, {.N = 9, .H = 1, .HV = 1, .K = 3, .V = 5, .num_states = 1},
                                {.save_level = SaveLevel::kNothing});
  EXPECT_FALSE(nothing.m.defined() || nothing.aqk.defined() || nothing.x.defined() || nothing.states.defined());
}

template <class Call>
std::string user_error_of(Call call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  return "(no UserError)";
}

TEST(DeltaRule, RefusesWhatItCannotServe) {
  const DeltaRuleShape good = {.N = 4, .H = 2, .HV = 4, .K = 256, .V = 1000, .num_states = 1};
  const auto refusal = [&](auto change) {
    DeltaRuleShape shape = good;
    DeltaRuleOptions options;
    change(shape, options);
    return user_error_of([&] { check_delta_rule_supported(Device::kCpu, shape, options); });
  };
  using S = DeltaRuleShape;
  using O = DeltaRuleOptions;
  EXPECT_EQ(refusal([](S&, O&) {}), "(no UserError)");
  EXPECT_EQ(refusal([](S& s, O&) { s.K = 257; }),
            "delta rule on cpu: key size 257 is not supported; supported are 1 to 256");
  EXPECT_EQ(refusal([](S& s, O&) { s.K = 0; }),
            "delta rule on cpu: key size 0 is not supported; supported are 1 to 256");
  EXPECT_EQ(refusal([](S& s, O&) { s.V = 0; }),
            "delta rule on cpu: value size 0 is not supported; supported is any from 1");
  EXPECT_EQ(refusal([](S& s, O&) { s.HV = 5; }),
            "delta rule on cpu: 5 value heads on 2 key heads are not supported; the value heads must be a multiple of "
            "the key heads");
  EXPECT_EQ(refusal([](S&, O& o) { o.chunk_size = 48; }),
            "delta rule on cpu: chunk size 48 is not supported; supported are 16, 32 and 64");
  EXPECT_EQ(refusal([](S&, O& o) {
              o.gate = Gate::kBounded;
              o.gate_lower_bound = 0;
            }),
            "delta rule: gate_lower_bound 0 must be below 0");
  DeltaRuleCase c = random_delta_rule_case({}, 1, 1, 300, 2, {0, 3}, 1);
  EXPECT_EQ(user_error_of([&] { run_delta_rule(c, DType::kF32); }),
            "delta rule on cpu: key size 300 is not supported; supported are 1 to 256");
}

TEST(DeltaRule, FaultyArgumentsAreErrors) {
  const DeltaRuleCase good = random_delta_rule_case({}, 1, 2, 4, 3, {0, 7}, 1);
  DeltaRuleCase c = good;
  c.in.erase("beta_logit");
  EXPECT_THROW(run_delta_rule(c, DType::kF32), Error);
  c = good;
  c.options.decay = Decay::kNone;  // the gate's tensors are still given
  EXPECT_THROW(run_delta_rule(c, DType::kF32), Error);
  c = good;
  c.in["A_log"].resize(2);
  c.in.erase("dt_bias");
  EXPECT_THROW(run_delta_rule(c, DType::kF32), Error);
}

}  // namespace
}  // namespace palimpsest
