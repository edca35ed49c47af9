#include "kernels/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "tests/support/files.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

struct Sizes {
  int64_t H, HKV, K, V;
};

// Softmax attention and its gradients by the definition, in f64, one query at a time.
struct Reference {
  std::vector<double> o, lse, dq, dk, dv;
};
Reference plain_attention(const std::vector<double>& q, const std::vector<double>& k, const std::vector<double>& v,
                          const std::vector<double>& d_o, double scale, const Documents& queries, const Documents& keys,
                          Sizes sizes) {
  const auto [H, HKV, K, V] = sizes;
  Reference r{std::vector<double>(queries.num_tokens() * H * V), std::vector<double>(queries.num_tokens() * H),
              std::vector<double>(q.size()), std::vector<double>(k.size()), std::vector<double>(v.size())};
  for (int64_t document = 0; document < queries.count(); ++document)
    for (int64_t i = 0; i < queries.length(document); ++i)
      for (int64_t h = 0; h < H; ++h) {
        const int64_t row = (queries.begin(document) + i) * H + h, kv_head = h / (H / HKV);
        const int64_t seen = keys.length(document) - queries.length(document) + i + 1;
        auto key_row = [&, HKV = HKV](int64_t j) { return (keys.begin(document) + j) * HKV + kv_head; };
        std::vector<double> p(seen);
        double maximum = -1e300, sum = 0;
        for (int64_t j = 0; j < seen; ++j) {
          for (int64_t c = 0; c < K; ++c) p[j] += scale * q[row * K + c] * k[key_row(j) * K + c];
          maximum = std::max(maximum, p[j]);
        }
        for (double& score : p) sum += score = std::exp(score - maximum);
        r.lse[row] = maximum + std::log(sum);
        for (int64_t j = 0; j < seen; ++j) {
          p[j] /= sum;
          for (int64_t c = 0; c < V; ++c) r.o[row * V + c] += p[j] * v[key_row(j) * V + c];
        }
        if (d_o.empty()) continue;
        std::vector<double> dp(seen);
        double mean = 0;
        for (int64_t j = 0; j < seen; ++j) {
          for (int64_t c = 0; c < V; ++c) {
            dp[j] += d_o[row * V + c] * v[key_row(j) * V + c];
            r.dv[key_row(j) * V + c] += p[j] * d_o[row * V + c];
          }
          mean += p[j] * dp[j];
        }
        for (int64_t j = 0; j < seen; ++j) {
          const double ds = p[j] * (dp[j] - mean) * scale;
          for (int64_t c = 0; c < K; ++c) {
            r.dq[row * K + c] += ds * k[key_row(j) * K + c];
            r.dk[key_row(j) * K + c] += ds * q[row * K + c];
          }
        }
      }
  return r;
}

// Operands and results of one call, with gaps between rows.
struct AttentionRun {
  AttentionRun(DType dtype, int64_t N, Sizes sizes)
      : q(random_tensor(dtype, {N, sizes.H, sizes.K}, 1, 1, 5)),
        k(random_tensor(dtype, {N, sizes.HKV, sizes.K}, 2, 1, 7)),
        v(random_tensor(dtype, {N, sizes.HKV, sizes.V}, 3, 1, 3)),
        d_o(random_tensor(dtype, {N, sizes.H, sizes.V}, 4, 1, 2)),
        o(dtype, {N, sizes.H, sizes.V}, 1),
        lse(dtype, {N, sizes.H}),
        dq(dtype, {N, sizes.H, sizes.K}, 4),
        dk(dtype, {N, sizes.HKV, sizes.K}, 6),
        dv(dtype, {N, sizes.HKV, sizes.V}, 8),
        scale(1 / std::sqrt(static_cast<double>(sizes.K))) {}

  void forward(const Documents& documents) { attention_forward(stream, o, lse, q, k, v, scale, documents, documents); }
  void backward(const Documents& documents) {
    attention_backward(stream, {dq, dk, dv, d_o, q, k, v, o, lse, scale}, documents);
  }
  Reference reference(const Documents& documents, Sizes sizes) const {
    return plain_attention(values_of(q), values_of(k), values_of(v), values_of(d_o), scale, documents, documents,
                           sizes);
  }

  CpuStream stream;
  OwnedTensor q, k, v, d_o, o, lse, dq, dk, dv;
  double scale;
};

class AttentionOfSizes : public ::testing::TestWithParam<Sizes> {};

TEST_P(AttentionOfSizes, MatchesTheDefinition) {
  const Sizes sizes = GetParam();
  const Documents documents({0, 1, 1, 66, 266});  // lengths 1, 0, 65, 200
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    AttentionRun run(dtype, 266, sizes);
    run.forward(documents);
    run.backward(documents);
    const Reference expected = run.reference(documents, sizes);
    const double tolerance = dtype == DType::kF32 ? 2e-6 : 1e-13;
    EXPECT_TRUE(is_close(run.o, expected.o, tolerance));
    EXPECT_TRUE(is_close(run.lse, expected.lse, tolerance));
    EXPECT_TRUE(is_close(run.dq, expected.dq, tolerance));
    EXPECT_TRUE(is_close(run.dk, expected.dk, tolerance));
    EXPECT_TRUE(is_close(run.dv, expected.dv, tolerance));
    for (const OwnedTensor* output : {&run.o, &run.lse, &run.dq, &run.dk, &run.dv})
      EXPECT_TRUE(output->surroundings_untouched());
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, AttentionOfSizes,
                         ::testing::Values(Sizes{2, 2, 192, 128}, Sizes{3, 3, 96, 72}, Sizes{4, 2, 128, 96},
                                           Sizes{3, 1, 64, 64}, Sizes{2, 1, 5, 3}));

