// Documents whose states lie in rows of their own choice, and the calls that compute states alone: the delta rule and
// the short convolution against the same calls with a row for every document.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "kernels/short_conv.h"
#include "tests/support/delta_rule_case.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

// Five documents, one of them empty: the second and the last begin with states, the first and the last leave theirs.
const std::vector<int64_t> kOffsets = {0, 3, 70, 70, 71, 100};
const std::vector<int64_t> kEntering = {-1, 3, -1, -1, 0}, kLeaving = {2, -1, -1, -1, 0};
constexpr int64_t kStates = 4;

// Rows of `all` [documents, ...] spread over the rows of a tensor of kStates, the others as they are.
void spread(const Tensor& rows, const Tensor& all, const std::vector<int64_t>& places) {
  for (size_t i = 0; i < places.size(); ++i)
    if (places[i] >= 0) set_values(rows.rows(places[i], 1), values_of(all.rows(static_cast<int64_t>(i), 1)));
}

void zero_rows(const Tensor& all, const std::vector<int64_t>& places) {
  for (size_t i = 0; i < places.size(); ++i)
    if (places[i] < 0) fill(all.rows(static_cast<int64_t>(i), 1), 0.0);
}

void expect_rows(const Tensor& rows, const Tensor& all, const std::vector<int64_t>& places) {
  for (size_t i = 0; i < places.size(); ++i)
    if (places[i] >= 0) {
      EXPECT_TRUE(is_bit_identical(rows.rows(places[i], 1), all.rows(static_cast<int64_t>(i), 1))) << "document " << i;
    }
}

struct DeltaTensors {
  explicit DeltaTensors(const DeltaRuleCase& c, int64_t num_states)
      : o(DType::kF64, c.shape_of("output")),
        dq(DType::kF64, c.shape_of("q")),
        dk(DType::kF64, c.shape_of("q")),
        dv(DType::kF64, c.shape_of("v")),
        dbeta(DType::kF64, c.shape_of("beta_logit")),
        dgate(DType::kF64, c.shape_of("gate_logit")),
        dA_log(DType::kF64, c.shape_of("A_log")),
        ddt_bias(DType::kF64, c.shape_of("dt_bias")),
        initial(DType::kF64, {num_states, c.HV, c.K, c.V}),
        final_state(DType::kF64, {num_states, c.HV, c.K, c.V}),
        d_initial(DType::kF64, {num_states, c.HV, c.K, c.V}),
        d_final(DType::kF64, {num_states, c.HV, c.K, c.V}) {
    fill(dA_log, 0.0);
    fill(ddt_bias, 0.0);
  }
  DeltaRuleGrads grads() const {
    return {.dq = dq,
            .dk = dk,
            .dv = dv,
            .dbeta_logit = dbeta,
            .dgate_logit = dgate,
            .dA_log = dA_log,
            .ddt_bias = ddt_bias,
            .d_initial_state = d_initial};
  }
  OwnedTensor o, dq, dk, dv, dbeta, dgate, dA_log, ddt_bias, initial, final_state, d_initial, d_final;
};

class StateRows : public ::testing::TestWithParam<DeltaForm> {};

