// The ops on states that only sequence ranks need, ready to be timed.
#pragma once

#include <vector>

#include "trainer/bench_ops.h"

namespace palimpsest {

// Of the states of one row and layer.
void add_sequence_ops(std::vector<BenchOp>& ops, const Config& config);

}  // namespace palimpsest
