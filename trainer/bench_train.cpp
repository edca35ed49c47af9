#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <vector>

#include "kernels/device.h"
#include "kernels/random.h"
#include "model/local_input.h"
#include "parallel/agreement.h"
#include "parallel/mpi_session.h"
#include "trainer/bench.h"
#include "trainer/flops.h"
#include "trainer/json_object.h"
#include "trainer/memory_plan.h"
#include "trainer/train_step.h"
#include "trainer/workbench.h"

namespace palimpsest {

namespace {

constexpr int64_t kWarmupSteps = 2;

int64_t rows_of_rank(const Config& config, const Mesh& mesh) {
  return config.train.sequences_per_step / mesh.data().size();
}

// This rank's micro-batches of a step of random tokens, in an arena of their own.
class RandomBatches {
 public:
  RandomBatches(const Config& config, const Mesh& mesh)
      : row_length_(config.data.sequence_length),
        num_tokens_(rows_of_rank(config, mesh) * row_length_),
        arena_("random tokens", Device::kCpu, bytes(config, mesh)) {
    const Tensor tokens = arena_.allocate(DType::kI32, {num_tokens_});
    const Tensor targets = arena_.allocate(DType::kI32, {num_tokens_});
    const Tensor positions = arena_.allocate(DType::kI32, {num_tokens_});
    const uint64_t stream = hash_of("bench tokens");
    const int64_t first = mesh.data().rank() * num_tokens_;
    const auto draw = [&](int64_t i) {
      return static_cast<int32_t>(random_bits(1, stream, static_cast<uint64_t>(first + i)) %
                                  static_cast<uint64_t>(config.model.vocab_size));
    };
    for (int64_t i = 0; i < num_tokens_; ++i) {
      tokens.data<int32_t>()[i] = draw(i);
      targets.data<int32_t>()[i] = draw(i + 1);
      positions.data<int32_t>()[i] = static_cast<int32_t>(i % row_length_);
    }
    const int64_t num_rows = rows_of_rank(config, mesh);
    for (int64_t row = 0; row < num_rows; row += config.train.micro_batch) {
      const int64_t rows = std::min(config.train.micro_batch, num_rows - row);
      const auto cut = [&](const Tensor& all) { return all.rows(row * row_length_, rows * row_length_); };
      const ModelInput whole = {
          .tokens = cut(tokens),
          .targets = cut(targets),
          .sequence = {.documents = Documents::rows(rows, row_length_), .positions = cut(positions)}};
      parts_.emplace_back(whole, cut_rows(mesh, rows, row_length_), mesh.sequence().rank());
      batches_.push_back(parts_.back().input());
    }
  }

  const std::vector<ModelInput>& batches() const { return batches_; }
  static int64_t bytes(const Config& config, const Mesh& mesh) {
    return 3 * (rows_of_rank(config, mesh) * config.data.sequence_length * 4 + Arena::kAlignment);
  }

