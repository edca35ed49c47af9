#include "kernels/mla_heads.h"

#include <gtest/gtest.h>

#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using namespace support;

constexpr int64_t N = 35, H = 3, dn = 13, dr = 6, dv = 11;

TEST(MlaKeysValues, AreTheLatentPartsAndTheSharedKey) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    CpuStream stream;
    const OwnedTensor kv = random_tensor(dtype, {N, H, dn + dv}, 1, 1, 5),
                      k_pe = random_tensor(dtype, {N, dr}, 2, 1, 7);
    const OwnedTensor k(dtype, {N, H, dn + dr}), v(dtype, {N, H, dv});
    mla_keys_values_forward(stream, k, v, kv, k_pe);
    const auto from = values_of(kv), shared = values_of(k_pe);
    std::vector<double> k_expected, v_expected;
    for (int64_t n = 0; n < N; ++n)
      for (int64_t h = 0; h < H; ++h) {
        const int64_t head = (n * H + h) * (dn + dv);
        for (int64_t i = 0; i < dn; ++i) k_expected.push_back(from[head + i]);
        for (int64_t i = 0; i < dr; ++i) k_expected.push_back(shared[n * dr + i]);
        for (int64_t i = 0; i < dv; ++i) v_expected.push_back(from[head + dn + i]);
      }
    EXPECT_EQ(values_of(k), k_expected);
    EXPECT_EQ(values_of(v), v_expected);
    EXPECT_TRUE(k.surroundings_untouched());
    EXPECT_TRUE(v.surroundings_untouched());
  }
}

TEST(MlaKeysValues, BackwardMatchesFiniteDifference) {
  CpuStream stream;
  const DType dtype = DType::kF64;
  const OwnedTensor kv = random_tensor(dtype, {N, H, dn + dv}, 1), k_pe = random_tensor(dtype, {N, dr}, 2);
  const OwnedTensor k(dtype, {N, H, dn + dr}), v(dtype, {N, H, dv});
  const OwnedTensor dk = random_tensor(dtype, {N, H, dn + dr}, 3), dv_in = random_tensor(dtype, {N, H, dv}, 4);
  const OwnedTensor dkv(dtype, {N, H, dn + dv}, 3), dk_pe(dtype, {N, dr}, 2);
  mla_keys_values_backward(stream, dkv, dk_pe, dk, dv_in);
  auto loss = [&] {
    mla_keys_values_forward(stream, k, v, kv, k_pe);
    return dot(k, dk) + dot(v, dv_in);
  };
  EXPECT_TRUE(gradient_matches(loss, kv, dkv));
  EXPECT_TRUE(gradient_matches(loss, k_pe, dk_pe));
  EXPECT_TRUE(dkv.surroundings_untouched());
  EXPECT_TRUE(dk_pe.surroundings_untouched());

  const OwnedTensor dkv32(DType::kF32, {N, H, dn + dv}), dk_pe32(DType::kF32, {N, dr});
  mla_keys_values_backward(stream, dkv32, dk_pe32, converted(dk, DType::kF32), converted(dv_in, DType::kF32));
  EXPECT_TRUE(is_close(dkv32, dkv, 1e-6));
  EXPECT_TRUE(is_close(dk_pe32, dk_pe, 1e-6));
}

TEST(MlaKeysValues, SizesThatDoNotAddUpAreErrors) {
  CpuStream stream;
  const OwnedTensor kv(DType::kF32, {N, H, dn + dv}), k_pe(DType::kF32, {N, dr}), v(DType::kF32, {N, H, dv});
  const OwnedTensor k(DType::kF32, {N, H, dn + dr + 1}), spaced(DType::kF32, {N, H, dn + dr}, 1);
  EXPECT_THROW(mla_keys_values_forward(stream, k, v, kv, k_pe), Error);
  EXPECT_THROW(mla_keys_values_forward(stream, spaced, v, kv, k_pe), Error);
}

}  // namespace
}  // namespace palimpsest
