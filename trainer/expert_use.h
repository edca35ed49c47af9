// How evenly the routed experts of a layer were used: for metrics and messages.
#pragma once

#include <cstdint>

namespace palimpsest {

// How many tokens of a step the experts of a layer were given, over all ranks.
struct ExpertUse {
  int64_t layer = 0;
  double fewest = 0.0, most = 0.0, mean = 0.0;  // of one expert
};

}  // namespace palimpsest
