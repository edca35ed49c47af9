// What tests of ops and layers share: tensors that own their memory and notice stray writes, random values, closeness,
// and gradients by central differences. Values travel as f64 in logical order, whatever dtype and row stride hold them.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "kernels/stream.h"

namespace palimpsest::support {

// A tensor with its memory. Rows may be spaced by row_gap elements. Elements, gaps and the zones before and after start
// as NaN (-77 for integers), so that an output nobody wrote, or an input read past its end, is seen.
class OwnedTensor {
 public:
  OwnedTensor(DType dtype, Shape shape, int64_t row_gap = 0);
  OwnedTensor(OwnedTensor&&) noexcept = default;
  OwnedTensor& operator=(OwnedTensor&&) noexcept = default;

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }  // NOLINT: stands for the tensor in calls of ops
  // False when a gap or a zone was written to.
  bool surroundings_untouched() const;

  // The same tensor, with its gaps and zones, in memory of the arena, which may be a GPU's; and back from there.
  Tensor copy_to(const Stream& stream, Arena& arena) const;
  void copy_from(const Stream& stream, const Tensor& there);

 private:
  std::vector<std::byte> memory_;
  std::vector<std::byte> untouched_;  // memory_ as it was made
  Tensor tensor_;
};

// A stream that executes on the CPU, with its own scratch region.
class CpuStream {
 public:
  explicit CpuStream(int64_t scratch_bytes = int64_t{16} << 20)
      : scratch_(std::make_unique<Arena>("scratch", Device::kCpu, scratch_bytes)), stream_(Device::kCpu, *scratch_) {}
  operator Stream&() { return stream_; }  // NOLINT: stands for the stream in calls of ops
  Arena& scratch() { return *scratch_; }

 private:
  std::unique_ptr<Arena> scratch_;
  Stream stream_;
};

// Whether the tests of this program have a GPU to run on.
bool has_gpu();
// Fills the whole arena, host or GPU, with bytes that are NaN as f32, f64 and bf16. With PALIMPSEST_LEAVE_MEMORY set a
// GPU's stays as it came.
void fill_with_nan(const Stream& stream, Arena& arena);

std::vector<double> values_of(const Tensor& tensor);
void set_values(const Tensor& tensor, const std::vector<double>& values);
void set_value(const Tensor& tensor, int64_t index, double value);
void fill(const Tensor& tensor, double value);
void fill_nan(const Tensor& tensor);
// Normal values with this mean and deviation, a pure function of the seed.
void fill_random(const Tensor& tensor, uint64_t seed, double deviation = 1.0, double mean = 0.0);
OwnedTensor random_tensor(DType dtype, Shape shape, uint64_t seed, double deviation = 1.0, int64_t row_gap = 0);
// The same values in another dtype.
OwnedTensor converted(const Tensor& tensor, DType dtype, int64_t row_gap = 0);

// Norm of the difference over the norm of the reference (the plain norm of the difference for a zero reference);
// infinity when a value is not finite or the sizes differ.
double relative_error(const std::vector<double>& got, const std::vector<double>& reference);
// Success when relative_error is at most the tolerance; a failure prints it and the worst element.
::testing::AssertionResult is_close(const std::vector<double>& got, const std::vector<double>& reference,
                                    double tolerance);
::testing::AssertionResult is_close(const Tensor& got, const Tensor& reference, double tolerance);
::testing::AssertionResult is_close(const Tensor& got, const std::vector<double>& reference, double tolerance);
::testing::AssertionResult is_bit_identical(const Tensor& got, const Tensor& reference);

// Compares dx, the gradient of loss() with respect to x (f64), with differences of fourth order at up to max_elements
// elements spread over x. loss must be smooth within 2 * step of every element.
::testing::AssertionResult gradient_matches(const std::function<double()>& loss, const Tensor& x, const Tensor& dx,
                                            double tolerance = 1e-6, int64_t max_elements = 100, double step = 1e-3);

// Runs body with this many OpenMP threads.
void with_threads(int num_threads, const std::function<void()>& body);

// sum of a * b: the loss whose gradient with respect to a is b.
double dot(const Tensor& a, const Tensor& b);

}  // namespace palimpsest::support
