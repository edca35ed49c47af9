// Long sums in f64 whose order depends on their length alone.
#pragma once

#include <array>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"

namespace palimpsest::cpu {

// sum of term(i), f64, over i = 0 .. n-1. Threads sum the pieces, which are then added in order.
template <class Term>
double wide_sum(int64_t n, Term term) {
  constexpr int64_t kPieces = 256;
  std::array<double, kPieces> sums = {};
  const int64_t length = std::max<int64_t>(ceil_div(n, kPieces), 4096);
  parallel_ranges(n, length, [&](int64_t begin, int64_t end) {
    sums[begin / length] = lane_sum<double>(end - begin, [=](int64_t i) { return term(begin + i); });
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace palimpsest::cpu
