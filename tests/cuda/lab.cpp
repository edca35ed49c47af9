#include "tests/cuda/lab.h"

#include <fmt/format.h>

#include "kernels/device.h"
#include "kernels/random.h"

namespace palimpsest::support {

namespace {

using Results = std::map<std::string, std::vector<double>>;

Results run_on(Device device, DType dtype, const std::function<void(Lab&)>& body) {
  return Lab(device, dtype).run(body);
}

void expect_equal(const Results& got, const Results& reference, double tolerance, const char* what) {
  EXPECT_EQ(got.size(), reference.size());
  for (const auto& [name, expected] : reference) {
    ASSERT_EQ(got.count(name), 1U) << name;
    EXPECT_TRUE(is_close(got.at(name), expected, tolerance)) << what << ": " << name;
  }
}

}  // namespace

Tensor Lab::add(const std::string& name, DType dtype, Shape shape, int64_t row_gap, bool is_result,
                const std::function<void(const Tensor&)>& fill_values) {
  Entry& entry =
      entries_.insert_or_assign(name, Entry{OwnedTensor(dtype, shape, row_gap), {}, is_result}).first->second;
  fill_values(entry.host);
  entry.placed = device_ == Device::kCpu ? entry.host.tensor() : entry.host.copy_to(*stream_, *tensors_);
  return entry.placed;
}

namespace {

std::function<void(const Tensor&)> random_values(const std::string& name, double deviation) {
  return [=](const Tensor& tensor) {
    for (int64_t i = 0; i < tensor.numel(); ++i)
      set_value(
          tensor, i,
          to_float(to_bf16(static_cast<float>(deviation * random_normal(7, hash_of(name), static_cast<uint64_t>(i))))));
  };
}

void leave_as_nan(const Tensor&) {}

std::function<void(const Tensor&)> given_values(const std::vector<double>& values) {
  return [=](const Tensor& tensor) { set_values(tensor, values); };
}

}  // namespace

Tensor Lab::input(const std::string& name, Shape shape, double deviation, int64_t row_gap) {
  return add(name, dtype_, shape, row_gap, false, random_values(name, deviation));
}
Tensor Lab::weight(const std::string& name, Shape shape, double deviation) {
  return add(name, statistics_dtype(), shape, 0, false, random_values(name, deviation));
}
Tensor Lab::integers(const std::string& name, const std::vector<int64_t>& values) {
  return add(name, DType::kI32, {static_cast<int64_t>(values.size())}, 0, false,
             given_values({values.begin(), values.end()}));
}
Tensor Lab::wide(const std::string& name, const std::vector<double>& values) {
  return add(name, DType::kF64, {static_cast<int64_t>(values.size())}, 0, false, given_values(values));
}
Tensor Lab::output(const std::string& name, Shape shape, int64_t row_gap) {
  return add(name, dtype_, shape, row_gap, true, leave_as_nan);
}
Tensor Lab::statistics(const std::string& name, Shape shape) {
  return add(name, statistics_dtype(), shape, 0, true, leave_as_nan);
}
Tensor Lab::output_integers(const std::string& name, Shape shape) {
  return add(name, DType::kI32, shape, 0, true, leave_as_nan);
}
Tensor Lab::in_place(const std::string& name, Shape shape, double deviation, int64_t row_gap) {
  return add(name, dtype_, shape, row_gap, true, random_values(name, deviation));
}
Tensor Lab::accumulated(const std::string& name, Shape shape) {
  return add(name, statistics_dtype(), shape, 0, true, random_values(name, 1.0));
}
Tensor Lab::accumulated_wide(const std::string& name, const std::vector<double>& values) {
  return add(name, DType::kF64, {static_cast<int64_t>(values.size())}, 0, true, given_values(values));
}

Results Lab::run(const std::function<void(Lab&)>& body) {
  Arena planned_scratch = Arena::planning("scratch", device_), planned_tensors = Arena::planning("tensors", device_);
  Stream planning(device_, planned_scratch);
  stream_ = &planning;
  tensors_ = &planned_tensors;
  body(*this);
  Arena scratch("scratch", device_, planned_scratch.peak()), tensors("tensors", device_, planned_tensors.peak());
  Stream stream(device_, scratch);
  fill_with_nan(stream, scratch);
  fill_with_nan(stream, tensors);
  stream_ = &stream;
  tensors_ = &tensors;
  body(*this);
  EXPECT_EQ(scratch.used(), 0) << "bytes of workspace were left";
  Results results;
  for (auto& [name, entry] : entries_) {
    const std::vector<double> before = values_of(entry.host);
    if (device_ == Device::kCuda) entry.host.copy_from(stream, entry.placed);
    EXPECT_TRUE(entry.host.surroundings_untouched()) << name;
    if (entry.is_result) {
      results[name] = values_of(entry.host);
    } else {
      EXPECT_TRUE(device_ == Device::kCpu || values_of(entry.host) == before) << "input " << name << " changed";
    }
  }
  entries_.clear();
  return results;
}

void expect_same_on_gpu(const std::function<void(Lab&)>& body, const Tolerance& tolerance) {
  SKIP_WITHOUT_GPU();
  const Results reference = run_on(Device::kCpu, DType::kF64, body);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Results first = run_on(Device::kCuda, dtype, body), second = run_on(Device::kCuda, dtype, body);
    expect_equal(first, reference, dtype == DType::kF32 ? tolerance.f32 : tolerance.bf16, name_of(dtype));
    EXPECT_TRUE(first == second) << name_of(dtype) << ": two runs differ";
  }
}

std::vector<int64_t> odd_lengths() {
  return {1, 63, 65, 200};
}

Documents mixed_documents() {
  return Documents({0, 1, 4, 41, 41, 171, 200});
}

std::vector<Documents> odd_documents() {
  std::vector<Documents> all;
  for (const int64_t length : odd_lengths()) all.push_back(Documents::single(length));
  all.push_back(mixed_documents());
  return all;
}

}  // namespace palimpsest::support
