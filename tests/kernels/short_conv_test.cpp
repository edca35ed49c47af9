#include "kernels/short_conv.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr ConvActivation kSilu = ConvActivation::kSilu, kNone = ConvActivation::kNone;

struct Sizes {
  int64_t C, W;
};

// Inputs of one document with its W-1 earlier inputs in front, [(W-1) + length, C].
std::vector<double> with_history(const std::vector<double>& x, const std::vector<double>& initial,
                                 const Documents& documents, int64_t document, Sizes sizes) {
  const auto [C, W] = sizes;
  std::vector<double> all((W - 1) * C, 0.0);
  if (!initial.empty()) std::copy_n(initial.begin() + document * (W - 1) * C, (W - 1) * C, all.begin());
  all.insert(all.end(), x.begin() + documents.begin(document) * C, x.begin() + documents.end(document) * C);
  return all;
}

struct Expected {
  std::vector<double> y, final_state;
};
Expected plain_conv(const std::vector<double>& x, const std::vector<double>& w, const std::vector<double>& initial,
                    const Documents& documents, Sizes sizes, ConvActivation activation) {
  const auto [C, W] = sizes;
  Expected expected;
  for (int64_t document = 0; document < documents.count(); ++document) {
    const auto all = with_history(x, initial, documents, document, sizes);
    for (int64_t t = 0; t < documents.length(document); ++t)
      for (int64_t c = 0; c < C; ++c) {
        double u = 0;
        for (int64_t j = 0; j < W; ++j) u += w[c * W + j] * all[(t + j) * C + c];
        expected.y.push_back(activation == kSilu ? u / (1 + std::exp(-u)) : u);
      }
    expected.final_state.insert(expected.final_state.end(), all.end() - (W - 1) * C, all.end());
  }
  return expected;
}

struct ConvCase {
  int64_t width;
  ConvActivation activation;
  bool carries;  // initial and final states
};

class ShortConvCase : public ::testing::TestWithParam<ConvCase> {
 protected:
  // Empty, single-token and short documents, one that spans three blocks of tokens; two strips of channels.
  const Documents documents_{std::vector<int64_t>{0, 0, 37, 38, 40, 40, 43, 190, 190}};
  static constexpr int64_t N = 190;
};

TEST_P(ShortConvCase, MatchesPlainLoops) {
  const auto [W, activation, carries] = GetParam();
  constexpr int64_t C = 261;
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    CpuStream stream;
    const OwnedTensor x = random_tensor(dtype, {N, C}, 1, 1, 5), w = random_tensor(dtype, {C, 1, W}, 2);
    const Shape state_shape = {documents_.count(), W - 1, C};
    const OwnedTensor initial = random_tensor(dtype, state_shape, 3), final_state(dtype, state_shape);
    const OwnedTensor y(dtype, {N, C}, 3);
    const Tensor carried = carries ? initial.tensor() : Tensor();
    short_conv_forward(stream, y, x, w, carried, documents_, activation);
    short_conv_final_state(stream, final_state, x, carried, documents_);
    const Expected expected =
        plain_conv(values_of(x), values_of(w), carries ? values_of(initial) : std::vector<double>(), documents_, {C, W},
                   activation);
    EXPECT_TRUE(is_close(y, expected.y, dtype == DType::kF32 ? 1e-6 : 1e-14));
    EXPECT_EQ(values_of(final_state), expected.final_state);
    EXPECT_TRUE(y.surroundings_untouched());
    EXPECT_TRUE(final_state.surroundings_untouched());
    if (carries) {  // the new state may take the place of the old one
      short_conv_final_state(stream, initial, x, initial, documents_);
      EXPECT_TRUE(is_bit_identical(initial, final_state));
    }
  }
}

