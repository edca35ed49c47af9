// How evenly routed experts are used, over all layers of one training micro-batch: counts the tokens of each expert and
// computes the balance term of the loss (kernels/router.h).
#pragma once

#include "model/config.h"
#include "model/layer.h"

namespace palimpsest {

// Where each layer with experts notes what it did, in its own row; and what backward adds to every token's scores.
struct ExpertTally {
  Tensor load;   // [L, E] f64: tokens sent to each expert
  Tensor mass;   // [L, E] f64: sums of the scores; absent without a balance term
  Tensor slope;  // [E] f64: the term's derivative by a score; absent without one
};

class ExpertBalance {
 public:
  // Stands behind context.experts as long as it lives; does nothing in a model without such layers. Memory comes from
  // the activations.
  ExpertBalance(Context& context, const MoeConfig& config, int64_t num_layers);
  ~ExpertBalance() { context_.experts = nullptr; }
  ExpertBalance(const ExpertBalance&) = delete;
  ExpertBalance& operator=(const ExpertBalance&) = delete;

  // Between forward and backward: adds the load to step_load [L, E] f64 unless that is absent; with a balance term adds
  // it to sum [1] f64 and makes ready its gradient, times grad_scale.
  void finish_forward(Tensor sum, Tensor step_load, double grad_scale);

 private:
  Context& context_;
  const MoeConfig& config_;
  int64_t num_layers_;
  ExpertTally tally_;
};

}  // namespace palimpsest
