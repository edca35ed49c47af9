#include "tests/support/tensors.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/device.h"
#include "kernels/random.h"

namespace palimpsest::support {

namespace {

constexpr int64_t kZone = 64;  // elements before and after a tensor
constexpr int64_t kNoInteger = -77;

int64_t offset_of(const Tensor& tensor, int64_t index) {
  const int64_t row_size = std::max<int64_t>(tensor.row_size(), 1);
  return index / row_size * tensor.row_stride() + index % row_size;
}

double read(const void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[offset];
    case DType::kF64:
      return static_cast<const double*>(data)[offset];
    case DType::kBF16:
      return to_float(static_cast<const BF16*>(data)[offset]);
    case DType::kI32:
      return static_cast<const int32_t*>(data)[offset];
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(data)[offset]);
    case DType::kU8:
      return static_cast<const uint8_t*>(data)[offset];
  }
  return 0;
}

void write(void* data, DType dtype, int64_t offset, double value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[offset] = static_cast<float>(value);
      break;
    case DType::kF64:
      static_cast<double*>(data)[offset] = value;
      break;
    case DType::kBF16:
      static_cast<BF16*>(data)[offset] = to_bf16(static_cast<float>(value));
      break;
    case DType::kI32:
      static_cast<int32_t*>(data)[offset] = static_cast<int32_t>(value);
      break;
    case DType::kI64:
      static_cast<int64_t*>(data)[offset] = static_cast<int64_t>(value);
      break;
    case DType::kU8:
      static_cast<uint8_t*>(data)[offset] = static_cast<uint8_t>(value);
      break;
  }
}

