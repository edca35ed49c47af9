#include "trainer/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "data/file_ops.h"
#include "kernels/trace.h"
#include "parallel/agreement.h"
#include "parallel/mpi_session.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/flops.h"
#include "trainer/schedule.h"

namespace palimpsest {

namespace {

// Multiples of `every`; never when it is 0.
bool is_due(int64_t step, int64_t every) {
  return every > 0 && step % every == 0;
}

// The text of the first rank that has one, and which rank that is.
std::string of_first_rank(Communicator& world, const std::string& text) {
  const std::vector<std::string> texts = gather_texts(world, text);
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty()) return texts.size() == 1 ? text : fmt::format("{} on rank {}", texts[rank], rank);
  return {};
}

// The same on every rank: a signal that came to any of them, or 0.
int64_t signal_to_any_rank(const StopSignals& signals, Communicator& world) {
  return max_over(world, int64_t{signals.received()});
}

std::string words_for(int64_t signal) {
  return "signal " + name_of_stop_signal(static_cast<int>(signal));
}

}  // namespace

Trainer::Trainer(RunSetup& setup, std::string program, Console& console)
    : setup_(setup),
      config_(setup.config()),
      console_(console),
      program_(std::move(program)),
      begin_seconds_(console.seconds()),
      total_steps_(total_steps(config_)),
      is_first_rank_(setup.mesh().world().rank() == 0) {
  // 1. Memory and weights. Nothing is written before both are known to be good.
  Workbench& bench = setup_.bench();
  resident_before_ = memory_in_use(bench.device());
  Communicator& world = setup_.mesh().world();
  agree(world, [&] {
    check_machine_memory(setup_.plan());
    bench.allocate(ParameterUse::kTraining, setup_.plan().regions);
  });
  bench.share_memory();
  const RunStart start = start_run(config_, bench, console_);
  state_ = start.state;
  step_.emplace(bench.model(), bench.registry(), bench.context(), bench.regions().optimizer,
                train_step_options(config_));
  step_->set_applied_steps(state_.applied_steps);
  // 2. Checkpoints.
  prepare_saves(start);
  // 3. What the run writes beside them.
  agree(world, [&] {
    if (!is_first_rank_) return;
    create_directories(config_.run.dir);
    write_file_atomically(config_path(config_), to_yaml(config_));
    if (state_.step == 0) keep_public_files(config_, bench.registry());
    metrics_log_.emplace(config_.run.dir + "/metrics.jsonl", state_.step);
    tensorboard_.emplace(config_.run.dir + "/tensorboard", state_.step);
  });
  // 4. What mfu is a fraction of.
  peak_flops_ = sum_over(world, config_.hardware.peak_tflops
                                    ? *config_.hardware.peak_tflops * 1e12
                                    : measure_matmul_flops(bench.device(), bench.dtype(), bench.regions().activations));
  console_.info(fmt::format("mfu is a fraction of {:.1f} GFLOP/s: {}{}", peak_flops_ / 1e9,
                            config_.hardware.peak_tflops ? "hardware.peak_tflops" : "the best of five large products",
                            world.size() > 1 ? fmt::format(", summed over {} ranks", world.size()) : ""));
}

// Room for the checkpoints, and the copy that is written in the background.
void Trainer::prepare_saves(const RunStart& start) {
  Communicator& world = setup_.mesh().world();
  auto blocks = owned_blocks(setup_.bench().registry(), CheckpointContent::kWeightsAndOptimizer);
  check_room_for_checkpoints(checkpoint_path(config_), stored_bytes(blocks), config_.checkpoint.keep_last, world);
  std::optional<std::vector<CheckpointBlock>> copy;
  if (config_.checkpoint.background) {
    snapshot_.emplace("checkpoint snapshot", Device::kCpu, setup_.snapshot_bytes());
    copy = allocate_snapshot(blocks, *snapshot_);
    if (setup_.bench().device() == Device::kCuda && !copy->empty())
      pinned_snapshot_.emplace(copy->front().tensor.raw(), snapshot_->used());
  }
  writer_.emplace(SavePolicy{checkpoint_path(config_), config_.checkpoint.keep_last, config_.checkpoint.keep_every},
                  std::move(blocks), std::move(copy), world);
  writer_->set_damaged(start.damaged_steps);
  for (const std::string& line : writer_->leftovers()) console_.info(line);
}

