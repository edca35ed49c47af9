// Tensor: a small, copyable, non-owning view of memory. No operators, no broadcasting, no autograd tape.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/check.h"

namespace palimpsest {

enum class DType : uint8_t { kF32, kF64, kBF16, kI32, kI64, kU8 };
enum class Device : uint8_t { kCpu, kCuda };

int64_t size_of(DType dtype);        // bytes per element
const char* name_of(DType dtype);    // "f32", "bf16", ...
const char* name_of(Device device);  // "cpu" or "cuda"

// A bfloat16 number in storage. CPU code converts it; it does no arithmetic on it.
struct BF16 {
  uint16_t bits;
};
float to_float(BF16 value);
BF16 to_bf16(float value);  // round to nearest even; NaN stays NaN

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<BF16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};

// Extents of up to 5 dimensions.
class Shape {
 public:
  static constexpr int kMaxDims = 5;
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  int num_dims() const { return num_dims_; }
  int64_t operator[](int i) const { return dims_[i]; }
  int64_t numel() const;
  void push_back(int64_t extent);
  bool operator==(const Shape& other) const;
  std::string str() const;  // "[2, 3]"

 private:
  std::array<int64_t, kMaxDims> dims_ = {};
  int num_dims_ = 0;
};

// Everything inside an index of dimension 0 is contiguous; the rows themselves may be spaced further apart
// (row_stride), so that a range of columns of a stacked projection is a Tensor too.
class Tensor {
 public:
  Tensor() = default;  // an absent tensor: defined() is false
  Tensor(void* data, DType dtype, Shape shape, Device device = Device::kCpu);

  bool defined() const { return defined_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  const Shape& shape() const { return shape_; }
  int num_dims() const { return shape_.num_dims(); }
  int64_t dim(int i) const;  // negative counts from the end
  int64_t numel() const { return shape_.numel(); }
  int64_t bytes() const { return numel() * size_of(dtype_); }  // without the gaps between rows
  int64_t row_size() const { return numel_of_row_; }           // elements of one index of dimension 0
  int64_t row_stride() const { return row_stride_; }           // elements from one index of dimension 0 to the next
  bool contiguous() const { return row_stride_ == numel_of_row_; }

  // The elements. Throws when T is not the dtype: there is no silent reinterpretation.
  template <class T>
  T* data() const {
    check_type(DTypeOf<T>::value);
    return static_cast<T*>(data_);
  }
  void* raw() const { return data_; }

  Tensor view(Shape shape) const;                           // same elements, contiguous only (or same row split)
  Tensor rows(int64_t start, int64_t count) const;          // range of dimension 0
  Tensor columns(int64_t start, int64_t count) const;       // [N, C] -> [N, count], rows stay where they are
  Tensor split_columns(int64_t heads, int64_t size) const;  // [N, heads*size] -> [N, heads, size]
  Tensor merge_columns() const;                             // [N, a, b, ...] -> [N, a*b*...]

  std::string str() const;  // "f32[2, 3] on cpu", for messages

 private:
  void check_type(DType wanted) const;

  void* data_ = nullptr;
  int64_t row_stride_ = 0;
  int64_t numel_of_row_ = 0;
  Shape shape_;
  DType dtype_ = DType::kF32;
  Device device_ = Device::kCpu;
  bool defined_ = false;
};

// Throws an Error that names the tensor, what it is and what it should be. kAnyDim in `shape` matches every extent.
constexpr int64_t kAnyDim = -1;
void check_tensor(const char* name, const Tensor& tensor, DType dtype, const Shape& shape);
void check_contiguous(const char* name, const Tensor& tensor);

// Whether no element is NaN or infinite. f32, f64 or bf16, in host memory; for finding faults, not for the hot path.
bool all_finite(const Tensor& tensor);

}  // namespace palimpsest
