#include "kernels/embedding.h"

#include "kernels/op_check.h"

namespace palimpsest {

namespace {

// f32; beside an f64 stream of activations f64, or f32 beside a residual stream in f64.
void check_table(const Stream& stream, const char* name, const Tensor& table, DType dtype, const Shape& shape) {
  const bool narrow = dtype == DType::kF64 && table.defined() && table.dtype() == DType::kF32;
  check_operand(stream, name, table, narrow ? DType::kF32 : statistics_dtype(dtype), shape);
}

void check_range(const VocabRange& range, const Tensor& table) {
  CHECK(range.begin >= 0 && range.begin + table.dim(0) <= range.total, "a table of ", table.dim(0), " rows from id ",
        range.begin, " of a vocabulary of ", range.total);
}

}  // namespace

void embedding_forward(Stream& stream, Tensor x, const Tensor& tokens, const Tensor& table, const VocabRange& range) {
  const DType dtype = floating_dtype(stream, "x", x);
  check_table(stream, "table", table, dtype, {kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "tokens", tokens, DType::kI32, {kAnyDim});
  check_operand(stream, "x", x, dtype, {tokens.dim(0), table.dim(1)});
  check_range(range, table);
  PALIMPSEST_DISPATCH(stream, embedding_forward(stream, x, tokens, table, range));
}

void embedding_backward(Stream& stream, Tensor dtable, const Tensor& dx, const Tensor& tokens,
                        const VocabRange& range) {
  const DType dtype = floating_dtype(stream, "dx", dx);
  check_operand(stream, "dx", dx, dtype, {kAnyDim, kAnyDim});
  check_contiguous_operand(stream, "tokens", tokens, DType::kI32, {dx.dim(0)});
  check_table(stream, "dtable", dtable, dtype, {kAnyDim, dx.dim(1)});
  check_range(range, dtable);
  PALIMPSEST_DISPATCH(stream, embedding_backward(stream, dtable, dx, tokens, range));
}

void embedding_forward(Stream& stream, Tensor x, const Tensor& tokens, const Tensor& table) {
  embedding_forward(stream, x, tokens, table, {.begin = 0, .total = table.dim(0)});
}

void embedding_backward(Stream& stream, Tensor dtable, const Tensor& dx, const Tensor& tokens) {
  embedding_backward(stream, dtable, dx, tokens, {.begin = 0, .total = dtable.dim(0)});
}

}  // namespace palimpsest
