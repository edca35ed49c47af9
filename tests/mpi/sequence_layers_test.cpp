// What layers exchange over the sequence axis, on cuts with ranges of every length, against the same ops on whole rows.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/short_conv.h"
#include "model/sequence_states.h"
#include "tests/mpi/world.h"
#include "tests/support/delta_rule_case.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

// One rank's part of two rows that four ranks share.
class CutRows {
 public:
  CutRows(const Mesh& mesh, std::vector<int64_t> borders, SequenceLayout layout, const std::vector<int64_t>& offsets)
      : mesh_(mesh), cut_(2, std::move(borders), layout), whole_(offsets) {
    auto [documents, crossings] = cut_.part_of(mesh_.sequence().rank(), whole_);
    sequence_ = {.documents = std::move(documents), .crossings = std::move(crossings)};
    places_ = cut_.tokens_of(mesh_.sequence().rank());
  }

  const Documents& whole() const { return whole_; }
  const Sequence& sequence() const { return sequence_; }
  Context context() { return {stream_, kept_, DType::kF64, mesh_}; }
  int64_t num_tokens() const { return static_cast<int64_t>(places_.size()); }

  // This rank's rows of values over the whole batch.
  std::vector<double> take(const std::vector<double>& all) const {
    const size_t row = all.size() / static_cast<size_t>(whole_.num_tokens());
    std::vector<double> values;
    for (const int64_t place : places_)
      values.insert(values.end(), all.begin() + place * static_cast<int64_t>(row),
                    all.begin() + (place + 1) * static_cast<int64_t>(row));
    return values;
  }
  // A tensor [n, ...] of this rank's rows of values over [N, ...].
  OwnedTensor part(const std::vector<double>& all, const Shape& whole_shape) const {
    Shape shape = {num_tokens()};
    for (int dim = 1; dim < whole_shape.num_dims(); ++dim) shape.push_back(whole_shape[dim]);
    OwnedTensor tensor(DType::kF64, shape);
    set_values(tensor, take(all));
    return tensor;
  }
  std::vector<double> sum_over_ranks(const Tensor& values) {
    mesh_.sequence().all_reduce(stream_, values, ReduceOp::kSum);
    return values_of(values);
  }

 private:
  const Mesh& mesh_;
  SequenceCut cut_;
  Documents whole_;
  Sequence sequence_ = {.documents = Documents({0})};
  std::vector<int64_t> places_;
  CpuStream stream_;
  Arena kept_ = Arena("kept", Device::kCpu, int64_t{4} << 20);
};

struct Cut {
  const char* name;
  std::vector<int64_t> borders;
  SequenceLayout layout;
};
std::vector<Cut> cuts() {
  constexpr auto kContiguous = SequenceLayout::kContiguous, kZigzag = SequenceLayout::kZigzag;
  return {{"ascending", {0, 1, 3, 6, 67}, kContiguous},
          {"descending", {0, 61, 64, 66, 67}, kContiguous},
          {"empty", {0, 0, 30, 30, 67}, kContiguous},
          {"even_zigzag", {0, 9, 18, 27, 35, 43, 51, 59, 67}, kZigzag},
          {"short_zigzag", {0, 1, 2, 20, 20, 21, 64, 65, 67}, kZigzag}};
}
// Documents of all kinds in rows of 67: across every border, inside a range, of one token.
const std::vector<std::vector<int64_t>> kDocuments = {
    {0, 67, 134}, {0, 1, 4, 41, 67, 129, 134}, {0, 2, 2, 5, 6, 63, 65, 67, 68, 70, 72, 133, 134}};

class SequenceLayers : public testing::TestWithParam<Cut> {
 protected:
  void SetUp() override {
    if (mpi_test::world().world_size() < 4) GTEST_SKIP() << "needs 4 ranks";
    mesh_ = mpi_test::world().make_mesh({.sequence = 4}, mpi_test::world_watchdog());
  }
  std::unique_ptr<Mesh> mesh_;  // null on ranks beyond it
};

TEST_P(SequenceLayers, ShortConvolutionEqualsThatOfWholeRows) {
  constexpr int64_t N = 134, C = 5;
  if (!mesh_) return;
  for (const std::vector<int64_t>& offsets : kDocuments) {
    CutRows rows(*mesh_, GetParam().borders, GetParam().layout, offsets);
    for (const int64_t W : {1, 2, 3, 4})
      for (const ConvActivation activation : {ConvActivation::kNone, ConvActivation::kSilu}) {
        SCOPED_TRACE("width " + std::to_string(W) + ", " + std::to_string(offsets.size() - 1) + " documents");
        const OwnedTensor x = random_tensor(DType::kF64, {N, C}, 1), w = random_tensor(DType::kF64, {C, 1, W}, 2),
                          dy = random_tensor(DType::kF64, {N, C}, 3);
        OwnedTensor y(DType::kF64, {N, C}), dx(DType::kF64, {N, C}), dw(DType::kF64, {C, 1, W});
        fill(dw, 0.0);
        CpuStream stream;
        short_conv_forward(stream, y, x, w, {}, rows.whole(), activation);
        short_conv_backward(stream, dx, dw, {}, dy, x, w, {}, {}, rows.whole(), activation);

        Context context = rows.context();
        const OwnedTensor part_x = rows.part(values_of(x), {N, C}), part_dy = rows.part(values_of(dy), {N, C});
        const int64_t n = rows.num_tokens(), R = rows.sequence().crossings.num_slots;
        OwnedTensor part_y(DType::kF64, {n, C}), part_dx(DType::kF64, {n, C}), part_dw(DType::kF64, {C, 1, W});
        OwnedTensor halo(DType::kF64, {R, W - 1, C}), d_halo(DType::kF64, {R, W - 1, C});
        fill(part_dw, 0.0);
        fill(d_halo, 0.0);
        Tensor initial, d_initial;
        if (W > 1) {
          initial = halo;
          d_initial = d_halo;
          exchange_halo(context, rows.sequence(), initial, part_x);
        }
        const Documents& documents = rows.sequence().documents;
        short_conv_forward(context.stream, part_y, part_x, w, initial, documents, activation);
        short_conv_backward(context.stream, part_dx, part_dw, d_initial, part_dy, part_x, w, initial, {}, documents,
                            activation);
        if (W > 1) exchange_halo_gradients(context, rows.sequence(), part_dx, d_initial);
        EXPECT_TRUE(is_close(part_y, rows.take(values_of(y)), 1e-14));
        EXPECT_TRUE(is_close(part_dx, rows.take(values_of(dx)), 1e-14));
        EXPECT_TRUE(is_close(rows.sum_over_ranks(part_dw), values_of(dw), 1e-13));
      }
  }
}

