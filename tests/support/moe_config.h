// Small models with routed experts, of each published kind.
#pragma once

#include "model/config.h"

namespace palimpsest::support {

// Sigmoid scores, groups, a selection bias that steps, a shared expert; layer 0 is dense.
inline MoeConfig sigmoid_moe() {
  return {.num_experts = 6,
          .dense_layers = {0},
          .experts_per_token = 2,
          .intermediate_size = 12,
          .shared_intermediate_size = 8,
          .num_groups = 3,
          .top_groups = 2,
          .routed_scaling_factor = 1.7,
          .router_bias_update_speed = 0.01};
}

// Softmax scores, a gated shared expert, the balance term.
inline MoeConfig softmax_moe() {
  return {.num_experts = 5,
          .experts_per_token = 3,
          .intermediate_size = 8,
          .shared_intermediate_size = 12,
          .shared_gate = true,
          .router = RouterScore::kSoftmax,
          .router_aux_loss_coef = 0.3};
}

}  // namespace palimpsest::support
