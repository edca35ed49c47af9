// Ops with many operands on a lab's tensors, for tests that differ in sizes alone.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/documents.h"
#include "tests/cuda/lab.h"

namespace palimpsest::support {

struct AttentionSizes {
  int64_t H, HKV, K, V;
  int64_t gap;  // between rows, of about half the tensors
  double scale = 0.0;
};

// Forward and backward over documents, each query seeing its own document up to itself.
void run_attention(Lab& lab, const AttentionSizes& sizes, const Documents& documents);
// Forward and backward of N queries to num_keys earlier keys, added to results that are there already.
void run_attention_prefix(Lab& lab, const AttentionSizes& sizes, int64_t N, int64_t num_keys);

// Forward and both backward products of rows [offsets[e], offsets[e + 1]) by expert e's weight [O, I], which is once of
// the operands' type and once wide.
void run_grouped_linear(Lab& lab, const std::vector<int64_t>& offsets, int64_t O, int64_t I, int64_t gap);

}  // namespace palimpsest::support
