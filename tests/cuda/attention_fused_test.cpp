#include "kernels/cuda/attention_fused.h"

#include <algorithm>
#include <cmath>

#include "kernels/device.h"
#include "kernels/random.h"
#include "tests/cuda/lab.h"

namespace palimpsest {

namespace {

using support::Lab;

struct Case {
  int64_t H, HKV, K, V;
  int64_t gap = 0;  // between rows
};

// Forward and backward; on a GPU in bf16 by cuDNN alone, however short the documents.
void run_fused(Lab& lab, const Documents& documents, const Case& c, const cuda::FusedRule& rule = {.shortest = 1}) {
  const int64_t N = documents.num_tokens();
  const auto input = [&](const char* name, int64_t heads, int64_t size) {
    return lab.input(name, {N, heads, size}, 1, c.gap);
  };
  AttentionBackwardArgs args = {.q = input("q", c.H, c.K),
                                .k = input("k", c.HKV, c.K),
                                .v = input("v", c.HKV, c.V),
                                .o = lab.output("o", {N, c.H, c.V}, c.gap),
                                .lse = lab.statistics("lse", {N, c.H}),
                                .scale = 1 / std::sqrt(static_cast<double>(c.K))};
  const bool fused = lab.dtype() == DType::kBF16;
  const auto by_cudnn = [&] {
    const cuda::FusedDocuments work(lab.stream(), args, documents, rule);
    for (int64_t i = 0; i < documents.count() && !lab.stream().is_planning(); ++i)
      EXPECT_EQ(work.taken()[static_cast<size_t>(i)], documents.length(i) > 0) << "document " << i;
    work.run(lab.stream());
  };
  if (fused)
    by_cudnn();
  else
    attention_forward(lab.stream(), args.o, args.lse, args.q, args.k, args.v, args.scale, documents, documents);
  args.d_o = input("d_o", c.H, c.V);
  args.dq = lab.output("dq", {N, c.H, c.K}, c.gap);
  args.dk = lab.output("dk", {N, c.HKV, c.K}, c.gap);
  args.dv = lab.output("dv", {N, c.HKV, c.V});
  if (fused)
    by_cudnn();
  else
    attention_backward(lab.stream(), args, documents);
}

#define SKIP_WITHOUT_CUDNN()                                               \
  SKIP_WITHOUT_GPU();                                                      \
  if (!cuda::FusedAttention::is_built_in() || gpu_properties().major != 9) \
  GTEST_SKIP() << "there is no cuDNN, or no "                              \
                  "Hopper GPU"

}  // namespace

TEST(FusedAttention, CopiedDocumentsMatchTheCpu) {
  SKIP_WITHOUT_CUDNN();
  for (const Documents& documents : support::odd_documents())
    support::expect_same_on_gpu([&](Lab& lab) { run_fused(lab, documents, {2, 2, 192, 128}); });
  for (const Case& c : {Case{4, 2, 64, 64, 8}, Case{4, 1, 128, 128, 3}, Case{1, 1, 256, 256}})
    support::expect_same_on_gpu([&](Lab& lab) { run_fused(lab, support::mixed_documents(), c); });
}

TEST(FusedAttention, RowsInPlaceMatchTheCpu) {
  SKIP_WITHOUT_CUDNN();
  for (const Case& c : {Case{2, 2, 192, 128, 8}, Case{4, 2, 64, 64}, Case{2, 1, 192, 128}})
    support::expect_same_on_gpu([&](Lab& lab) { run_fused(lab, Documents::rows(3, 128), c); });
}

// Backward of a document in pieces: each sees itself, then those before it.
TEST(FusedAttention, PiecesOfLongDocumentsMatchTheCpu) {
  SKIP_WITHOUT_CUDNN();
  const cuda::FusedRule rule = {.shortest = 1, .longest_piece = 128};
  for (const Documents& documents : {Documents({0, 300, 340}), Documents::rows(2, 256)})
    support::expect_same_on_gpu([&](Lab& lab) { run_fused(lab, documents, {4, 2, 192, 128}, rule); });
}

// Queries that see keys of their own, then earlier ones: copied, where they lie, and far fewer or more of them.
TEST(FusedAttention, EarlierKeysMatchTheCpu) {
  SKIP_WITHOUT_CUDNN();
  for (const auto& [N, NK] : {std::pair<int64_t, int64_t>{300, 260}, {384, 256}, {2100, 257}, {259, 2100}})
    support::expect_same_on_gpu([&, N = N, NK = NK](Lab& lab) {
      Stream& stream = lab.stream();
      constexpr int64_t H = 4, HKV = 2, K = 192, V = 128;
      const double scale = 0.07;
      const Documents own = Documents::single(N);
      AttentionBackwardArgs args = {.dq = lab.output("dq", {N, H, K}),
                                    .dk = lab.output("dk", {N, HKV, K}),
                                    .dv = lab.output("dv", {N, HKV, V}),
                                    .d_o = lab.input("d_o", {N, H, V}),
                                    .q = lab.input("q", {N, H, K}),
                                    .k = lab.input("k", {N, HKV, K}),
                                    .v = lab.input("v", {N, HKV, V}),
                                    .o = lab.output("o", {N, H, V}),
                                    .lse = lab.statistics("lse", {N, H}),
                                    .scale = scale};
      attention_forward(stream, args.o, args.lse, args.q, args.k, args.v, scale, own, own);
      const Tensor k = lab.input("earlier k", {NK, HKV, K}, 1, 8), v = lab.input("earlier v", {NK, HKV, V});
      const auto expect_fused = [&] {
        if (stream.is_planning() || stream.device() == Device::kCpu) return;
        EXPECT_EQ(take_last_path(stream), lab.dtype() == DType::kBF16 ? "cuDNN" : "plain");
      };
      attention_prefix_forward(stream, args.o, args.lse, args.q, k, v, scale);
      expect_fused();
      attention_backward(stream, args, own);
      args.k = k;
      args.v = v;
      args.dk = lab.in_place("earlier dk", {NK, HKV, K});
      args.dv = lab.in_place("earlier dv", {NK, HKV, V});
      attention_prefix_backward(stream, args);
      expect_fused();
    });
}

// Some documents by cuDNN, the others by the plain kernels.
TEST(FusedAttention, SharesABatchWithThePlainKernels) {
  SKIP_WITHOUT_CUDNN();
  const Documents documents({0, 300, 303, 863, 863, 1000, 1256, 1300});
  support::expect_same_on_gpu([&](Lab& lab) {
    const int64_t N = documents.num_tokens();
    const Tensor q = lab.input("q", {N, 2, 192}), k = lab.input("k", {N, 2, 192}), v = lab.input("v", {N, 2, 128});
    const Tensor o = lab.output("o", {N, 2, 128}), lse = lab.statistics("lse", {N, 2});
    attention_forward(lab.stream(), o, lse, q, k, v, 0.07, documents, documents);
    attention_backward(lab.stream(),
                       {.dq = lab.output("dq", {N, 2, 192}),
                        .dk = lab.output("dk", {N, 2, 192}),
                        .dv = lab.output("dv", {N, 2, 128}),
                        .d_o = lab.input("d_o", {N, 2, 128}),
                        .q = q,
                        .k = k,
                        .v = v,
                        .o = o,
                        .lse = lse,
                        .scale = 0.07},
                       documents);
  });
}

// A plan that was dropped for others is made again when it is asked for.
TEST(FusedAttention, KeepsTheLatestPlansAlone) {
  SKIP_WITHOUT_CUDNN();
  cuda::FusedAttention attention(nullptr, 2);
  const auto serves = [&](int64_t S_keys) {
    cuda::FusedShape shape = {
        .is_causal = false, .B = 1, .S = 128, .S_keys = S_keys, .H = 1, .HKV = 1, .K = 64, .V = 64};
    cuda::set_rows_of_copies(shape);
    return attention.serves(shape, cuda::kSlackBytes);
  };
  for (const int64_t S_keys : {128, 256, 128, 384, 128, 256, 384}) {
    EXPECT_TRUE(serves(S_keys)) << S_keys;
    EXPECT_LE(attention.num_plans(), 2);
  }
  EXPECT_EQ(attention.num_plans(), 2);
}

// Ranks plan for all queries and keys that can meet.
TEST(FusedAttention, WhatAllEarlierKeysNeedSufficesForFewer) {
  const auto scratch_of = [](int64_t N, int64_t NK, const Case& c) {
    Arena scratch = Arena::planning("scratch", Device::kCuda), tensors = Arena::planning("tensors", Device::kCuda);
    Stream stream(Device::kCuda, scratch);
    const auto tensor = [&](int64_t n, int64_t heads, int64_t size) {
      return tensors.allocate(DType::kBF16, {n, heads, size});
    };
    AttentionBackwardArgs args = {.q = tensor(N, c.H, c.K),
                                  .k = tensor(NK, c.HKV, c.K),
                                  .v = tensor(NK, c.HKV, c.V),
                                  .o = tensor(N, c.H, c.V),
                                  .lse = tensors.allocate(DType::kF32, {N, c.H})};
    attention_prefix_forward(stream, args.o, args.lse, args.q, args.k, args.v, 1.0);
    args.d_o = args.o;
    args.dq = args.q;
    args.dk = args.k;
    args.dv = args.v;
    attention_prefix_backward(stream, args);
    return scratch.peak();
  };
  uint64_t draw = 0;
  for (const Case& c : {Case{8, 8, 192, 128}, Case{16, 2, 128, 128}, Case{6, 2, 64, 64}})
    for (const auto& [N, NK] : {std::pair<int64_t, int64_t>{300, 5000}, {16384, 4096}, {70000, 40000}}) {
      const int64_t planned = scratch_of(N, NK, c);
      for (int i = 0; i < 20; ++i) {
        const auto up_to = [&](int64_t most) {
          return 1 + static_cast<int64_t>(random_bits(1, 3, draw++) % static_cast<uint64_t>(most));
        };
        const int64_t fewer = up_to(N), fewer_keys = up_to(NK);
        EXPECT_LE(scratch_of(fewer, fewer_keys, c), planned) << fewer << " queries, " << fewer_keys << " keys";
      }
    }
}

// A training run plans for rows of one document, and for documents of one token.
TEST(FusedAttention, WhatRowsNeedSufficesForAllShorterDocuments) {
  const auto scratch_of = [](const Documents& documents, const Case& c) {
    Arena scratch = Arena::planning("scratch", Device::kCuda), tensors = Arena::planning("tensors", Device::kCuda);
    Stream stream(Device::kCuda, scratch);
    const int64_t N = documents.num_tokens();
    const auto tensor = [&](int64_t heads, int64_t size) { return tensors.allocate(DType::kBF16, {N, heads, size}); };
    AttentionBackwardArgs args = {.q = tensor(c.H, c.K),
                                  .k = tensor(c.HKV, c.K),
                                  .v = tensor(c.HKV, c.V),
                                  .o = tensor(c.H, c.V),
                                  .lse = tensors.allocate(DType::kF32, {N, c.H})};
    attention_forward(stream, args.o, args.lse, args.q, args.k, args.v, 1.0, documents, documents);
    args.d_o = args.o;
    args.dq = args.q;
    args.dk = args.k;
    args.dv = args.v;
    attention_backward(stream, args, documents);
    return scratch.peak();
  };
  for (const Case& c : {Case{8, 8, 192, 128}, Case{16, 2, 128, 128}, Case{6, 2, 64, 64}})
    for (const int64_t row : {200, 1024, 4096, 5000, 16384, 60000}) {
      const int64_t N = 4 * row;
      const int64_t planned = std::max(scratch_of(Documents::rows(4, row), c), scratch_of(Documents::rows(N, 1), c));
      uint64_t draw = 0;
      for (int i = 0; i < 20; ++i) {
        std::vector<int64_t> offsets = {0};
        const auto up_to = [&](int64_t most) {
          return 1 + static_cast<int64_t>(random_bits(1, 2, draw++) % static_cast<uint64_t>(most));
        };
        const int64_t most = up_to(row);
        while (offsets.back() < N) offsets.push_back(std::min(N, offsets.back() + up_to(most)));
        EXPECT_LE(scratch_of(Documents(offsets), c), planned) << "rows of " << row << ", documents up to " << most;
      }
    }
}

}  // namespace palimpsest
