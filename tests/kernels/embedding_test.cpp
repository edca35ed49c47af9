#include "kernels/embedding.h"

#include <gtest/gtest.h>

#include "kernels/random.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t N = 301, V = 11, D = 147;

OwnedTensor random_tokens() {
  OwnedTensor tokens(DType::kI32, {N});
  for (int64_t n = 0; n < N; ++n) set_value(tokens, n, static_cast<double>(random_bits(1, 2, n) % V));
  return tokens;
}

class EmbeddingOfType : public ::testing::TestWithParam<DType> {};

TEST_P(EmbeddingOfType, MatchesPlainLoops) {
  const DType dtype = GetParam();
  CpuStream stream;
  const OwnedTensor tokens = random_tokens(), table = random_tensor(dtype, {V, D}, 1, 1, 3);
  const OwnedTensor x(dtype, {N, D}, 5), dx = random_tensor(dtype, {N, D}, 2, 1, 2);
  const OwnedTensor dtable = random_tensor(dtype, {V, D}, 3, 1, 4);
  std::vector<double> x_expected(N * D), dtable_expected = values_of(dtable);
  const auto ids = values_of(tokens), rows = values_of(table), gradient = values_of(dx);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t i = 0; i < D; ++i) {
      const auto at = static_cast<int64_t>(ids[n]) * D + i;
      x_expected[n * D + i] = rows[at];
      dtable_expected[at] += gradient[n * D + i];
    }
  embedding_forward(stream, x, tokens, table);
  embedding_backward(stream, dtable, dx, tokens);
  EXPECT_EQ(values_of(x), x_expected);
  EXPECT_TRUE(is_close(dtable, dtable_expected, dtype == DType::kF32 ? 1e-6 : 1e-14));
  EXPECT_TRUE(x.surroundings_untouched());
  EXPECT_TRUE(dtable.surroundings_untouched());
}

INSTANTIATE_TEST_SUITE_P(Types, EmbeddingOfType, ::testing::Values(DType::kF32, DType::kF64),
                         [](const auto& info) { return name_of(info.param); });

TEST(Embedding, TableOfF32ServesAStreamOfF64) {
  CpuStream stream;
  const OwnedTensor tokens = random_tokens(), table = random_tensor(DType::kF32, {V, D}, 1);
  const OwnedTensor x(DType::kF64, {N, D}, 5), x32(DType::kF32, {N, D}), dx = random_tensor(DType::kF32, {N, D}, 2);
  const OwnedTensor dtable = random_tensor(DType::kF32, {V, D}, 3), dtable32 = converted(dtable, DType::kF32);
  embedding_forward(stream, x, tokens, table);
  embedding_forward(stream, x32, tokens, table);
  EXPECT_EQ(values_of(x), values_of(x32));
  EXPECT_TRUE(x.surroundings_untouched());
  embedding_backward(stream, dtable, converted(dx, DType::kF64), tokens);
  embedding_backward(stream, dtable32, dx, tokens);
  EXPECT_EQ(values_of(dtable), values_of(dtable32));
}

TEST(Embedding, BackwardDoesNotDependOnTheThreads) {
  CpuStream stream;
  const OwnedTensor tokens = random_tokens(), dx = random_tensor(DType::kF32, {N, D}, 2);
  const OwnedTensor one = random_tensor(DType::kF32, {V, D}, 3), three = converted(one, DType::kF32);
  with_threads(1, [&] { embedding_backward(stream, one, dx, tokens); });
  with_threads(3, [&] { embedding_backward(stream, three, dx, tokens); });
  EXPECT_TRUE(is_bit_identical(three, one));
}

TEST(Embedding, IdsOutsideTheTableAreErrors) {
  CpuStream stream;
  const OwnedTensor tokens = random_tokens(), table = random_tensor(DType::kF32, {V, D}, 1), x(DType::kF32, {N, D});
  for (const double id : {static_cast<double>(V), -1.0}) {
    set_value(tokens, 29, id);
    try {
      embedding_forward(stream, x, tokens, table);
      FAIL() << "id " << id << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("token 29 has id " + std::to_string(static_cast<int>(id))),
                std::string::npos)
          << error.what();
    }
    EXPECT_THROW(embedding_backward(stream, table, x, tokens), Error);
  }
}

}  // namespace
}  // namespace palimpsest
