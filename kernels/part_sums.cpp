#include "kernels/part_sums.h"

#include "kernels/op_check.h"

namespace palimpsest {

void add_parts(Stream& stream, Tensor y, const Tensor& own, const Tensor& others) {
  const DType dtype = floating_dtype(stream, "own", own);
  const int64_t n = own.dim(0), rows = others.dim(0);
  CHECK(rows >= n && n > 0 && rows % n == 0, "others has ", rows, " rows, own ", n);
  check_contiguous_operand(stream, "own", own, dtype, own.shape());
  check_contiguous_operand(stream, "y", y, dtype, own.shape());
  check_contiguous_operand(stream, "others", others, dtype, {rows, own.dim(1)});
  PALIMPSEST_DISPATCH(stream, add_parts(stream, y, own, others));
}

}  // namespace palimpsest
