// The ops of routed experts, ready to be timed.
#pragma once

#include <vector>

#include "trainer/bench_ops.h"

namespace palimpsest {

// Of one micro-batch of rows, where the model has experts.
void add_expert_ops(std::vector<BenchOp>& ops, const Config& config);

}  // namespace palimpsest
