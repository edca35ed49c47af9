#include "trainer/run_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "data/tokenizer.h"
#include "parallel/agreement.h"
#include "trainer/checkpoint_block.h"
#include "trainer/checkpoint_writer.h"
#include "trainer/flops.h"
#include "trainer/run_start.h"
#include "trainer/schedule.h"
#include "trainer/train_step.h"

namespace palimpsest {

namespace {

std::vector<WeightedPath> weighted_paths(const Config& config) {
  std::vector<WeightedPath> paths;
  for (const DataSource& source : config.data.train) paths.push_back({source.path, source.weight});
  return paths;
}

// Sets that were made with another tokenizer than the training data cannot be evaluated by the same model.
void check_same_vocabulary(const TrainingData& data, const std::vector<EvalSet>& sets) {
  for (const EvalSet& set : sets) {
    const Vocabulary &here = set.dataset->vocabulary(), &there = data.vocabulary();
    if (here == there) continue;
    throw_user_error("data.eval: ", set.dataset->path(), " was made with tokenizer ", here.tokenizer, " (", here.size,
                     " ids, hash ", here.tokenizer_hash, "), data.train with ", there.tokenizer, " (", there.size,
                     " ids, hash ", there.tokenizer_hash, "); they must be the same");
  }
}

void check_rows_divide(const Config& config, const Mesh& mesh) {
  const int64_t rows = config.train.sequences_per_step, ranks = mesh.data().size();
  if (rows % ranks != 0)
    throw_user_error("train.sequences_per_step is ", rows, ", must be a multiple of the ", ranks,
                     " ranks of parallel.data that share the rows of a step");
}

int64_t bytes_of_batch(int64_t num_tokens) {
  return num_tokens * static_cast<int64_t>(3 * sizeof(int32_t));  // tokens, targets, positions
}

// The longest step's batches that the loader keeps ready, beside the one read and the one in use.
int64_t loader_bytes(const Config& config, const Mesh& mesh) {
  return (LoaderOptions().steps_ahead + 2) * bytes_of_batch(tokens_per_step(config) / mesh.data().size());
}

// The text of the tokens with document borders, for people to check their data by.
std::string decoded(const Batch& batch, const Tokenizer& tokenizer) {
  std::string text;
  for (int64_t row = 0; row < batch.num_rows; ++row) {
    const std::span<const int32_t> tokens(batch.tokens.data() + row * batch.row_length,
                                          static_cast<size_t>(batch.row_length));
    text += fmt::format("row {}, {} tokens:\n", batch.first_row + row, batch.row_length);
    for (const int32_t token : tokens) {
      if (token == tokenizer.bos())
        text += "<bos>";
      else if (token == tokenizer.eos())
        text += "<eos>";
      else
        text += tokenizer.bytes_of(token);
    }
    text += "\n";
  }
  return text;
}

}  // namespace

RunSetup::RunSetup(const Config& config, const Mesh& mesh)
    : config_(config),
      data_(weighted_paths(config), config.data.sequence_length, config.model.vocab_size,
            static_cast<uint64_t>(config.run.seed)),
      eval_sets_(open_eval_sets(config)),
      bench_(config, mesh) {
  check_rows_divide(config, mesh);
  check_same_vocabulary(data_, eval_sets_);
  data_.verify_if_small();
  plan_ = make_plan();
  step_bytes_ = bench_.rehearse_step_bytes({.rows = config.train.sequences_per_step / mesh.data().size(),
                                            .micro_batch = config.train.micro_batch,
                                            .row_length = config.data.sequence_length},
                                           train_step_options(config));
}

MemoryPlan RunSetup::make_plan() {
  const TrainConfig& train = config_.train;
  const BatchLimits limits = {
      .train_rows = std::min(train.micro_batch, train.sequences_per_step / mesh().data().size()),
      .eval_rows = eval_sets_.empty() ? 0 : train.micro_batch,
      .row_length = config_.data.sequence_length};
  MemoryPlan plan{.regions = bench_.rehearse_training(limits, train_step_options(config_))};
  plan.add_copies(mesh());
  const auto blocks = owned_blocks(bench_.registry(), CheckpointContent::kWeightsAndOptimizer);
  if (config_.checkpoint.background) {
    Arena snapshot = Arena::planning("checkpoint snapshot", Device::kCpu);
    allocate_snapshot(blocks, snapshot);
    snapshot_bytes_ = snapshot.peak();
    plan.others.push_back({"checkpoint snapshot", snapshot_bytes_});
  }
  plan.others.push_back(
      {"batches", loader_bytes(config_, mesh()) + bytes_of_batch(limits.eval_rows * limits.row_length)});
  if (!config_.hardware.peak_tflops && plan.regions.activations < kMatmulBytes)
    plan.others.push_back({"reference products", kMatmulBytes});
  return plan;
}

void RunSetup::check_same_data() const {
  std::vector<RankItem> items = {
      {"the contents of data.train", fmt::format("fingerprint {:016x}", data_.fingerprint())}};
  for (const EvalSet& set : eval_sets_) items.push_back(contents_of("data.eval " + set.name, *set.dataset));
  check_same_on_ranks(mesh().world(), items);
}

void RunSetup::print(Console& console) const {
  console.info("config\n" + to_yaml(config_));
  console.info(fmt::format("data.train: {} tokens, {} rows of {}, tokenizer {} ({} ids)", data_.num_tokens(),
                           data_.num_rows(), data_.row_length(), data_.vocabulary().tokenizer,
                           data_.vocabulary().size));
  for (const EvalSet& set : eval_sets_)
    console.info(fmt::format("data.eval {}: {} tokens, {} documents, {} bytes of text", set.name,
                             set.dataset->num_tokens(), set.dataset->num_documents(), set.dataset->text_bytes()));
  if (mesh().world().rank() == 0)
    if (const std::string notice = tokenizer_notice(config_, data_.vocabulary()); !notice.empty())
      console.warning(notice + "; generate will need that one");
  const ParameterRegistry& registry = bench_.registry();
  console.info(parameter_table(registry));
  console.info(decay_group_table(registry, config_.optimizer.weight_decay));
  console.info(flops_table(bench_.model(), config_.data.sequence_length));
  console.info((mesh().world().size() > 1 ? "memory of the first rank\n" : "memory\n") + to_text(plan_));
  if (mesh().world().size() > 1) console.info("bytes that the first rank sends in a step\n" + to_text(step_bytes_));
  for (const std::string& notice : schedule_notices(config_.schedule, total_steps(config_))) console.warning(notice);
}

LoaderOptions loader_options(const Config& config, const TrainState& state, const Mesh& mesh) {
  return {.sequences_per_step = config.train.sequences_per_step,
          .micro_batch = config.train.micro_batch,
          .rank = mesh.data().rank(),
          .num_ranks = mesh.data().size(),
          .first_step = state.step,
          .first_row = state.sampler_position};
}

std::string nothing_to_do(const TrainState& state, int64_t total_steps) {
  return fmt::format("nothing to do: the run is at step {} of {}", state.step, total_steps);
}

std::string config_path(const Config& config) {
  return config.run.dir + "/config.yaml";
}

std::string checkpoint_path(const Config& config) {
  return config.run.dir + "/checkpoints";
}

std::unique_ptr<RunSetup> set_up_ranks(const Config& config, const Mesh& mesh) {
  std::unique_ptr<RunSetup> setup;
  agree(mesh.world(), [&] { setup = std::make_unique<RunSetup>(config, mesh); });
  setup->check_same_data();
  return setup;
}

void dry_run(const Config& config, const Mesh& mesh, Console& console) {
  const std::unique_ptr<RunSetup> setup = set_up_ranks(config, mesh);
  setup->print(console);
  const PlannedStart start = planned_start(config, setup->bench());
  for (const std::string& notice : start.notices) console.warning(notice);
  console.info("the run " + start.words);
  if (const int64_t steps = total_steps(config); start.state.step >= steps)
    return console.info(nothing_to_do(start.state, steps));
  Loader loader(setup->data(), loader_options(config, start.state, mesh));
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(config.data.tokenizer);
  console.info("the first batch\n" + decoded(loader.next().micro_batches.at(0), *tokenizer));
}

}  // namespace palimpsest
