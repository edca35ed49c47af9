// The ops of softmax attention, ready to be timed.
#pragma once

#include <vector>

#include "trainer/bench_ops.h"

namespace palimpsest {

// MLA's over one micro-batch of rows, and to as many earlier keys as a row has; the output gate of plain attention.
void add_attention_ops(std::vector<BenchOp>& ops, const BenchSizes& sizes);

}  // namespace palimpsest
