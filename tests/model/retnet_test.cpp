#include "model/retnet.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/delta_rule.h"
#include "kernels/elementwise.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using support::OwnedTensor;

constexpr int64_t kN = 70, kH = 3, kK = 8, kV = 12;
constexpr int64_t kFirstHead = 2;

DeltaRuleOptions fixed_gate(DeltaForm form) {
  return {.decay = Decay::kScalar,
          .delta_rule = DeltaRule::kOff,
          .gate = Gate::kFixed,
          .first_value_head = kFirstHead,
          .l2norm_qk = false,
          .scale = 0.3,
          .form = form,
          .chunk_size = 16,
          .save_level = SaveLevel::kNothing};
}

// o_t = scale * sum over j <= t of gamma^(t-j) (q_t . k_j) v_j inside a document, gamma = 1 - 2^(-5-h).
std::vector<double> retention(const Tensor& q, const Tensor& k, const Tensor& v, const Documents& documents) {
  std::vector<double> o(static_cast<size_t>(kN * kH * kV), 0.0);
  for (int64_t document = 0; document < documents.count(); ++document)
    for (int64_t h = 0; h < kH; ++h)
      for (int64_t t = documents.begin(document); t < documents.end(document); ++t)
        for (int64_t j = documents.begin(document); j <= t; ++j) {
          double weight = 0.3 * std::pow(1.0 - std::exp2(-5.0 - static_cast<double>(kFirstHead + h)), t - j), qk = 0;
          for (int64_t c = 0; c < kK; ++c)
            qk += q.data<double>()[(t * kH + h) * kK + c] * k.data<double>()[(j * kH + h) * kK + c];
          weight *= qk;
          for (int64_t c = 0; c < kV; ++c)
            o[static_cast<size_t>((t * kH + h) * kV + c)] += weight * v.data<double>()[(j * kH + h) * kV + c];
        }
  return o;
}

TEST(Retnet, FixedDecayIsRetention) {
  const OwnedTensor q = support::random_tensor(DType::kF64, {kN, kH, kK}, 1);
  const OwnedTensor k = support::random_tensor(DType::kF64, {kN, kH, kK}, 2);
  const OwnedTensor v = support::random_tensor(DType::kF64, {kN, kH, kV}, 3);
  const Documents documents({0, 21, 70});
  const std::vector<double> expected = retention(q, k, v, documents);
  for (DeltaForm form : {DeltaForm::kRecurrence, DeltaForm::kChunkwise}) {
    support::CpuStream stream;
    const OwnedTensor o(DType::kF64, {kN, kH, kV});
    delta_rule_forward(stream, {.o = o}, {}, {.q = q, .k = k, .v = v}, fixed_gate(form), documents);
    EXPECT_TRUE(support::is_close(o, expected, 1e-12));
  }
}

TEST(Retnet, OpGradientsMatchCentralDifferences) {
  const OwnedTensor q = support::random_tensor(DType::kF64, {kN, kH, kK}, 1);
  const OwnedTensor k = support::random_tensor(DType::kF64, {kN, kH, kK}, 2);
  const OwnedTensor v = support::random_tensor(DType::kF64, {kN, kH, kV}, 3);
  const OwnedTensor d_o = support::random_tensor(DType::kF64, {kN, kH, kV}, 4);
  const Documents documents({0, 21, 70});
  for (DeltaForm form : {DeltaForm::kRecurrence, DeltaForm::kChunkwise}) {
    support::CpuStream stream;
    const OwnedTensor o(DType::kF64, {kN, kH, kV});
    const OwnedTensor dq(DType::kF64, {kN, kH, kK}), dk(DType::kF64, {kN, kH, kK}), dv(DType::kF64, {kN, kH, kV});
    const auto loss = [&] {
      delta_rule_forward(stream, {.o = o}, {}, {.q = q, .k = k, .v = v}, fixed_gate(form), documents);
      return support::dot(o, d_o);
    };
    delta_rule_backward(stream, {.dq = dq, .dk = dk, .dv = dv}, d_o, {}, {}, {.q = q, .k = k, .v = v}, fixed_gate(form),
                        documents);
    EXPECT_TRUE(support::gradient_matches(loss, q, dq));
    EXPECT_TRUE(support::gradient_matches(loss, k, dk));
    EXPECT_TRUE(support::gradient_matches(loss, v, dv));
  }
}

TEST(Retnet, OnlyAScalarDecayCanBeFixed) {
  DeltaRuleOptions options = fixed_gate(DeltaForm::kChunkwise);
  options.decay = Decay::kVector;
  EXPECT_THROW(check_delta_rule_supported(Device::kCpu, {.N = 1, .H = 1, .HV = 1, .K = 8, .V = 8}, options), UserError);
}

}  // namespace
}  // namespace palimpsest