TEST_P(StateRows, DeltaRuleReadsAndWritesThemAlone) {
  const DeltaRuleCase c =
      random_delta_rule_case({.decay = Decay::kVector, .form = GetParam(), .chunk_size = 16}, 2, 4, 5, 7, kOffsets, 11);
  std::map<std::string, OwnedTensor> owned;
  const auto input = [&](const std::string& name) {
    const Tensor tensor = owned.emplace(name, OwnedTensor(DType::kF64, c.shape_of(name))).first->second;
    set_values(tensor, c.in.at(name));
    return tensor;
  };
  DeltaRuleInputs in = support::delta_rule_inputs(input);
  const Tensor d_o = input("grad_output"), states = input("initial_state"), d_states = input("grad_final_state");
  zero_rows(states, kEntering);
  zero_rows(d_states, kLeaving);
  const Documents plain(kOffsets), placed = plain.with_states(kStates, kEntering, kLeaving);
  DeltaTensors expected(c, plain.count()), got(c, kStates);
  set_values(expected.initial, values_of(states));
  set_values(expected.d_final, values_of(d_states));
  spread(got.initial, states, kEntering);
  spread(got.d_final, d_states, kLeaving);
  CpuStream stream;
  const auto run = [&](const DeltaTensors& t, const Documents& documents) {
    in.initial_state = t.initial;
    Arena kept("kept", Device::kCpu, 1 << 20);
    const DeltaRuleSaved saved =
        allocate_delta_rule_saved(kept, DType::kF64, delta_rule_shape(in, documents), c.options);
    delta_rule_forward(stream, {.o = t.o, .final_state = t.final_state}, saved, in, c.options, documents);
    delta_rule_backward(stream, t.grads(), d_o, t.d_final, saved, in, c.options, documents);

    // The same states without the rest.
    OwnedTensor final_alone(DType::kF64, t.final_state.tensor().shape());
    OwnedTensor d_initial_alone(DType::kF64, t.d_initial.tensor().shape());
    DeltaRuleOptions nothing = c.options;
    nothing.save_level = SaveLevel::kNothing;
    delta_rule_forward(stream, {.final_state = final_alone}, {}, in, nothing, documents);
    delta_rule_backward(stream, {.d_initial_state = d_initial_alone}, d_o, t.d_final, saved, in, c.options, documents);
    for (int64_t i = 0; i < documents.count(); ++i) {
      const int64_t leaving = documents.leaving(i), entering = documents.entering(i);
      if (leaving >= 0) {
        EXPECT_TRUE(is_bit_identical(final_alone.tensor().rows(leaving, 1), t.final_state.tensor().rows(leaving, 1)));
      }
      if (entering >= 0) {
        EXPECT_TRUE(
            is_bit_identical(d_initial_alone.tensor().rows(entering, 1), t.d_initial.tensor().rows(entering, 1)));
      }
    }
    EXPECT_EQ(std::isnan(values_of(final_alone.tensor().rows(1, 1))[0]), documents.num_states() == kStates);
    EXPECT_EQ(std::isnan(values_of(d_initial_alone.tensor().rows(1, 1))[0]), documents.num_states() == kStates);
  };
  run(expected, plain);
  run(got, placed);
  for (auto member : {&DeltaTensors::o, &DeltaTensors::dq, &DeltaTensors::dk, &DeltaTensors::dv, &DeltaTensors::dbeta,
                      &DeltaTensors::dgate, &DeltaTensors::dA_log, &DeltaTensors::ddt_bias})
    EXPECT_TRUE(is_close(got.*member, expected.*member, 1e-14));
  expect_rows(got.final_state, expected.final_state, kLeaving);
  expect_rows(got.d_initial, expected.d_initial, kEntering);
}

INSTANTIATE_TEST_SUITE_P(Forms, StateRows, ::testing::Values(DeltaForm::kRecurrence, DeltaForm::kChunkwise));

TEST(StateRowsOfConvolutions, ShortConvolutionReadsAndWritesThemAlone) {
  constexpr int64_t C = 5, W = 4, N = 100;
  const Documents plain(kOffsets), placed = plain.with_states(kStates, kEntering, kLeaving);
  const OwnedTensor x = random_tensor(DType::kF64, {N, C}, 1), w = random_tensor(DType::kF64, {C, 1, W}, 2),
                    dy = random_tensor(DType::kF64, {N, C}, 3),
                    initial = random_tensor(DType::kF64, {plain.count(), W - 1, C}, 4),
                    d_final = random_tensor(DType::kF64, {plain.count(), W - 1, C}, 5);
  zero_rows(initial, kEntering);
  zero_rows(d_final, kLeaving);
  struct Results {
    OwnedTensor y{DType::kF64, {N, C}}, dx{DType::kF64, {N, C}}, dw{DType::kF64, {C, 1, W}};
    OwnedTensor final_state, d_initial;
    explicit Results(int64_t rows)
        : final_state(DType::kF64, {rows, W - 1, C}), d_initial(DType::kF64, {rows, W - 1, C}) {
      fill(dw, 0.0);
    }
  };
  CpuStream stream;
  const auto run = [&](const Results& r, const Tensor& from, const Tensor& d_to, const Documents& documents) {
    short_conv_forward(stream, r.y, x, w, from, documents, ConvActivation::kSilu);
    short_conv_final_state(stream, r.final_state, x, from, documents);
    short_conv_backward(stream, r.dx, r.dw, r.d_initial, dy, x, w, from, d_to, documents, ConvActivation::kSilu);
  };
  const Results expected(plain.count()), got(kStates);
  const OwnedTensor placed_initial(DType::kF64, {kStates, W - 1, C}), placed_d_final(DType::kF64, {kStates, W - 1, C});
  spread(placed_initial, initial, kEntering);
  spread(placed_d_final, d_final, kLeaving);
  run(expected, initial, d_final, plain);
  run(got, placed_initial, placed_d_final, placed);
  EXPECT_TRUE(is_bit_identical(got.y, expected.y));
  EXPECT_TRUE(is_bit_identical(got.dx, expected.dx));
  EXPECT_TRUE(is_bit_identical(got.dw, expected.dw));
  expect_rows(got.final_state, expected.final_state, kLeaving);
  expect_rows(got.d_initial, expected.d_initial, kEntering);
  EXPECT_TRUE(std::isnan(values_of(got.final_state.tensor().rows(1, 1))[0]));
  EXPECT_TRUE(std::isnan(values_of(got.d_initial.tensor().rows(1, 1))[0]));
}

}  // namespace
}  // namespace palimpsest
