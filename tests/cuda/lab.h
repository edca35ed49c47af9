// An op run twice on the same numbers: on the CPU in f64, and on a GPU in f32 or bf16. A test describes its tensors and
// calls the op once, in a function that takes a Lab.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/documents.h"
#include "kernels/stream.h"
#include "tests/support/tensors.h"

namespace palimpsest::support {

class Lab {
 public:
  Lab(Device device, DType dtype) : device_(device), dtype_(dtype) {}

  // Tensors of activations, with gaps between their rows where row_gap says so. Random numbers that bf16 holds exactly;
  // equal names are equal numbers in every lab. The second kind is f32 (f64): weights, statistics.
  Tensor input(const std::string& name, Shape shape, double deviation = 1.0, int64_t row_gap = 0);
  Tensor weight(const std::string& name, Shape shape, double deviation = 1.0);
  Tensor integers(const std::string& name, const std::vector<int64_t>& values);
  Tensor wide(const std::string& name, const std::vector<double>& values);  // f64 on every device
  // Results. Overwritten ones start as NaN, accumulated ones and those that an op works on in place as an input.
  Tensor output(const std::string& name, Shape shape, int64_t row_gap = 0);
  Tensor statistics(const std::string& name, Shape shape);
  Tensor output_integers(const std::string& name, Shape shape);
  Tensor in_place(const std::string& name, Shape shape, double deviation = 1.0, int64_t row_gap = 0);
  Tensor accumulated(const std::string& name, Shape shape);
  Tensor accumulated_wide(const std::string& name, const std::vector<double>& values);

  Stream& stream() { return *stream_; }
  Arena& arena() { return *tensors_; }  // for tensors that are neither given nor compared
  DType dtype() const { return dtype_; }
  DType statistics_dtype() const { return device_ == Device::kCpu ? DType::kF64 : DType::kF32; }

  // Calls body once for the plan and once for its results, in memory that planning found.
  std::map<std::string, std::vector<double>> run(const std::function<void(Lab&)>& body);

 private:
  struct Entry {
    OwnedTensor host;
    Tensor placed;
    bool is_result;
  };
  Tensor add(const std::string& name, DType dtype, Shape shape, int64_t row_gap, bool is_result,
             const std::function<void(const Tensor&)>& fill_values);

  Device device_;
  DType dtype_;
  Arena* tensors_ = nullptr;
  Stream* stream_ = nullptr;
  std::map<std::string, Entry> entries_;
};

struct Tolerance {
  double f32 = 2e-5, bf16 = 1e-2;
};

// Runs body on the CPU in f64 and on the GPU in f32 and bf16: results must agree, a second run on the GPU must be
// bit-identical, and memory around results and inputs must stay as it was. Skips without a GPU.
void expect_same_on_gpu(const std::function<void(Lab&)>& body, const Tolerance& tolerance = {});

// 1, 63, 65 and 200 tokens.
std::vector<int64_t> odd_lengths();
// Documents of 1, 3, 37, 0 and 130 tokens and what is left of 200.
Documents mixed_documents();
// One document of each odd length, and the mixed ones.
std::vector<Documents> odd_documents();

}  // namespace palimpsest::support

#define SKIP_WITHOUT_GPU() \
  if (!::palimpsest::support::has_gpu()) GTEST_SKIP() << "there is no GPU that this build can use"