 private:
  int64_t row_length_, num_tokens_;
  Arena arena_;
  std::vector<LocalInput> parts_;
  std::vector<ModelInput> batches_;
};

struct StepTimes {
  double forward_backward_ms, optimizer_ms;
  double total_ms() const { return forward_backward_ms + optimizer_ms; }
};

StepTimes timed_step(TrainStep& step, const Stream& stream, const std::vector<ModelInput>& batches,
                     const Config& config, const Console& console) {
  const double begin = console.seconds();
  step.begin(tokens_per_step(config));
  for (const ModelInput& batch : batches)
    step.accumulate(batch, &batch == &batches.back() ? MicroBatch::kLast : MicroBatch::kInner);
  synchronize(stream);
  const double middle = console.seconds();
  const StepResult result = step.finish(config.optimizer.lr);
  CHECK(result.applied, "a step of the bench was not finite: loss ", result.loss);
  return {1e3 * (middle - begin), 1e3 * (console.seconds() - middle)};
}

MemoryPlan plan_of(const Config& config, Workbench& bench) {
  const BatchLimits limits = {.train_rows = std::min(config.train.micro_batch, rows_of_rank(config, bench.mesh())),
                              .row_length = config.data.sequence_length};
  MemoryPlan plan{.regions = bench.rehearse_training(limits, train_step_options(config))};
  plan.add_copies(bench.mesh());
  plan.others.push_back({"random tokens", RandomBatches::bytes(config, bench.mesh())});
  // The matrix products of the reference use the activations' memory where it is large enough.
  if (plan.regions.activations < kMatmulBytes) plan.others.push_back({"reference products", kMatmulBytes});
  return plan;
}

}  // namespace

TrainBench bench_train(const Config& config, const Mesh& mesh, int64_t steps, Console& console) {
  if (config.train.sequences_per_step % mesh.data().size() != 0)
    throw_user_error("train.sequences_per_step is ", config.train.sequences_per_step,
                     ", must be a multiple of parallel.data = ", mesh.data().size());
  Workbench bench(config, mesh);
  console.info(flops_table(bench.model(), config.data.sequence_length));
  const MemoryPlan plan = plan_of(config, bench);
  console.info("memory\n" + to_text(plan));
  const int64_t in_use_before = memory_in_use(bench.device());

  agree(mesh.world(), [&] { bench.allocate(ParameterUse::kTraining, plan.regions); });
  bench.share_memory();
  bench.registry().initialize(static_cast<uint64_t>(config.run.seed), config.model.initializer_range);
  bench.registry().zero_optimizer(bench.stream());
  TrainStep step(bench.model(), bench.registry(), bench.context(), bench.regions().optimizer,
                 train_step_options(config));
  const RandomBatches batches(config, mesh);
  std::vector<StepTimes> times;
  const SentBytes sent_before = mesh.bytes_sent();
  run_together(mesh.world(), [&] {
    ProgressBar progress(console, "bench train", kWarmupSteps + steps, "steps");
    for (int64_t i = 0; i < kWarmupSteps + steps; ++i) {
      const StepTimes taken = timed_step(step, bench.stream(), batches.batches(), config, console);
      if (i >= kWarmupSteps) times.push_back(taken);
      progress.add(1);
    }
  });
  const SentBytes sent = mesh.bytes_sent() - sent_before;
  std::sort(times.begin(), times.end(), [](const auto& a, const auto& b) { return a.total_ms() < b.total_ms(); });
  const StepTimes& median = times[times.size() / 2];

  TrainBench result;
  result.steps = steps;
  result.ranks = mesh.world().size();
  result.threads = omp_get_max_threads();
  result.step_ms = median.total_ms();
  result.forward_backward_ms = median.forward_backward_ms;
  result.optimizer_ms = median.optimizer_ms;
  const auto tokens = static_cast<double>(tokens_per_step(config));
  result.tokens_per_second = 1e3 * tokens / median.total_ms();
  result.flops_per_step = tokens * bench.model().flops_per_token(config.data.sequence_length);
  result.flops_per_second = 1e3 * result.flops_per_step / median.total_ms();
  result.reference_flops_per_second =
      sum_over(mesh.world(), measure_matmul_flops(bench.device(), bench.dtype(), bench.regions().activations));
  result.mfu = result.flops_per_second / result.reference_flops_per_second;
  result.predicted_bytes = plan.total();
  result.measured_bytes = memory_in_use(bench.device()) - in_use_before;
  result.sent = sent / (kWarmupSteps + steps);
  return result;
}

std::string to_text(const TrainBench& bench) {
  std::string text = fmt::format(
      "{:.1f} ms a step (forward and backward {:.1f}, optimizer {:.1f}), {:.0f} tokens/s, median of {} steps on {} "
      "ranks of {} threads\n"
      "{:.2f} GFLOP a step, {:.1f} GFLOP/s; the best of five large products {:.1f} GFLOP/s: mfu {:.1f} %\n"
      "memory: predicted {:.1f} MiB, peak grew by {:.1f} MiB ({:+.1f} %)\n",
      bench.step_ms, bench.forward_backward_ms, bench.optimizer_ms, bench.tokens_per_second, bench.steps, bench.ranks,
      bench.threads, bench.flops_per_step / 1e9, bench.flops_per_second / 1e9, bench.reference_flops_per_second / 1e9,
      100 * bench.mfu, in_mib(bench.predicted_bytes), in_mib(bench.measured_bytes),
      100.0 * static_cast<double>(bench.measured_bytes - bench.predicted_bytes) /
          static_cast<double>(bench.predicted_bytes));
  if (bench.ranks > 1) text += "bytes that the first rank sends in a step\n" + to_text(bench.sent);
  return text;
}

std::string to_json(const TrainBench& bench) {
  JsonObject sent;
  bench.sent.for_each_axis([&](const char* axis, int64_t bytes) { sent.add(axis, bytes); });
  return JsonObject()
      .add("steps", bench.steps)
      .add("ranks", bench.ranks)
      .add("threads", bench.threads)
      .add("step_ms", bench.step_ms)
      .add("forward_backward_ms", bench.forward_backward_ms)
      .add("optimizer_ms", bench.optimizer_ms)
      .add("tokens_per_second", bench.tokens_per_second)
      .add("flops_per_step", bench.flops_per_step)
      .add("flops_per_second", bench.flops_per_second)
      .add("reference_flops_per_second", bench.reference_flops_per_second)
      .add("mfu", bench.mfu)
      .add("predicted_bytes", bench.predicted_bytes)
      .add("measured_bytes", bench.measured_bytes)
      .add("sent_bytes", sent)
      .text();
}

}  // namespace palimpsest
