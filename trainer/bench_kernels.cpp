// Times the ops of trainer/bench_ops.h with Google Benchmark.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "kernels/device.h"
#include "kernels/elementwise.h"
#include "trainer/bench.h"
#include "trainer/bench_ops.h"
#include "trainer/flops.h"
#include "trainer/json_object.h"
#include "trainer/workbench.h"

namespace palimpsest {

namespace {

template <class Work>
double seconds_of(const Stream& stream, Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  synchronize(stream);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// What no op can be faster than.
struct Ceilings {
  double flops_per_second = 0.0, bytes_per_second = 0.0;
};

Ceilings measure_ceilings(Device device) {
  constexpr int64_t kElements = int64_t{16} << 20;  // more than caches hold
  constexpr int kTries = 5;
  Arena memory("ceilings", device, std::max(kMatmulBytes, 2 * kElements * size_of(DType::kF32)));
  Arena scratch("scratch", device, 0);
  Ceilings ceilings = {.flops_per_second =
                           measure_matmul_flops(device, device == Device::kCuda ? DType::kBF16 : DType::kF32, memory)};
  Stream stream(device, scratch);
  const Tensor x = memory.allocate(DType::kF32, {kElements}), y = memory.allocate(DType::kF32, {kElements});
  fill_zero(stream, x);
  fill_zero(stream, y);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kTries; ++i) best = std::min(best, seconds_of(stream, [&] { copy(stream, y, x); }));
  ceilings.bytes_per_second = static_cast<double>(x.bytes() + y.bytes()) / best;
  return ceilings;
}

// An op with the memory that it needs, found by a rehearsal.
class ReadyOp {
 public:
  ReadyOp(const BenchOp& op, Device device, DType dtype) {
    Arena memory = Arena::planning("tensors", device), scratch = Arena::planning("scratch", device);
    Stream planning(device, scratch);
    BenchPlace rehearsal(planning, memory, dtype);
    op.prepare(rehearsal).run();
    memory_.emplace("tensors", device, memory.peak());
    scratch_.emplace("scratch", device, scratch.peak());
    stream_.emplace(device, *scratch_);
    place_.emplace(*stream_, *memory_, dtype);
    op_ = op.prepare(*place_);
  }
  const PreparedOp& op() const { return op_; }
  const Stream& stream() const { return *stream_; }