TEST(Attention, BackwardMatchesFiniteDifference) {
  const Sizes sizes{4, 2, 7, 5};
  const Documents documents({0, 3, 70});
  AttentionRun run(DType::kF64, 70, sizes);
  run.forward(documents);
  run.backward(documents);
  auto loss = [&] {
    run.forward(documents);
    return dot(run.o, run.d_o);
  };
  EXPECT_TRUE(gradient_matches(loss, run.q, run.dq, 1e-8));
  EXPECT_TRUE(gradient_matches(loss, run.k, run.dk, 1e-8));
  EXPECT_TRUE(gradient_matches(loss, run.v, run.dv, 1e-8));
}

TEST(Attention, ThousandsOfTokensMatchTheDefinition) {
  const Sizes sizes{1, 1, 6, 4};
  const Documents documents = Documents::single(2500);
  AttentionRun run(DType::kF32, 2500, sizes);
  run.forward(documents);
  run.backward(documents);
  const Reference expected = run.reference(documents, sizes);
  EXPECT_TRUE(is_close(run.o, expected.o, 2e-6));
  EXPECT_TRUE(is_close(run.dq, expected.dq, 5e-6));
  EXPECT_TRUE(is_close(run.dk, expected.dk, 5e-6));
  EXPECT_TRUE(is_close(run.dv, expected.dv, 5e-6));
}

TEST(Attention, FewQueriesSeeAllEarlierKeys) {
  const Sizes sizes{4, 2, 24, 20};
  const Documents queries({0, 1, 1, 6, 76}),
      keys({0, 150, 160, 165, 300});  // one token; none; all of them; a late part
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    CpuStream stream;
    const OwnedTensor q = random_tensor(dtype, {76, sizes.H, sizes.K}, 1, 1, 3);
    const OwnedTensor k = random_tensor(dtype, {300, sizes.HKV, sizes.K}, 2, 1, 5);
    const OwnedTensor v = random_tensor(dtype, {300, sizes.HKV, sizes.V}, 3, 1, 7);
    const OwnedTensor o(dtype, {76, sizes.H, sizes.V}, 2), lse(dtype, {76, sizes.H});
    attention_forward(stream, o, lse, q, k, v, 0.3, queries, keys);
    const Reference expected = plain_attention(values_of(q), values_of(k), values_of(v), {}, 0.3, queries, keys, sizes);
    const double tolerance = dtype == DType::kF32 ? 2e-6 : 1e-13;
    EXPECT_TRUE(is_close(o, expected.o, tolerance));
    EXPECT_TRUE(is_close(lse, expected.lse, tolerance));
    EXPECT_TRUE(o.surroundings_untouched());
  }
}

TEST(Attention, LargeScoresAreFinite) {
  const Sizes sizes{2, 2, 16, 8};
  const Documents documents = Documents::single(130);
  AttentionRun run(DType::kF32, 130, sizes);
  run.scale = 300;  // scores in the thousands: each query takes one value
  run.forward(documents);
  run.backward(documents);
  const Reference expected = run.reference(documents, sizes);
  EXPECT_TRUE(is_close(run.o, expected.o, 1e-3));
  EXPECT_TRUE(is_close(run.lse, expected.lse, 1e-5));
  for (const OwnedTensor* gradient : {&run.dq, &run.dk, &run.dv})
    for (double value : values_of(*gradient)) ASSERT_TRUE(std::isfinite(value));
}

TEST(Attention, ADocumentsResultDoesNotDependOnTheOthersNorTheThreads) {
  const Sizes sizes{4, 2, 48, 40};
  const int64_t T = 150, before = 37;
  const Documents batch({0, before, before + T, before + T + 64});
  AttentionRun all(DType::kF32, batch.num_tokens(), sizes), one(DType::kF32, T, sizes);
  for (const auto& [from, to] :
       {std::pair{&all.q, &one.q}, std::pair{&all.k, &one.k}, std::pair{&all.v, &one.v}, std::pair{&all.d_o, &one.d_o}})
    set_values(*to, values_of(from->tensor().rows(before, T)));
  with_threads(3, [&] {
    all.forward(batch);
    all.backward(batch);
  });
  with_threads(1, [&] {
    one.forward(Documents::single(T));
    one.backward(Documents::single(T));
  });
  for (const auto& [whole, single] :
       {std::pair{&all.o, &one.o}, std::pair{&all.lse, &one.lse}, std::pair{&all.dq, &one.dq},
        std::pair{&all.dk, &one.dk}, std::pair{&all.dv, &one.dv}})
    EXPECT_TRUE(is_bit_identical(whole->tensor().rows(before, T), *single));
}

