// Weights in the type of activations, for as long as a block's layers multiply by them.
#pragma once

#include <vector>

#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// While it lives, the operands of these stacks are copies in scratch memory, rounded all at once. They stay the values
// where nothing is to be rounded, and where each product had better round for itself.
class RoundedWeights {
 public:
  RoundedWeights(Context& context, const std::vector<ParameterStack*>& stacks);
  ~RoundedWeights();
  RoundedWeights(const RoundedWeights&) = delete;
  RoundedWeights& operator=(const RoundedWeights&) = delete;

 private:
  const std::vector<ParameterStack*>& stacks_;
  Arena::Scope scope_;
};

}  // namespace palimpsest
