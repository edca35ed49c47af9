#include "kernels/tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace palimpsest {

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kBF16:
      return 2;
    case DType::kU8:
      return 1;
  }
  CHECK(false, "unknown dtype");
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF64:
      return "f64";
    case DType::kBF16:
      return "bf16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "?";
}

const char* name_of(Device device) {
  return device == Device::kCpu ? "cpu" : "cuda";
}

float to_float(BF16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

BF16 to_bf16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BF16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return BF16{static_cast<uint16_t>(bits >> 16)};
}

Shape::Shape(std::initializer_list<int64_t> dims) {
  for (int64_t extent : dims) push_back(extent);
}

int64_t Shape::numel() const {
  int64_t count = 1;
  for (int i = 0; i < num_dims_; ++i) count *= dims_[i];
  return count;
}

void Shape::push_back(int64_t extent) {
  CHECK(num_dims_ < kMaxDims, "a shape has at most ", kMaxDims, " dimensions");
  CHECK(extent >= 0 || extent == kAnyDim, "extent ", extent, " is negative");
  dims_[num_dims_++] = extent;
}

bool Shape::operator==(const Shape& other) const {
  if (num_dims_ != other.num_dims_) return false;
  for (int i = 0; i < num_dims_; ++i)
    if (dims_[i] != other.dims_[i]) return false;
  return true;
}

std::string Shape::str() const {
  std::string text = "[";
  for (int i = 0; i < num_dims_; ++i) text += (i ? ", " : "") + std::to_string(dims_[i]);
  return text + "]";
}

namespace {

int64_t elements_per_row(const Shape& shape) {
  int64_t count = 1;
  for (int i = 1; i < shape.num_dims(); ++i) count *= shape[i];
  return count;
}

}  // namespace

Tensor::Tensor(void* data, DType dtype, Shape shape, Device device)
    : data_(data),
      row_stride_(elements_per_row(shape)),
      numel_of_row_(elements_per_row(shape)),
      shape_(shape),
      dtype_(dtype),
      device_(device),
      defined_(true) {}

int64_t Tensor::dim(int i) const {
  const int index = i < 0 ? i + num_dims() : i;
  CHECK(index >= 0 && index < num_dims(), "dimension ", i, " of ", str());
  return shape_[index];
}

Tensor Tensor::view(Shape shape) const {
  CHECK(shape.numel() == numel(), "view ", shape.str(), " of ", str());
  Tensor result = *this;
  result.shape_ = shape;
  result.numel_of_row_ = elements_per_row(shape);
  if (contiguous()) {
    result.row_stride_ = result.numel_of_row_;
  } else {
    CHECK(shape.num_dims() > 0 && shape[0] == shape_[0], "view ", shape.str(), " of ", str(), " with spaced rows");
  }
  return result;
}

Tensor Tensor::rows(int64_t start, int64_t count) const {
  CHECK(num_dims() > 0 && start >= 0 && count >= 0 && start + count <= shape_[0], "rows ", start, "+", count, " of ",
        str());
  Tensor result = *this;
  result.data_ = static_cast<char*>(data_) + start * row_stride_ * size_of(dtype_);
  Shape shape = {count};
  for (int i = 1; i < num_dims(); ++i) shape.push_back(shape_[i]);
  result.shape_ = shape;
  return result;
}

Tensor Tensor::columns(int64_t start, int64_t count) const {
  CHECK(num_dims() == 2 && start >= 0 && count >= 0 && start + count <= shape_[1], "columns ", start, "+", count,
        " of ", str());
  Tensor result = *this;
  result.data_ = static_cast<char*>(data_) + start * size_of(dtype_);
  result.shape_ = {shape_[0], count};
  result.numel_of_row_ = count;
  return result;
}

Tensor Tensor::split_columns(int64_t heads, int64_t size) const {
  CHECK(num_dims() == 2 && heads * size == shape_[1], "columns of ", str(), " as ", heads, " heads of ", size);
  return view({shape_[0], heads, size});
}

Tensor Tensor::merge_columns() const {
  CHECK(num_dims() >= 2, "merge_columns of ", str());
  return view({shape_[0], numel_of_row_});
}

std::string Tensor::str() const {
  if (!defined_) return "(absent)";
  return std::string(name_of(dtype_)) + shape_.str() + " on " + name_of(device_);
}

void Tensor::check_type(DType wanted) const {
  CHECK(defined_, "an absent tensor has no data");
  CHECK(dtype_ == wanted, "tensor is ", str(), ", accessed as ", name_of(wanted));
}

void check_tensor(const char* name, const Tensor& tensor, DType dtype, const Shape& shape) {
  bool fits = tensor.defined() && tensor.dtype() == dtype && tensor.num_dims() == shape.num_dims();
  for (int i = 0; fits && i < shape.num_dims(); ++i) fits = shape[i] == kAnyDim || shape[i] == tensor.dim(i);
  CHECK(fits, name, " is ", tensor.str(), ", expected ", name_of(dtype), shape.str());
}

void check_contiguous(const char* name, const Tensor& tensor) {
  CHECK(tensor.contiguous(), name, " must be contiguous, its rows are ", tensor.row_stride(), " elements apart");
}

namespace {

template <class T>
bool is_finite(T value) {
  return std::isfinite(value);
}
bool is_finite(BF16 value) {
  return std::isfinite(to_float(value));
}

template <class T>
bool all_finite_as(const Tensor& tensor) {
  const T* values = tensor.data<T>();
  for (int64_t row = 0; row < tensor.numel(); row += tensor.row_size()) {
    if (!std::all_of(values, values + tensor.row_size(), [](T value) { return is_finite(value); })) return false;
    values += tensor.row_stride();
  }
  return true;
}

}  // namespace

bool all_finite(const Tensor& tensor) {
  CHECK(tensor.device() == Device::kCpu, "the tensor is ", tensor.str(), ", expected one in host memory");
  if (tensor.dtype() == DType::kBF16) return all_finite_as<BF16>(tensor);
  return tensor.dtype() == DType::kF64 ? all_finite_as<double>(tensor) : all_finite_as<float>(tensor);
}

}  // namespace palimpsest