TEST_P(ShortConvCase, BackwardMatchesFiniteDifference) {
  const auto [W, activation, carries] = GetParam();
  constexpr int64_t C = 5;
  const DType wide = DType::kF64;
  CpuStream stream;
  const Shape state_shape = {documents_.count(), W - 1, C};
  const OwnedTensor x = converted(random_tensor(DType::kF32, {N, C}, 1), wide, 5);
  const OwnedTensor w = converted(random_tensor(DType::kF32, {C, 1, W}, 2), wide);
  const OwnedTensor initial = converted(random_tensor(DType::kF32, state_shape, 3), wide);
  const OwnedTensor dy = converted(random_tensor(DType::kF32, {N, C}, 4), wide, 1);
  const OwnedTensor d_final = converted(random_tensor(DType::kF32, state_shape, 5), wide);
  const OwnedTensor y(wide, {N, C}), final_state(wide, state_shape);
  const OwnedTensor dx(wide, {N, C}, 2), dw(wide, {C, 1, W}), d_initial(wide, state_shape);
  const Tensor none;
  auto loss = [&, activation = activation, carries = carries] {
    short_conv_forward(stream, y, x, w, carries ? initial.tensor() : none, documents_, activation);
    if (!carries) return dot(y, dy);
    short_conv_final_state(stream, final_state, x, initial, documents_);
    return dot(y, dy) + dot(final_state, d_final);
  };
  fill(dw, 0);
  short_conv_backward(stream, dx, dw, carries ? d_initial.tensor() : none, dy, x, w, carries ? initial.tensor() : none,
                      carries ? d_final.tensor() : none, documents_, activation);
  EXPECT_TRUE(gradient_matches(loss, x, dx, 1e-8, 475));
  EXPECT_TRUE(gradient_matches(loss, w, dw, 1e-8, C * W));
  if (carries && W > 1) {
    EXPECT_TRUE(gradient_matches(loss, initial, d_initial, 1e-8, initial.tensor().numel()));
  }

  const DType narrow = DType::kF32;
  const OwnedTensor dx2(narrow, {N, C}, 4), dw2(narrow, {C, 1, W}), d_initial2(narrow, state_shape);
  const OwnedTensor initial2 = converted(initial, narrow), d_final2 = converted(d_final, narrow);
  fill(dw2, 1);
  short_conv_backward(stream, dx2, dw2, carries ? d_initial2.tensor() : none, converted(dy, narrow, 2),
                      converted(x, narrow, 3), converted(w, narrow), carries ? initial2.tensor() : none,
                      carries ? d_final2.tensor() : none, documents_, activation);
  std::vector<double> dw_expected = values_of(dw);
  for (double& value : dw_expected) value += 1;
  EXPECT_TRUE(is_close(dx2, dx, 2e-6));
  EXPECT_TRUE(is_close(dw2, dw_expected, 2e-6));
  if (carries) {
    EXPECT_TRUE(is_close(d_initial2, d_initial, 2e-6));
  }
  for (const OwnedTensor* output : {&dx, &dw, &dx2, &dw2}) EXPECT_TRUE(output->surroundings_untouched());
  if (carries) {
    EXPECT_TRUE(d_initial.surroundings_untouched());
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ShortConvCase,
                         ::testing::Values(ConvCase{1, kSilu, true}, ConvCase{2, kSilu, true},
                                           ConvCase{3, kSilu, false}, ConvCase{3, kNone, true},
                                           ConvCase{4, kSilu, true}, ConvCase{4, kSilu, false},
                                           ConvCase{4, kNone, false}));

// All outputs and gradients of a run over these tokens.
struct Outcome {
  OwnedTensor y, dx, dw;
};
Outcome outcome_of(const Tensor& x, const Tensor& dy, const Tensor& w, const Documents& documents) {
  CpuStream stream;
  Outcome result{OwnedTensor(x.dtype(), x.shape()), OwnedTensor(x.dtype(), x.shape()),
                 OwnedTensor(x.dtype(), w.shape())};
  fill(result.dw, 0);
  short_conv_forward(stream, result.y, x, w, Tensor(), documents, kSilu);
  short_conv_backward(stream, result.dx, result.dw, Tensor(), dy, x, w, Tensor(), Tensor(), documents, kSilu);
  return result;
}

TEST(ShortConv, ChangingOneDocumentNeverChangesAnother) {
  constexpr int64_t N = 232, C = 67;
  const Documents documents({0, 37, 38, 102, 232});
  const OwnedTensor x = random_tensor(DType::kF32, {N, C}, 1), dy = random_tensor(DType::kF32, {N, C}, 2);
  const OwnedTensor w = random_tensor(DType::kF32, {C, 1, 4}, 3);
  const Outcome before = outcome_of(x, dy, w, documents);
  fill_random(x.tensor().rows(38, 64), 9);
  fill_random(dy.tensor().rows(38, 64), 10);
  const Outcome after = outcome_of(x, dy, w, documents);
  for (const auto& [begin, count] : {std::pair{0, 38}, std::pair{102, 130}}) {
    EXPECT_TRUE(is_bit_identical(after.y.tensor().rows(begin, count), before.y.tensor().rows(begin, count)));
    EXPECT_TRUE(is_bit_identical(after.dx.tensor().rows(begin, count), before.dx.tensor().rows(begin, count)));
  }
  EXPECT_FALSE(is_bit_identical(after.y.tensor().rows(38, 64), before.y.tensor().rows(38, 64)));
}

TEST(ShortConv, AChannelsResultDoesNotDependOnTheOthers) {
  constexpr int64_t N = 70, C = 261;
  const Documents documents({0, 5, 70});
  const OwnedTensor x = random_tensor(DType::kF32, {N, C}, 1), dy = random_tensor(DType::kF32, {N, C}, 2);
  const OwnedTensor w = random_tensor(DType::kF32, {C, 1, 4}, 3);
  const Outcome all = outcome_of(x, dy, w, documents);
  const int64_t first = 249, count = 12;  // both sides of a border between strips
  const Outcome some = outcome_of(x.tensor().columns(first, count), dy.tensor().columns(first, count),
                                  w.tensor().rows(first, count), documents);
  EXPECT_TRUE(is_bit_identical(some.y, all.y.tensor().columns(first, count)));
  EXPECT_TRUE(is_bit_identical(some.dx, all.dx.tensor().columns(first, count)));
  EXPECT_TRUE(is_bit_identical(some.dw, all.dw.tensor().rows(first, count)));
}

TEST(ShortConv, ADocumentsResultDoesNotDependOnItsPlaceNorTheThreads) {
  constexpr int64_t T = 71, C = 67;
  const OwnedTensor w = random_tensor(DType::kF32, {C, 1, 4}, 3);
  const OwnedTensor x = random_tensor(DType::kF32, {T, C}, 1), dy = random_tensor(DType::kF32, {T, C}, 2);
  const OwnedTensor batch_x(DType::kF32, {8 * T, C}), batch_dy(DType::kF32, {8 * T, C});
  for (int64_t row = 0; row < 8; ++row) {
    set_values(batch_x.tensor().rows(row * T, T), values_of(x));
    set_values(batch_dy.tensor().rows(row * T, T), values_of(dy));
  }
  const Outcome one = outcome_of(x, dy, w, Documents::single(T));
  with_threads(3, [&] {
    const Outcome eight = outcome_of(batch_x, batch_dy, w, Documents::rows(8, T));
    for (int64_t row = 0; row < 8; ++row) {
      EXPECT_TRUE(is_bit_identical(eight.y.tensor().rows(row * T, T), one.y));
      EXPECT_TRUE(is_bit_identical(eight.dx.tensor().rows(row * T, T), one.dx));
    }
    std::vector<double> dw_expected = values_of(one.dw);
    for (double& value : dw_expected) value *= 8;
    EXPECT_TRUE(is_close(eight.dw, dw_expected, 1e-6));
    with_threads(1, [&] {
      const Outcome again = outcome_of(batch_x, batch_dy, w, Documents::rows(8, T));
      EXPECT_TRUE(is_bit_identical(again.dw, eight.dw));
      EXPECT_TRUE(is_bit_identical(again.dx, eight.dx));
    });
  });
}

TEST(ShortConv, BatchedPackedAndSeparateCallsGiveTheSameWeightGradient) {
  constexpr int64_t T = 128, C = 67;
  const OwnedTensor w = random_tensor(DType::kF32, {C, 1, 4}, 3);
  const OwnedTensor x = random_tensor(DType::kF32, {2 * T, C}, 1), dy = random_tensor(DType::kF32, {2 * T, C}, 2);
  const Outcome batched = outcome_of(x, dy, w, Documents::rows(2, T));
  const Outcome packed = outcome_of(x, dy, w, Documents({0, T, T, 2 * T}));
  EXPECT_TRUE(is_bit_identical(packed.dw, batched.dw));

  CpuStream stream;
  const OwnedTensor dw(DType::kF32, {C, 1, 4}), dx(DType::kF32, {T, C});
  fill(dw, 0);
  for (int64_t half = 0; half < 2; ++half)
    short_conv_backward(stream, dx, dw, Tensor(), dy.tensor().rows(half * T, T), x.tensor().rows(half * T, T), w,
                        Tensor(), Tensor(), Documents::single(T), kSilu);
  EXPECT_TRUE(is_bit_identical(dw, batched.dw));  // T is a multiple of the block of tokens that sums start from
}

TEST(ShortConv, RowsOutsideTheDocumentsAddNothing) {
  constexpr int64_t C = 67;
  const OwnedTensor w = random_tensor(DType::kF32, {C, 1, 4}, 3);
  const OwnedTensor x = random_tensor(DType::kF32, {201, C}, 1), dy = random_tensor(DType::kF32, {201, C}, 2);
  const OwnedTensor large_x(DType::kF32, {256, C}), large_dy(DType::kF32, {256, C});  // NaN after row 201
  set_values(large_x.tensor().rows(0, 201), values_of(x));
  set_values(large_dy.tensor().rows(0, 201), values_of(dy));
  const Documents documents({0, 90, 201});
  const Outcome small = outcome_of(x, dy, w, documents);
  const Outcome large = outcome_of(large_x.tensor().rows(0, 201), large_dy.tensor().rows(0, 201), w, documents);
  EXPECT_TRUE(is_bit_identical(large.dw, small.dw));
  EXPECT_TRUE(is_bit_identical(large.dx, small.dx));
}

// A document cut into pieces, some shorter than the window, with states and their gradients handed on.
TEST(ShortConv, PiecesOfADocumentWithCarriedStateEqualTheWhole) {
  constexpr int64_t C = 33, W = 4;
  const DType dtype = DType::kF64;
  const std::vector<int64_t> lengths = {1, 2, 61, 1, 1, 3};
  const int64_t T = 69;
  CpuStream stream;
  const OwnedTensor x = random_tensor(dtype, {T, C}, 1), dy = random_tensor(dtype, {T, C}, 2);
  const OwnedTensor w = random_tensor(dtype, {C, 1, W}, 3), y(dtype, {T, C}), dx(dtype, {T, C}), dw(dtype, {C, 1, W});
  const Outcome whole = outcome_of(x, dy, w, Documents::single(T));

  std::vector<OwnedTensor> states;  // before each piece, and after the last
  states.emplace_back(dtype, Shape{1, W - 1, C});
  fill(states[0], 0);
  std::vector<int64_t> begins;
  int64_t begin = 0;
  for (int64_t length : lengths) {
    begins.push_back(begin);
    const Documents piece = Documents::single(length);
    const Tensor part = x.tensor().rows(begin, length);
    short_conv_forward(stream, y.tensor().rows(begin, length), part, w, states.back(), piece, kSilu);
    OwnedTensor next(dtype, {1, W - 1, C});
    short_conv_final_state(stream, next, part, states.back(), piece);
    states.push_back(std::move(next));
    begin += length;
  }
  ASSERT_EQ(begin, T);
  EXPECT_TRUE(is_close(y, whole.y, 1e-15));

  fill(dw, 0);
  OwnedTensor d_state(dtype, {1, W - 1, C});
  fill(d_state, 0);
  for (auto piece = static_cast<int64_t>(lengths.size()) - 1; piece >= 0; --piece) {
    OwnedTensor d_before(dtype, {1, W - 1, C});
    const int64_t from = begins[piece], length = lengths[piece];
    short_conv_backward(stream, dx.tensor().rows(from, length), dw, d_before, dy.tensor().rows(from, length),
                        x.tensor().rows(from, length), w, states[piece], d_state, Documents::single(length), kSilu);
    d_state = std::move(d_before);
  }
  EXPECT_TRUE(is_close(dx, whole.dx, 1e-14));
  EXPECT_TRUE(is_close(dw, whole.dw, 1e-14));
}

TEST(ShortConv, NoTokensAreHarmless) {
  CpuStream stream;
  const OwnedTensor x(DType::kF32, {0, 5}), w = random_tensor(DType::kF32, {5, 1, 4}, 1), dw(DType::kF32, {5, 1, 4});
  fill(dw, 2);
  short_conv_forward(stream, x, x, w, Tensor(), Documents({0, 0, 0}), kSilu);
  short_conv_backward(stream, x, dw, Tensor(), x, x, w, Tensor(), Tensor(), Documents({0, 0, 0}), kSilu);
  EXPECT_EQ(values_of(dw), std::vector<double>(20, 2.0));
}

TEST(ShortConv, WrongOperandsAreErrors) {
  CpuStream stream;
  const OwnedTensor x(DType::kF32, {9, 5}), w(DType::kF32, {5, 1, 4}), wide(DType::kF32, {5, 1, 5});
  const OwnedTensor state(DType::kF32, {2, 3, 5});
  const Documents documents = Documents::single(9);
  EXPECT_THROW(short_conv_forward(stream, x, x, wide, Tensor(), documents, kSilu), Error);
  EXPECT_THROW(short_conv_forward(stream, x, x, w, Tensor(), Documents::single(8), kSilu), Error);
  EXPECT_THROW(short_conv_forward(stream, x, x, w, state, documents, kSilu), Error);
}

}  // namespace
}  // namespace palimpsest