double nobody_wrote(DType dtype) {
  switch (dtype) {
    case DType::kI32:
    case DType::kI64:
      return static_cast<double>(kNoInteger);
    case DType::kU8:
      return 77;
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

// Elements of memory between the first and the last element of a tensor, gaps included.
int64_t extent_of(const Shape& shape, int64_t row_stride) {
  return shape.num_dims() == 0 ? 1 : shape[0] * row_stride;
}

}  // namespace

OwnedTensor::OwnedTensor(DType dtype, Shape shape, int64_t row_gap) {
  int64_t row_size = 1;
  Shape spaced;
  if (shape.num_dims() > 0) {
    spaced.push_back(shape[0]);
    for (int i = 1; i < shape.num_dims(); ++i) row_size *= shape[i];
    spaced.push_back(row_size + row_gap);
  }
  const int64_t stride = row_size + row_gap;
  const int64_t extent = extent_of(shape, stride);
  memory_.resize(static_cast<size_t>((extent + 2 * kZone) * size_of(dtype)));
  for (int64_t i = 0; i < extent + 2 * kZone; ++i) write(memory_.data(), dtype, i, nobody_wrote(dtype));
  untouched_ = memory_;
  std::byte* first = memory_.data() + kZone * size_of(dtype);
  tensor_ = Tensor(first, dtype, shape);
  if (row_gap > 0) tensor_ = Tensor(first, dtype, spaced).columns(0, row_size).view(shape);
}

bool OwnedTensor::surroundings_untouched() const {
  std::vector<std::byte> expected = untouched_;
  const int64_t width = size_of(tensor_.dtype());
  for (int64_t i = 0; i < tensor_.numel(); ++i) {
    const auto at = static_cast<ptrdiff_t>((kZone + offset_of(tensor_, i)) * width);
    std::copy_n(memory_.begin() + at, width, expected.begin() + at);
  }
  return expected == memory_;
}

Tensor OwnedTensor::copy_to(const Stream& stream, Arena& arena) const {
  const auto size = static_cast<int64_t>(memory_.size());
  const Tensor bytes = arena.allocate(DType::kU8, {size});
  transfer(stream, bytes, Tensor(const_cast<std::byte*>(memory_.data()), DType::kU8, {size}));
  const Shape& shape = tensor_.shape();
  std::byte* first = static_cast<std::byte*>(bytes.raw()) + kZone * size_of(tensor_.dtype());
  if (tensor_.contiguous()) return Tensor(first, tensor_.dtype(), shape, bytes.device());
  return Tensor(first, tensor_.dtype(), {shape[0], tensor_.row_stride()}, bytes.device())
      .columns(0, tensor_.row_size())
      .view(shape);
}

void OwnedTensor::copy_from(const Stream& stream, const Tensor& there) {
  const auto size = static_cast<int64_t>(memory_.size());
  std::byte* first = static_cast<std::byte*>(there.raw()) - kZone * size_of(tensor_.dtype());
  transfer(stream, Tensor(memory_.data(), DType::kU8, {size}), Tensor(first, DType::kU8, {size}, there.device()));
}

bool has_gpu() {
  return num_gpus() > 0;
}

void fill_with_nan(const Stream& stream, Arena& arena) {
  // For tools that report reads of memory that nobody wrote to (tests/cuda/sanitize.sh).
  if (stream.device() == Device::kCuda && std::getenv("PALIMPSEST_LEAVE_MEMORY") != nullptr) return;
  const Arena::Scope scope(arena);
  std::vector<std::byte> ones(static_cast<size_t>(arena.capacity()), std::byte{0xff});
  transfer(stream, arena.allocate(DType::kU8, {arena.capacity()}), Tensor(ones.data(), DType::kU8, {arena.capacity()}));
}

std::vector<double> values_of(const Tensor& tensor) {
  std::vector<double> values(static_cast<size_t>(tensor.numel()));
  for (int64_t i = 0; i < tensor.numel(); ++i) values[i] = read(tensor.raw(), tensor.dtype(), offset_of(tensor, i));
  return values;
}

void set_values(const Tensor& tensor, const std::vector<double>& values) {
  CHECK(static_cast<int64_t>(values.size()) == tensor.numel(), values.size(), " values for ", tensor.str());
  for (int64_t i = 0; i < tensor.numel(); ++i) set_value(tensor, i, values[i]);
}

void set_value(const Tensor& tensor, int64_t index, double value) {
  write(tensor.raw(), tensor.dtype(), offset_of(tensor, index), value);
}

void fill(const Tensor& tensor, double value) {
  for (int64_t i = 0; i < tensor.numel(); ++i) set_value(tensor, i, value);
}

void fill_nan(const Tensor& tensor) {
  fill(tensor, std::numeric_limits<double>::quiet_NaN());
}

void fill_random(const Tensor& tensor, uint64_t seed, double deviation, double mean) {
  for (int64_t i = 0; i < tensor.numel(); ++i)
    set_value(tensor, i, mean + deviation * random_normal(seed, hash_of("test"), static_cast<uint64_t>(i)));
}

OwnedTensor random_tensor(DType dtype, Shape shape, uint64_t seed, double deviation, int64_t row_gap) {
  OwnedTensor tensor(dtype, shape, row_gap);
  fill_random(tensor, seed, deviation);
  return tensor;
}

OwnedTensor converted(const Tensor& tensor, DType dtype, int64_t row_gap) {
  OwnedTensor result(dtype, tensor.shape(), row_gap);
  set_values(result, values_of(tensor));
  return result;
}

double relative_error(const std::vector<double>& got, const std::vector<double>& reference) {
  if (got.size() != reference.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - reference[i]) * (got[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  const double error = std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1.0);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

::testing::AssertionResult is_close(const std::vector<double>& got, const std::vector<double>& reference,
                                    double tolerance) {
  if (got.size() != reference.size())
    return ::testing::AssertionFailure() << got.size() << " values, expected " << reference.size();
  const double error = relative_error(got, reference);
  if (error <= tolerance) return ::testing::AssertionSuccess();
  size_t worst = 0;
  double worst_difference = -1;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = std::fabs(got[i] - reference[i]);
    if (difference > worst_difference || std::isnan(difference)) {
      worst = i;
      worst_difference = difference;
      if (std::isnan(difference)) break;
    }
  }
  return ::testing::AssertionFailure() << "relative error " << error << ", allowed " << tolerance << "; worst at "
                                       << worst << ": " << got[worst] << ", expected " << reference[worst];
}

::testing::AssertionResult is_close(const Tensor& got, const Tensor& reference, double tolerance) {
  return is_close(values_of(got), values_of(reference), tolerance);
}

::testing::AssertionResult is_close(const Tensor& got, const std::vector<double>& reference, double tolerance) {
  return is_close(values_of(got), reference, tolerance);
}

::testing::AssertionResult is_bit_identical(const Tensor& got, const Tensor& reference) {
  if (got.dtype() != reference.dtype() || !(got.shape() == reference.shape()))
    return ::testing::AssertionFailure() << got.str() << ", expected " << reference.str();
  const int64_t width = size_of(got.dtype());
  for (int64_t i = 0; i < got.numel(); ++i) {
    const int64_t a = offset_of(got, i), b = offset_of(reference, i);
    if (std::memcmp(static_cast<char*>(got.raw()) + a * width, static_cast<char*>(reference.raw()) + b * width,
                    static_cast<size_t>(width)) != 0)
      return ::testing::AssertionFailure() << "element " << i << " is " << read(got.raw(), got.dtype(), a)
                                           << ", expected " << read(reference.raw(), reference.dtype(), b);
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult gradient_matches(const std::function<double()>& loss, const Tensor& x, const Tensor& dx,
                                            double tolerance, int64_t max_elements, double step) {
  CHECK(x.dtype() == DType::kF64 && x.shape() == dx.shape(), "x ", x.str(), ", dx ", dx.str());
  const int64_t count = std::min(max_elements, x.numel());
  const std::vector<double> values = values_of(x), all_gradients = values_of(dx);
  std::vector<double> gradients, differences;
  with_threads(1, [&] {  // many small calls: starting threads would cost more than it saves
    for (int64_t sample = 0; sample < count; ++sample) {
      const int64_t i = sample * x.numel() / count;
      auto loss_at = [&](double shift) {
        set_value(x, i, values[i] + shift);
        return loss();
      };
      const double near = loss_at(step) - loss_at(-step);
      const double far = loss_at(2 * step) - loss_at(-2 * step);
      set_value(x, i, values[i]);
      differences.push_back((8 * near - far) / (12 * step));
      gradients.push_back(all_gradients[i]);
    }
  });
  for (double gradient : all_gradients)
    if (!std::isfinite(gradient)) return ::testing::AssertionFailure() << "a gradient is " << gradient;
  return is_close(gradients, differences, tolerance);
}

void with_threads(int num_threads, const std::function<void()>& body) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(num_threads);
  body();
  omp_set_num_threads(before);
}

double dot(const Tensor& a, const Tensor& b) {
  CHECK(a.numel() == b.numel(), a.str(), " and ", b.str());
  double sum = 0;
  for (int64_t i = 0; i < a.numel(); ++i)
    sum += read(a.raw(), a.dtype(), offset_of(a, i)) * read(b.raw(), b.dtype(), offset_of(b, i));
  return sum;
}

}  // namespace palimpsest::support
