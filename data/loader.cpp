#include "data/loader.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

std::vector<std::unique_ptr<Dataset>> open_sources(const std::vector<WeightedPath>& sources, int64_t row_length,
                                                   int64_t model_vocab_size) {
  if (sources.empty()) throw_user_error("data.train names no token shards");
  std::vector<std::unique_ptr<Dataset>> datasets;
  for (const WeightedPath& source : sources) {
    if (!(source.weight > 0.0))
      throw_user_error(source.path, ": the weight is ", source.weight, ", expected a number above 0");
    datasets.push_back(std::make_unique<Dataset>(source.path));
    const Dataset& dataset = *datasets.back();
    dataset.check_vocabulary(model_vocab_size);
    if (dataset.vocabulary() != datasets.front()->vocabulary())
      throw_user_error(source.path, ": made with the tokenizer ", dataset.vocabulary().tokenizer, " (hash ",
                       dataset.vocabulary().tokenizer_hash, "), but ", datasets.front()->path(), " with ",
                       datasets.front()->vocabulary().tokenizer, " (hash ",
                       datasets.front()->vocabulary().tokenizer_hash, ")");
    if (num_training_rows(dataset, row_length) == 0)
      throw_user_error(source.path, ": ", dataset.num_tokens(), " tokens do not fill one row of ", row_length,
                       "; lower data.sequence_length or add text");
  }
  return datasets;
}

std::vector<RowSource> row_sources(const std::vector<WeightedPath>& sources,
                                   const std::vector<std::unique_ptr<Dataset>>& datasets, int64_t row_length) {
  std::vector<RowSource> rows;
  for (size_t i = 0; i < sources.size(); ++i)
    rows.push_back({num_training_rows(*datasets[i], row_length), sources[i].weight});
  return rows;
}

uint64_t fingerprint_of(const std::vector<WeightedPath>& sources, const std::vector<std::unique_ptr<Dataset>>& datasets,
                        int64_t row_length, uint64_t seed) {
  std::string text = detail::concatenate(row_length, " ", seed, "\n");
  for (size_t i = 0; i < sources.size(); ++i)
    text += detail::concatenate(datasets[i]->fingerprint(), " ", sources[i].weight, "\n");
  return hash_of(text);
}

}  // namespace

TrainingData::TrainingData(const std::vector<WeightedPath>& sources, int64_t row_length, int64_t model_vocab_size,
                           uint64_t seed)
    : row_length_(row_length),
      datasets_(open_sources(sources, row_length, model_vocab_size)),
      sampler_(row_sources(sources, datasets_, row_length), seed),
      fingerprint_(fingerprint_of(sources, datasets_, row_length, seed)) {}

void TrainingData::verify_if_small() const {
  for (const auto& dataset : datasets_) dataset->verify_if_small();
}

int64_t TrainingData::num_tokens() const {
  int64_t count = 0;
  for (const auto& dataset : datasets_) count += dataset->num_tokens();
  return count;
}

int64_t TrainingData::num_rows() const {
  int64_t count = 0;
  for (const auto& dataset : datasets_) count += num_training_rows(*dataset, row_length_);
  return count;
}

RowRequest TrainingData::row(int64_t index) const {
  const Sample sample = sampler_.at(index);
  return {datasets_[sample.source].get(), sample.row * row_length_, 0};
}

int64_t TrainingData::count_targets(IndexRange rows) const {
  int64_t count = 0;
  for (int64_t index = rows.begin; index < rows.end; ++index) {
    const RowRequest request = row(index);
    count += request.dataset->count_targets(request.begin, row_length_);
  }
  return count;
}

Loader::Loader(const TrainingData& data, const LoaderOptions& options) : data_(data), options_(options) {
  CHECK(options_.first_step >= 0 && options_.steps_ahead > 0 && options_.micro_batch > 0, "loader options");
  CHECK(options_.rank >= 0 && options_.rank < options_.num_ranks, "rank ", options_.rank, " of ", options_.num_ranks);
  if (options_.sequences_per_step < 1 || options_.sequences_per_step % options_.num_ranks != 0)
    throw_user_error("train.sequences_per_step is ", options_.sequences_per_step, ", expected a multiple of the ",
                     options_.num_ranks, " ranks that share the rows of a step");
  thread_ = std::thread([this] { run(); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

StepBatches Loader::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ready_.empty() || !user_error_.empty() || !error_.empty(); });
  if (ready_.empty()) {
    if (!user_error_.empty()) throw UserError(user_error_);
    throw Error(error_);
  }
  StepBatches step = std::move(ready_.front());
  ready_.pop_front();
  changed_.notify_all();
  return step;
}

void Loader::run() {
  // The error travels as text: steps read before it are still delivered.
  const auto fail = [&](std::string Loader::*kind, const char* message) {
    const std::lock_guard lock(mutex_);
    this->*kind = message;
    changed_.notify_all();
  };
  try {
    for (int64_t step = options_.first_step;; ++step) {
      StepBatches batches = read_step(step);
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || static_cast<int64_t>(ready_.size()) < options_.steps_ahead; });
      if (stop_) return;
      ready_.push_back(std::move(batches));
      changed_.notify_all();
    }
  } catch (const UserError& error) {
    fail(&Loader::user_error_, error.what());
  } catch (const std::exception& error) {
    fail(&Loader::error_, error.what());
  }
}

StepBatches Loader::read_step(int64_t step) const {
  const int64_t first_row = options_.first_row.value_or(options_.first_step * options_.sequences_per_step);
  const int64_t first = first_row + (step - options_.first_step) * options_.sequences_per_step;
  StepBatches batches;
  batches.step = step;
  batches.num_targets = data_.count_targets({first, first + options_.sequences_per_step});
  const IndexRange mine = split_range(options_.sequences_per_step, options_.num_ranks, options_.rank);
  for (int64_t row = mine.begin; row < mine.end; row += options_.micro_batch) {
    std::vector<RowRequest> rows;
    for (int64_t i = row; i < std::min(row + options_.micro_batch, mine.end); ++i) rows.push_back(data_.row(first + i));
    batches.micro_batches.push_back(read_batch(rows, data_.row_length(), first + row));
  }
  return batches;
}

}  // namespace palimpsest