 private:
  std::optional<Arena> memory_, scratch_;
  std::optional<Stream> stream_;
  std::optional<BenchPlace> place_;
  PreparedOp op_;
};

double total_bytes(const std::vector<Tensor>& tensors) {
  double bytes = 0.0;
  for (const Tensor& tensor : tensors) bytes += static_cast<double>(tensor.bytes());
  return bytes;
}

std::vector<double> values_of(const std::vector<Tensor>& tensors) {
  std::vector<double> values;
  for (const Tensor& tensor : tensors) {
    HostCopy host(tensor);
    const Tensor& copied = host.fetch().tensor();
    for (int64_t i = 0; i < copied.numel(); ++i)
      values.push_back(copied.dtype() == DType::kF64   ? copied.data<double>()[i]
                       : copied.dtype() == DType::kF32 ? static_cast<double>(copied.data<float>()[i])
                                                       : static_cast<double>(to_float(copied.data<BF16>()[i])));
  }
  return values;
}

// The norm of the difference over the norm of the same op's result in f64 on the CPU.
double error_of_first_run(const BenchOp& op, const ReadyOp& ready) {
  ready.op().run();
  const std::vector<double> values = values_of(ready.op().writes);
  const ReadyOp exact(op, Device::kCpu, DType::kF64);
  exact.op().run();
  const std::vector<double> expected = values_of(exact.op().writes);
  CHECK(values.size() == expected.size());
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    difference += (values[i] - expected[i]) * (values[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

void run(benchmark::State& state, const BenchOp& op, Device device, const Ceilings& ceilings) {
  const ReadyOp ready(op, device, DType::kF32);
  const double error = error_of_first_run(op, ready);
  double best = std::numeric_limits<double>::infinity();
  for ([[maybe_unused]] auto step : state) {
    const double taken = seconds_of(ready.stream(), ready.op().run);
    state.SetIterationTime(taken);
    best = std::min(best, taken);
  }
  const PreparedOp& prepared = ready.op();
  const double bytes = total_bytes(prepared.reads) + total_bytes(prepared.writes);
  const double least = std::max(prepared.flops / ceilings.flops_per_second, bytes / ceilings.bytes_per_second);
  state.counters["ms"] = 1e3 * best;
  state.counters["gflops_per_second"] = 1e-9 * prepared.flops / best;
  state.counters["gbytes_per_second"] = 1e-9 * bytes / best;
  state.counters["of_ceiling"] = least / best;
  state.counters["error"] = error;
  state.SetLabel(prepared.sizes);
}

// Takes the library's results as they come.
class Collector : public benchmark::BenchmarkReporter {
 public:
  Collector(const std::vector<BenchOp>& ops, Device device, ProgressBar& progress)
      : ops_(ops), device_(device), progress_(progress) {}

  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      const BenchOp& op = ops_[results_.size()];  // run in the order in which they were registered
      const auto counter = [&](const char* name) { return run.counters.at(name).value; };
      results_.push_back({.name = op.name,
                          .sizes = run.report_label,
                          .path = std::string(name_of(device_)) + (op.form.empty() ? "" : ", " + op.form),
                          .ms = counter("ms"),
                          .gflops_per_second = counter("gflops_per_second"),
                          .gbytes_per_second = counter("gbytes_per_second"),
                          .of_ceiling = counter("of_ceiling"),
                          .error = counter("error")});
      progress_.add(1);
    }
  }
  std::vector<KernelBench> take_results() { return std::move(results_); }

 private:
  const std::vector<BenchOp>& ops_;
  Device device_;
  ProgressBar& progress_;
  std::vector<KernelBench> results_;
};

}  // namespace

std::vector<KernelBench> bench_kernels(const Config& config, double seconds_an_op, Console& console) {
  set_threads(config);
  const Device device = device_of(config);
  const Ceilings ceilings = measure_ceilings(device);
  console.info(fmt::format("ceilings: {:.1f} GFLOP/s of the best of five 2048^3 products, {:.1f} GB/s of a copy",
                           1e-9 * ceilings.flops_per_second, 1e-9 * ceilings.bytes_per_second));
  const std::vector<BenchOp> ops = bench_ops(config);
  for (const BenchOp& op : ops)
    benchmark::RegisterBenchmark(op.name.c_str(), [&](benchmark::State& state) { run(state, op, device, ceilings); })
        ->UseManualTime()
        ->MinTime(seconds_an_op);
  std::vector<KernelBench> results;
  {
    ProgressBar progress(console, "bench kernels", static_cast<int64_t>(ops.size()), "ops");
    Collector collector(ops, device, progress);
    benchmark::RunSpecifiedBenchmarks(&collector, "all");
    results = collector.take_results();
  }
  benchmark::ClearRegisteredBenchmarks();
  CHECK(results.size() == ops.size());
  return results;
}

std::string to_text(const std::vector<KernelBench>& benches) {
  std::string text = fmt::format("{:<24} {:>10} {:>10} {:>8} {:>8} {:>8}  {:<16} {}\n", "op", "ms", "GFLOP/s", "GB/s",
                                 "of best", "error", "path", "sizes, f32");
  for (const KernelBench& bench : benches)
    text += fmt::format("{:<24} {:>10.3f} {:>10} {:>8.1f} {:>7.1f}% {:>8.1e}  {:<16} {}\n", bench.name, bench.ms,
                        bench.gflops_per_second > 0 ? fmt::format("{:.1f}", bench.gflops_per_second) : "",
                        bench.gbytes_per_second, 100 * bench.of_ceiling, bench.error, bench.path, bench.sizes);
  return text;
}

std::string to_json(const std::vector<KernelBench>& benches) {
  std::string items;
  for (const KernelBench& bench : benches)
    items += (items.empty() ? "" : ",\n ") + JsonObject()
                                                 .add("op", bench.name)
                                                 .add("sizes", bench.sizes)
                                                 .add("path", bench.path)
                                                 .add("ms", bench.ms)
                                                 .add("gflops_per_second", bench.gflops_per_second)
                                                 .add("gbytes_per_second", bench.gbytes_per_second)
                                                 .add("of_ceiling", bench.of_ceiling)
                                                 .add("error", bench.error)
                                                 .text();
  return "[" + items + "]";
}

}  // namespace palimpsest
