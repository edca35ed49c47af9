#include "trainer/bench_sequence.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/affine_state.h"
#include "kernels/short_conv.h"

namespace palimpsest {

namespace {

// Applied again and again a state grows beyond all bounds, in the same time.
void add_affine_maps(std::vector<BenchOp>& ops, const KdaConfig& kda) {
  const int64_t HV = kda.num_value_heads.value_or(kda.num_heads), K = kda.head_dim;
  const std::string sizes = fmt::format("{} heads of {} / {}", HV, K, K);
  for (const auto& [name, direction] : {std::pair{"affine_apply", AffineDirection::kForward},
                                        std::pair{"affine_apply, adjoint", AffineDirection::kAdjoint}})
    ops.push_back({name, "", [=, direction = direction](BenchPlace& place) {
                     const Tensor state = place.wide_random({1, HV, K, K}), map = place.wide_random({1, HV, K, 2 * K});
                     return PreparedOp{sizes, 0.0, {state, map}, {state}, [=, &place] {
                                         affine_apply(place.stream(), state, map, direction);
                                       }};
                   }});
  ops.push_back({"affine_identity", "", [=](BenchPlace& place) {
                   const Tensor maps = place.wide_random({1, HV, K, 2 * K});
                   return PreparedOp{sizes, 0.0, {}, {maps}, [=, &place] { affine_identity(place.stream(), maps); }};
                 }});
}

void add_halo(std::vector<BenchOp>& ops, const KdaConfig& kda, int64_t T) {
  const int64_t C = 3 * kda.num_heads * kda.head_dim, window = kda.conv_size - 1;
  if (window == 0) return;
  ops.push_back({"short_conv_final_state", "", [=](BenchPlace& place) {
                   const Tensor x = place.random({T, C}), state = place.zeros({1, window, C});
                   return PreparedOp{
                       fmt::format("the last {} of [{}, {}]", window, T, C), 0.0, {state}, {state}, [=, &place] {
                         short_conv_final_state(place.stream(), state, x, {}, Documents::single(T));
                       }};
                 }});
}

}  // namespace

void add_sequence_ops(std::vector<BenchOp>& ops, const Config& config) {
  add_affine_maps(ops, config.model.kda);
  add_halo(ops, config.model.kda, config.data.sequence_length);
}

}  // namespace palimpsest
