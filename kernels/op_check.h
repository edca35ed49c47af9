// The checks that public op functions share. Each throws an Error that names the operand.
#pragma once

#include "kernels/documents.h"
#include "kernels/stream.h"

namespace palimpsest {

// The dtype of an op's main operand: f32 or f64 on the CPU, f32 or bf16 on CUDA.
DType floating_dtype(const Stream& stream, const char* name, const Tensor& tensor);
// What sums and statistics over operands of this dtype are kept in: f64 for f64, f32 otherwise.
DType statistics_dtype(DType dtype);
// What a residual stream beside activations of this dtype may be kept in: f32 beside bf16, f64 otherwise.
DType wider_dtype(DType dtype);

// Device, dtype and shape; rows may be spaced.
void check_operand(const Stream& stream, const char* name, const Tensor& tensor, DType dtype, const Shape& shape);
// A weight of a product: in the operands' dtype or, beside bf16 operands, in f32.
void check_weight(const Stream& stream, const Tensor& w, DType dtype, const Shape& shape);
// As check_operand, and no gaps between rows.
void check_contiguous_operand(const Stream& stream, const char* name, const Tensor& tensor, DType dtype,
                              const Shape& shape);

// The same as check_operand for a tensor of the residual stream: `dtype` or the next wider.
void check_residual(const Stream& stream, const char* name, const Tensor& tensor, DType dtype, const Shape& shape);

void check_covers(const Documents& documents, const char* name, int64_t num_tokens);

}  // namespace palimpsest