TEST(Attention, NoTokensAreHarmless) {
  AttentionRun run(DType::kF32, 0, {2, 1, 8, 8});
  run.forward(Documents({0, 0, 0}));
  run.backward(Documents({0, 0, 0}));
  EXPECT_TRUE(run.dq.surroundings_untouched());
}

TEST(Attention, WrongOperandsAreErrors) {
  AttentionRun run(DType::kF32, 10, {4, 2, 8, 6});
  AttentionRun odd(DType::kF32, 10, {3, 2, 8, 6});
  EXPECT_THROW(odd.forward(Documents::single(10)), Error);
  EXPECT_THROW(run.forward(Documents::single(9)), Error);
  const OwnedTensor keys(DType::kF32, {8, 2, 8}), values(DType::kF32, {8, 2, 6});
  EXPECT_THROW(attention_forward(run.stream, run.o, run.lse, run.q, keys, values, 1, Documents({0, 4, 10}),
                                 Documents({0, 4, 8})),
               Error);  // six queries, four keys
  EXPECT_THROW(attention_forward(run.stream, run.o, run.lse, run.q, run.k, run.v, 1, Documents({0, 4, 10}),
                                 Documents::single(10)),
               Error);
}

// The last 90 tokens of a document of 266 as queries: their own part first, then what is before it in uneven blocks.
TEST(Attention, GpusRefuseHeadsThatTheyCannotServe) {
  EXPECT_NO_THROW(check_attention_supported(Device::kCuda, 192, 256));
  EXPECT_NO_THROW(check_attention_supported(Device::kCpu, 576, 512));
  for (const auto& [K, V] : {std::pair{257, 64}, std::pair{64, 300}})
    EXPECT_NE(user_error_of([&, K = K, V = V] { check_attention_supported(Device::kCuda, K, V); }).find("1 to 256"),
              std::string::npos);
}

TEST_P(AttentionOfSizes, GoesBlockByBlockOverAnEarlierPart) {
  const Sizes sizes = GetParam();
  constexpr int64_t N = 266, kQueries = 90, kFirst = N - kQueries;
  const std::vector<int64_t> borders = {kFirst, 100, 97, 0};
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    AttentionRun run(dtype, N, sizes);
    const Documents own = Documents::single(kQueries);
    for (const Tensor& gradient : {run.dk.tensor(), run.dv.tensor()}) fill(gradient.rows(0, kFirst), 0.0);
    const auto rows = [&](const OwnedTensor& tensor, int64_t begin, int64_t end) {
      return tensor.tensor().rows(begin, end - begin);
    };
    const auto late = [&](const OwnedTensor& tensor) { return rows(tensor, kFirst, N); };
    const auto arguments = [&](int64_t begin, int64_t end) {
      return AttentionBackwardArgs{.dq = late(run.dq),
                                   .dk = rows(run.dk, begin, end),
                                   .dv = rows(run.dv, begin, end),
                                   .d_o = late(run.d_o),
                                   .q = late(run.q),
                                   .k = rows(run.k, begin, end),
                                   .v = rows(run.v, begin, end),
                                   .o = late(run.o),
                                   .lse = late(run.lse),
                                   .scale = run.scale};
    };
    attention_forward(run.stream, late(run.o), late(run.lse), late(run.q), late(run.k), late(run.v), run.scale, own,
                      own);
    for (size_t i = 1; i < borders.size(); ++i)
      attention_prefix_forward(run.stream, late(run.o), late(run.lse), late(run.q),
                               rows(run.k, borders[i], borders[i - 1]), rows(run.v, borders[i], borders[i - 1]),
                               run.scale);
    attention_backward(run.stream, arguments(kFirst, N), own);
    for (size_t i = 1; i < borders.size(); ++i)
      attention_prefix_backward(run.stream, arguments(borders[i], borders[i - 1]));

    fill(run.d_o.tensor().rows(0, kFirst), 0.0);  // the earlier tokens' own outputs take no part
    const Reference expected = run.reference(Documents::single(N), sizes);
    const double tolerance = dtype == DType::kF32 ? 2e-6 : 1e-13;
    const auto last = [](const std::vector<double>& all) {
      const auto row = static_cast<int64_t>(all.size()) / N;
      return std::vector<double>(all.begin() + kFirst * row, all.end());
    };
    EXPECT_TRUE(is_close(late(run.o), last(expected.o), tolerance));
    EXPECT_TRUE(is_close(late(run.lse), last(expected.lse), tolerance));
    EXPECT_TRUE(is_close(late(run.dq), last(expected.dq), tolerance));
    EXPECT_TRUE(is_close(run.dk, expected.dk, tolerance));
    EXPECT_TRUE(is_close(run.dv, expected.dv, tolerance));
    for (const OwnedTensor* output : {&run.o, &run.lse, &run.dq, &run.dk, &run.dv})
      EXPECT_TRUE(output->surroundings_untouched());
  }
}

}  // namespace
}  // namespace palimpsest