void Trainer::run() {
  if (state_.step >= total_steps_) {
    console_.info(nothing_to_do(state_, total_steps_));
    return;
  }
  if (const int64_t signal = signal_to_any_rank(signals_, setup_.mesh().world()); signal != 0) {
    console_.info(fmt::format("stopped before step {} of {} by {}; the same command continues", state_.step + 1,
                              total_steps_, words_for(signal)));
    return;
  }
  if (config_.profile.steps && setup_.bench().device() == Device::kCpu)
    console_.info("profile.steps has no effect on the CPU");
  warm_up();
  Loader loader(setup_.data(), loader_options(config_, state_, setup_.mesh()));
  TrainingProgress progress(console_, state_.step, total_steps_);
  std::string stop;  // why the run ends before its last step
  while (state_.step < total_steps_ && stop.empty()) {
    StepMetrics metrics = profiled_step(loader);
    const bool last = state_.step == total_steps_;
    if (is_due(state_.step, config_.train.eval_every) || (last && config_.train.eval_every > 0))
      metrics.eval = evaluate_all();
    if (is_first_rank_) {
      metrics_log_->write(metrics);
      tensorboard_->write(metrics);
    }
    progress.update(metrics);
    observer_(metrics);
    stop_if_hopeless();

    stop = reason_to_stop();
    if (is_due(state_.step, config_.checkpoint.every) || last || !stop.empty()) save();
    report_saves(writer_->take_finished());
  }
  report_saves(writer_->finish());
  report_memory();
  if (!stop.empty() && state_.step < total_steps_)
    console_.info(
        fmt::format("stopped after step {} of {} by {}; the same command continues", state_.step, total_steps_, stop));
}

// When a size first comes, a GPU's libraries load kernels and make plans for it, which takes seconds, and memory. So
// micro-batches of each size go forward and backward before the first step, where rows hold several documents also with
// some as long as can be; nothing of it stays.
void Trainer::warm_up() {
  if (setup_.bench().device() == Device::kCpu) return;
  const TraceRange range("warm up");
  const double begin = console_.seconds();
  const auto is_packed = [](const Batch& batch) { return batch.documents.count() > batch.num_rows; };
  StepBatches batches = Loader(setup_.data(), loader_options(config_, state_, setup_.mesh())).next();
  const bool packs = std::any_of(batches.micro_batches.begin(), batches.micro_batches.end(), is_packed);
  const bool any_packs = max_over(setup_.mesh().world(), int64_t{packs}) != 0;  // ranks make the same calls
  const auto run = [&](Batch& batch) {
    step_->begin(batches.num_targets);
    step_->accumulate(local_input(batch, setup_.mesh()).input());
    step_->give_up();
  };
  std::set<int64_t> sizes;
  for (Batch& batch : batches.micro_batches) {
    if (!sizes.insert(batch.num_rows).second) continue;
    run(batch);
    if (!any_packs || batch.row_length < 2) continue;
    std::vector<int64_t> offsets = {0};
    for (int64_t end = batch.row_length; end <= batch.num_rows * batch.row_length; end += batch.row_length)
      offsets.insert(offsets.end(), {end - 1, end});
    batch.documents = Documents(offsets);
    run(batch);
  }
  synchronize(setup_.bench().stream());
  console_.info(fmt::format("kernels and plans are ready after {:.1f} s", console_.seconds() - begin));
}

// The same on every rank: a signal on any of them counts, and the first one's clock.
std::string Trainer::reason_to_stop() const {
  constexpr int64_t kTimeIsUp = 1000;  // above every signal number
  int64_t reason = signals_.received();
  const double minutes = (console_.seconds() - begin_seconds_) / 60.0;
  if (is_first_rank_ && config_.train.max_minutes && minutes >= *config_.train.max_minutes && reason == 0)
    reason = kTimeIsUp;
  reason = max_over(setup_.mesh().world(), reason);
  if (reason == 0) return {};
  return reason == kTimeIsUp ? "train.max_minutes" : words_for(reason);
}

StepMetrics Trainer::profiled_step(Loader& loader) {
  if (!config_.profile.steps || setup_.bench().device() == Device::kCpu) return train_one_step(loader);
  const auto [first, last] = *config_.profile.steps;
  const int64_t step = state_.step + 1;
  if (step == first) start_profiler();
  StepMetrics metrics = train_one_step(loader);
  if (step == last || (step >= first && step == total_steps_)) stop_profiler();
  return metrics;
}

StepMetrics Trainer::train_one_step(Loader& loader) {
  const TraceRange range(fmt::format("step {}", state_.step + 1).c_str());
  setup_.mesh().world().set_step(state_.step + 1);
  const double begin = console_.seconds();
  const SentBytes sent_before = setup_.mesh().bytes_sent();
  StepBatches batches = loader.next();
  const double lr = learning_rate(config_.schedule, config_.optimizer.lr, state_.step + 1, total_steps_);
  step_->begin(batches.num_targets);
  for (Batch& batch : batches.micro_batches)
    step_->accumulate(local_input(batch, setup_.mesh()).input(),
                      &batch == &batches.micro_batches.back() ? MicroBatch::kLast : MicroBatch::kInner);
  const StepResult result = step_->finish(lr);
  count_step(result, batches);
  const double tokens_per_second =
      static_cast<double>(tokens_per_step(config_)) / std::max(console_.seconds() - begin, 1e-9);
  return {.step = state_.step,
          .tokens = state_.tokens,
          .loss = result.loss,
          .grad_norm = result.grad_norm,
          .lr = lr,
          .tokens_per_second = tokens_per_second,
          .mfu = mfu(tokens_per_second),
          .skipped_steps = state_.skipped_steps,
          .experts = result.experts,
          .bytes_sent = setup_.mesh().bytes_sent() - sent_before};
}

