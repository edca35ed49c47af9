#include "kernels/op_check.h"

namespace palimpsest {

DType floating_dtype(const Stream& stream, const char* name, const Tensor& tensor) {
  const DType other = stream.device() == Device::kCpu ? DType::kF64 : DType::kBF16;
  CHECK(tensor.defined() && (tensor.dtype() == DType::kF32 || tensor.dtype() == other), name, " is ", tensor.str(),
        ", expected f32 or ", name_of(other));
  return tensor.dtype();
}

DType statistics_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

DType wider_dtype(DType dtype) {
  return dtype == DType::kBF16 ? DType::kF32 : DType::kF64;
}

void check_operand(const Stream& stream, const char* name, const Tensor& tensor, DType dtype, const Shape& shape) {
  check_tensor(name, tensor, dtype, shape);
  CHECK(tensor.device() == stream.device(), name, " is ", tensor.str(), ", the stream runs on ",
        name_of(stream.device()));
}

void check_weight(const Stream& stream, const Tensor& w, DType dtype, const Shape& shape) {
  check_operand(stream, "w", w, w.dtype() == statistics_dtype(dtype) ? statistics_dtype(dtype) : dtype, shape);
}

void check_contiguous_operand(const Stream& stream, const char* name, const Tensor& tensor, DType dtype,
                              const Shape& shape) {
  check_operand(stream, name, tensor, dtype, shape);
  check_contiguous(name, tensor);
}

void check_residual(const Stream& stream, const char* name, const Tensor& tensor, DType dtype, const Shape& shape) {
  const bool wide = tensor.defined() && tensor.dtype() == wider_dtype(dtype);
  check_operand(stream, name, tensor, wide ? wider_dtype(dtype) : dtype, shape);
}

void check_covers(const Documents& documents, const char* name, int64_t num_tokens) {
  CHECK(documents.num_tokens() == num_tokens, "documents own ", documents.num_tokens(), " tokens, ", name, " has ",
        num_tokens);
}

}  // namespace palimpsest
