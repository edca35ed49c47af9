// cuDNN's fused attention: plans of its graphs, each for one shape, made when first asked for, of which the latest used
// are kept. A build without cuDNN has none (kernels/no_cudnn).
#pragma once

#include <compare>
#include <cstdint>
#include <memory>

struct CUstream_st;  // what a cudaStream_t points to

namespace palimpsest::cuda {

// Attention in bf16 over B sequences, one behind the other, of S queries and S_keys keys; H query heads, of which H /
// HKV share a key head; keys of K and values of V elements. Backward sums in a fixed order.
struct FusedShape {
  bool is_backward = false;
  bool is_causal = true;    // query i sees the keys up to i; otherwise all
  bool ends_early = false;  // sequences may be shorter than S and S_keys
  int64_t B = 0, S = 0, S_keys = 0, H = 0, HKV = 0, K = 0, V = 0;
  float scale = 1.0F;
  // Elements from a token to the next; those of gradients in backward alone.
  int64_t q_row = 0, k_row = 0, v_row = 0, o_row = 0;
  int64_t d_o_row = 0, dq_row = 0, dk_row = 0, dv_row = 0;

  // NOLINTNEXTLINE(modernize-use-nullptr): it takes a defaulted <=> for a comparison with 0
  auto operator<=>(const FusedShape& other) const = default;
};

// Addresses on the GPU; of bf16 elements, on 16 bytes, where nothing else is said.
struct FusedOperands {
  void *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr;
  void *d_o = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  float* lse = nullptr;                                      // [B, H, S]
  int32_t *query_lengths = nullptr, *key_lengths = nullptr;  // [B], of sequences that end early
};

class FusedAttention {
 public:
  // Far more than a run of any layout asks for again and again.
  static constexpr int64_t kMostPlans = 256;
  static bool is_built_in();

  explicit FusedAttention(CUstream_st* queue, int64_t most_plans = kMostPlans);
  ~FusedAttention();
  FusedAttention(const FusedAttention&) = delete;
  FusedAttention& operator=(const FusedAttention&) = delete;

  // Whether the library computes this with so much workspace. The first answer for a shape takes a while.
  bool serves(const FusedShape& shape, int64_t workspace_bytes);
  // Of a shape that is served, as the last answers said.
  void run(const FusedShape& shape, const FusedOperands& operands, void* workspace);
  int64_t num_plans() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace palimpsest::cuda