std::vector<DeltaRuleOptions> kinds_of_delta_rule() {
  std::vector<DeltaRuleOptions> kinds;
  for (const DeltaRule delta : {DeltaRule::kOff, DeltaRule::kOn}) {
    for (const Decay decay : {Decay::kNone, Decay::kScalar, Decay::kVector})
      kinds.push_back({.decay = decay, .delta_rule = delta, .beta_scale = 2.0, .scale = 0.4});
    kinds.push_back({.decay = Decay::kScalar, .delta_rule = delta, .gate = Gate::kFixed, .first_value_head = 3});
  }
  kinds.push_back({.decay = Decay::kVector, .gate = Gate::kBounded, .save_level = SaveLevel::kNothing});
  kinds.push_back({.decay = Decay::kVector, .form = DeltaForm::kRecurrence});
  for (DeltaRuleOptions& options : kinds) options.chunk_size = 16;
  return kinds;
}

TEST_P(SequenceLayers, DeltaRuleEqualsThatOfWholeRows) {
  if (!mesh_) return;
  for (const std::vector<int64_t>& offsets : kDocuments) {
    CutRows rows(*mesh_, GetParam().borders, GetParam().layout, offsets);
    int kind = 0;
    for (const DeltaRuleOptions& options : kinds_of_delta_rule()) {
      SCOPED_TRACE("kind " + std::to_string(kind++) + ", " + std::to_string(offsets.size() - 1) + " documents");
      DeltaRuleCase c = random_delta_rule_case(options, 2, 4, 5, 7, offsets, 21);
      c.in.erase("initial_state");
      c.in.erase("grad_final_state");
      const NamedArrays expected = run_delta_rule(c, DType::kF64);

      std::map<std::string, OwnedTensor> tensors;
      const auto keep = [&](const std::string& name, OwnedTensor tensor) -> const Tensor& {
        return tensors.emplace(name, std::move(tensor)).first->second;
      };
      const auto input = [&](const std::string& name) {
        if (c.in.count(name) == 0) return Tensor();
        if (name != "A_log" && name != "dt_bias") return keep(name, rows.part(c.in.at(name), c.shape_of(name)));
        const Tensor& tensor = keep(name, OwnedTensor(DType::kF64, c.shape_of(name)));
        set_values(tensor, c.in.at(name));
        return tensor;
      };
      const auto gradient = [&](const std::string& name) {
        if (c.in.count(name) == 0) return Tensor();
        const Tensor& tensor = keep("grad." + name, OwnedTensor(DType::kF64, tensors.at(name).tensor().shape()));
        if (name == "A_log" || name == "dt_bias") fill(tensor, 0.0);
        return tensor;
      };
      Context context = rows.context();
      Arena::Scope scope(context.activations);
      const Documents& documents = rows.sequence().documents;
      DeltaRuleInputs in = support::delta_rule_inputs(input);
      const DeltaRuleShape shape = delta_rule_shape(in, documents);
      const RangeStates states = allocate_range_states(context.activations, DType::kF64, rows.sequence(), shape);
      exchange_states(context, rows.sequence(), states, in, options);
      in.initial_state = states.entering;
      const DeltaRuleSaved saved = allocate_delta_rule_saved(context.activations, DType::kF64, shape, options);
      const Tensor& o = keep("output", OwnedTensor(DType::kF64, {shape.N, c.HV, c.V}));
      delta_rule_forward(context.stream, {.o = o}, saved, in, options, documents);
      const Tensor d_o = input("grad_output");
      const Tensor d_leaving = context.activations.allocate(DType::kF64, states.entering.shape());
      exchange_state_gradients(context, rows.sequence(), states, d_leaving, d_o, saved, in, options);
      delta_rule_backward(context.stream,
                          {.dq = gradient("q"),
                           .dk = gradient("k"),
                           .dv = gradient("v"),
                           .dbeta_logit = gradient("beta_logit"),
                           .dgate_logit = gradient("gate_logit"),
                           .dA_log = gradient("A_log"),
                           .ddt_bias = gradient("dt_bias")},
                          d_o, d_leaving, saved, in, options, documents);
      for (const char* name : {"output", "grad.q", "grad.k", "grad.v", "grad.beta_logit", "grad.gate_logit"})
        if (expected.count(name) != 0) {
          EXPECT_TRUE(is_close(tensors.at(name), rows.take(expected.at(name)), 1e-12)) << name;
        }
      for (const char* name : {"grad.A_log", "grad.dt_bias"})
        if (expected.count(name) != 0) {
          EXPECT_TRUE(is_close(rows.sum_over_ranks(tensors.at(name)), expected.at(name), 1e-11)) << name;
        }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cuts, SequenceLayers, testing::ValuesIn(cuts()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace palimpsest
