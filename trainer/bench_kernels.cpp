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

constexpr char kLabelSeparator = '|';  // between the path that ran and the sizes

// What no op can be faster than.
struct Ceilings {
  double flops_per_second = 0.0, bytes_per_second = 0.0;
};

Ceilings measure_ceilings(Device device, DType dtype) {
  const int64_t kElements = int64_t{device == Device::kCpu ? 16 : 256} << 20;  // more than caches hold
  constexpr int kTries = 5;
  Arena memory("ceilings", device, std::max(kMatmulBytes, 2 * kElements * size_of(DType::kF32)));
  Arena scratch("scratch", device, 0);
  Ceilings ceilings = {.flops_per_second = measure_matmul_flops(device, dtype, memory)};
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
  int64_t count = 0;
  for (const Tensor& tensor : tensors) count += tensor.numel();
  values.reserve(static_cast<size_t>(count));
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

// What is timed, in one dtype.
struct BenchCase {
  const BenchOp* op;
  const BenchOp* small;  // the same op on fewer tokens and words, for its error
  Device device;
  DType dtype;
  Ceilings ceilings;
};

// The results of an op that is run once.
std::vector<double> results_of(const BenchOp& op, Device device, DType dtype) {
  const ReadyOp ready(op, device, dtype);
  ready.op().run();
  return values_of(ready.op().writes);
}

// The norm of the difference over the norm of what is expected.
double error_of(const std::vector<double>& values, const std::vector<double>& expected) {
  CHECK(values.size() == expected.size());
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    difference += (values[i] - expected[i]) * (values[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

// Runs cases. The library calls with one case several times, each with more repeats; what takes longer than those is
// done once: an op's results in f64, for all its dtypes, and its tensors, for all calls with a case.
class Runner {
 public:
  void run(benchmark::State& state, const BenchCase& bench) {
    if (&bench != ready_for_) make_ready(bench);
    std::vector<double> times;
    for ([[maybe_unused]] auto step : state) {
      times.push_back(seconds_of(ready_->stream(), ready_->op().run));
      state.SetIterationTime(times.back());
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    const double median = times[times.size() / 2];
    const Ceilings& ceilings = bench.ceilings;
    const PreparedOp& prepared = ready_->op();
    const double bytes = total_bytes(prepared.reads) + total_bytes(prepared.writes);
    const double least = std::max(prepared.flops / ceilings.flops_per_second, bytes / ceilings.bytes_per_second);
    state.counters["ms"] = 1e3 * median;
    state.counters["tflops_per_second"] = 1e-12 * prepared.flops / median;
    state.counters["tbytes_per_second"] = 1e-12 * bytes / median;
    state.counters["of_ceiling"] = least / median;
    state.counters["error"] = error_;
    state.SetLabel(path_ + kLabelSeparator + prepared.sizes);
  }

 private:
  void make_ready(const BenchCase& bench) {
    ready_.reset();  // its memory first
    if (bench.small != expected_of_) expected_ = results_of(*bench.small, Device::kCpu, DType::kF64);
    expected_of_ = bench.small;
    error_ = error_of(results_of(*bench.small, bench.device, bench.dtype), expected_);
    ready_.emplace(*bench.op, bench.device, bench.dtype);
    take_last_path(ready_->stream());
    ready_->op().run();
    path_ = take_last_path(ready_->stream());
    ready_for_ = &bench;
  }

  const BenchCase* ready_for_ = nullptr;
  std::optional<ReadyOp> ready_;
  std::string path_;
  double error_ = 0.0;
  const BenchOp* expected_of_ = nullptr;
  std::vector<double> expected_;
};

// Takes the library's results as they come.
class Collector : public benchmark::BenchmarkReporter {
 public:
  Collector(const std::vector<BenchCase>& cases, ProgressBar& progress) : cases_(cases), progress_(progress) {}

  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      const BenchCase& bench = cases_[results_.size()];  // run in the order in which they were registered
      const size_t separator = run.report_label.find(kLabelSeparator);
      const std::string ran = run.report_label.substr(0, separator);
      const std::string& kind = ran.empty() ? bench.op->form : ran;
      const auto counter = [&](const char* name) { return run.counters.at(name).value; };
      results_.push_back({.name = bench.op->name,
                          .sizes = run.report_label.substr(separator + 1),
                          .dtype = name_of(bench.dtype),
                          .path = std::string(name_of(bench.device)) + (kind.empty() ? "" : ", " + kind),
                          .ms = counter("ms"),
                          .tflops_per_second = counter("tflops_per_second"),
                          .tbytes_per_second = counter("tbytes_per_second"),
                          .of_ceiling = counter("of_ceiling"),
                          .error = counter("error")});
      progress_.add(1);
    }
  }
  std::vector<KernelBench> take_results() { return std::move(results_); }

 private:
  const std::vector<BenchCase>& cases_;
  ProgressBar& progress_;
  std::vector<KernelBench> results_;
};

}  // namespace

std::vector<KernelBench> bench_kernels(const Config& config, const KernelBenchOptions& options, Console& console) {
  set_threads(config);
  const Device device = device_of(config);
  if (device == Device::kCuda) use_gpu(0);
  std::vector<DType> dtypes = {types_of(config).dtype};
  if (dtypes[0] == DType::kBF16) dtypes.push_back(DType::kF32);
  // Errors are those of few tokens and words: the reference in f64 runs on the CPU.
  constexpr int64_t kTokensForError = 512, kWordsForError = 4096;
  Config small = config;
  small.train.sequences_per_step = small.train.micro_batch = 1;
  small.data.sequence_length = std::min(config.data.sequence_length, kTokensForError);
  small.model.vocab_size = std::min(config.model.vocab_size, kWordsForError);
  const std::vector<BenchOp> ops = bench_ops(config), small_ops = bench_ops(small);
  std::vector<Ceilings> ceilings;
  for (const DType dtype : dtypes) {
    ceilings.push_back(measure_ceilings(device, dtype));
    console.info(fmt::format(
        "ceilings in {}: {:.2f} TFLOP/s of the best of five products of square matrices, {:.3f} TB/s of a copy",
        name_of(dtype), 1e-12 * ceilings.back().flops_per_second, 1e-12 * ceilings.back().bytes_per_second));
  }
  std::vector<BenchCase> cases;
  for (size_t i = 0; i < ops.size(); ++i)
    for (size_t d = 0; d < dtypes.size(); ++d)
      if (ops[i].name.find(options.only) != std::string::npos)
        cases.push_back({&ops[i], &small_ops[i], device, dtypes[d], ceilings[d]});
  if (cases.empty()) throw_user_error("--only ", options.only, ": no op has this in its name");
  Runner runner;
  for (const BenchCase& bench : cases)
    benchmark::RegisterBenchmark(bench.op->name.c_str(), [&](benchmark::State& state) { runner.run(state, bench); })
        ->UseManualTime()
        ->MinTime(options.seconds_an_op);
  std::vector<KernelBench> results;
  {
    ProgressBar progress(console, "bench kernels", static_cast<int64_t>(cases.size()), "ops");
    Collector collector(cases, progress);
    benchmark::RunSpecifiedBenchmarks(&collector, "all");
    results = collector.take_results();
  }
  benchmark::ClearRegisteredBenchmarks();
  CHECK(results.size() == cases.size());
  return results;
}

std::string to_text(const std::vector<KernelBench>& benches) {
  std::string text = fmt::format("{:<30} {:>5} {:>10} {:>9} {:>8} {:>8} {:>8}  {:<16} {}\n", "op", "", "ms", "TFLOP/s",
                                 "TB/s", "of best", "error", "path", "sizes");
  for (const KernelBench& bench : benches)
    text +=
        fmt::format("{:<30} {:>5} {:>10.3f} {:>9} {:>8.3f} {:>7.1f}% {:>8.1e}  {:<16} {}\n", bench.name, bench.dtype,
                    bench.ms, bench.tflops_per_second > 0 ? fmt::format("{:.3f}", bench.tflops_per_second) : "",
                    bench.tbytes_per_second, 100 * bench.of_ceiling, bench.error, bench.path, bench.sizes);
  return text;
}

std::string to_json(const std::vector<KernelBench>& benches) {
  std::string items;
  for (const KernelBench& bench : benches)
    items += (items.empty() ? "" : ",\n ") + JsonObject()
                                                 .add("op", bench.name)
                                                 .add("sizes", bench.sizes)
                                                 .add("dtype", bench.dtype)
                                                 .add("path", bench.path)
                                                 .add("ms", bench.ms)
                                                 .add("tflops_per_second", bench.tflops_per_second)
                                                 .add("tbytes_per_second", bench.tbytes_per_second)
                                                 .add("of_ceiling", bench.of_ceiling)
                                                 .add("error", bench.error)
                                                 .text();
  return "[" + items + "]";
}

}  // namespace palimpsest