void Trainer::count_step(const StepResult& result, StepBatches& batches) {
  ++state_.step;
  state_.tokens += batches.num_targets;
  state_.sampler_position += config_.train.sequences_per_step;
  state_.applied_steps = result.applied_steps;
  state_.eval_losses.clear();
  if (result.applied) {
    state_.skipped_in_a_row = 0;
    return;
  }
  ++state_.skipped_steps;
  ++state_.skipped_in_a_row;
  last_non_finite_ = first_non_finite(batches);
  console_.warning(fmt::format("step {} skipped: loss {}, gradient norm {}; the first tensor that went bad: {}",
                               state_.step, result.loss, result.grad_norm, last_non_finite_));
}

// In the order in which one thing follows from another: weights, forward, backward. Every rank gets the same answer.
std::string Trainer::first_non_finite(StepBatches& batches) {
  Workbench& bench = setup_.bench();
  Communicator& world = setup_.mesh().world();
  std::string name = of_first_rank(world, first_non_finite_weight(bench.registry()));
  Context context = bench.context();
  for (Batch& batch : batches.micro_batches)
    if (name.empty()) name = bench.model().first_non_finite_output(context, local_input(batch, setup_.mesh()).input());
  if (name.empty()) {
    // Once more, since the gradients are sums over the ranks by now.
    step_->begin(batches.num_targets);
    for (Batch& batch : batches.micro_batches) step_->accumulate(local_input(batch, setup_.mesh()).input());
    step_->give_up();
    name = of_first_rank(world, first_non_finite_gradient(bench.registry()));
  }
  return name.empty() ? "the sum of the squared gradients" : name;
}

void Trainer::stop_if_hopeless() {
  if (state_.skipped_in_a_row <= config_.train.max_skipped_steps) return;
  report_saves(writer_->finish());
  throw NonFiniteStop(fmt::format("step {}: {} steps in a row were not finite; the first tensor that went bad: {}",
                                  state_.step, state_.skipped_in_a_row, last_non_finite_));
}

std::vector<EvalMetrics> Trainer::evaluate_all() {
  const TraceRange range("evaluate");
  const EvaluationOptions options = {.row_length = config_.data.sequence_length,
                                     .stride = config_.data.sequence_length,
                                     .batch_rows = config_.train.micro_batch,
                                     .max_rows = config_.train.eval_rows};
  std::vector<EvalMetrics> metrics;
  for (const EvalSet& set : setup_.eval_sets()) {
    const Evaluation evaluation =
        evaluate(setup_.bench().model(), setup_.bench().context(), *set.dataset, options, console_, set.name);
    console_.info(fmt::format("step {}, {}: {}", state_.step, set.name, to_text(evaluation)));
    state_.eval_losses[set.name] = evaluation.mean_loss();
    metrics.push_back({set.name, evaluation.mean_loss(), evaluation.bits_per_byte()});
  }
  return metrics;
}

void Trainer::save() {
  const TraceRange range("save");
  const MeshShape& shape = setup_.mesh().shape();
  writer_->save({.state = state_,
                 .world = {.ranks = shape.ranks(),
                           .data = shape.data,
                           .sequence = shape.sequence,
                           .tensor = shape.tensor,
                           .zero = config_.parallel.zero},
                 .config = to_yaml(config_),
                 .program = program_});
}

void Trainer::report_saves(const std::vector<FinishedSave>& saves) {
  for (const FinishedSave& save : saves) {
    console_.info(fmt::format("saved {} ({:.1f} MB in {:.1f} s)", save.path, static_cast<double>(save.bytes) / 1e6,
                              save.seconds));
    for (const std::string& warning : save.warnings) console_.warning(warning);
  }
}

double Trainer::mfu(double tokens_per_second) {
  const double flops = tokens_per_second * setup_.bench().model().flops_per_token(config_.data.sequence_length);
  const double fraction = flops / peak_flops_;
  if (fraction > 1.0 && !warned_of_mfu_) {
    console_.warning(fmt::format("mfu is {:.0f} %: the peak of {:.1f} GFLOP/s is too low; set hardware.peak_tflops",
                                 100 * fraction, peak_flops_ / 1e9));
    warned_of_mfu_ = true;
  }
  return fraction;
}

void Trainer::report_memory() const {
  console_.info(fmt::format("memory: {:.1f} MiB predicted, the process's peak grew by {:.1f} MiB",
                            in_mib(setup_.plan().total()),
                            in_mib(memory_in_use(setup_.bench().device()) - resident_before_)));
}

void train(const Config& config, const Mesh& mesh, const std::string& program, Console& console) {
  const StopSignals signals;
  const std::unique_ptr<RunSetup> setup = set_up_ranks(config, mesh);
  if (const int64_t signal = signal_to_any_rank(signals, mesh.world()); signal != 0) {
    console.info("stopped before anything was written, by " + words_for(signal));
    return;
  }
  setup->print(console);
  Trainer trainer(*setup, program, console);
  run_together(mesh.world(), [&] { trainer.run(); });
}

}  // namespace palimpsest
