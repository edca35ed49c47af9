// The loader: a thread that reads the rows of coming steps while the current one is computed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "data/batch.h"
#include "data/dataset.h"
#include "data/sampler.h"

namespace palimpsest {

struct WeightedPath {
  std::string path;  // as Dataset takes it
  double weight = 1.0;
};

// What a run trains on: data sets and the order of their rows.
class TrainingData {
 public:
  // Throws when a source cannot be read, has an id that the model has not, holds no whole row, or when sources were
  // made with different tokenizers.
  TrainingData(const std::vector<WeightedPath>& sources, int64_t row_length, int64_t model_vocab_size, uint64_t seed);

  int64_t row_length() const { return row_length_; }
  const Vocabulary& vocabulary() const { return datasets_.front()->vocabulary(); }
  int64_t num_tokens() const;
  int64_t num_rows() const;             // of an epoch of every source
  RowRequest row(int64_t index) const;  // index counts the rows of the run
  Sample sample(int64_t index) const { return sampler_.at(index); }
  int64_t count_targets(IndexRange rows) const;  // scored targets of these rows of the run, without reading them
  // Over the contents, weights, seed and row length: equal on every rank, or the ranks do not see the same data.
  uint64_t fingerprint() const { return fingerprint_; }
  void verify_if_small() const;  // of each data set, see Dataset

 private:
  int64_t row_length_;
  std::vector<std::unique_ptr<Dataset>> datasets_;
  Sampler sampler_;
  uint64_t fingerprint_;
};

struct LoaderOptions {
  int64_t sequences_per_step = 1;  // of all ranks; a multiple of num_ranks
  int64_t micro_batch = 1;         // at most so many rows in a batch
  int64_t rank = 0;                // of those that share the rows of a step
  int64_t num_ranks = 1;
  int64_t first_step = 0;  // step s trains on the rows s * sequences_per_step and following, unless ...
  // ... the first step is given another row: of a run whose earlier steps had another number of rows.
  std::optional<int64_t> first_row;
  int64_t steps_ahead = 2;
};

// One rank's share of a step.
struct StepBatches {
  int64_t step = 0;
  int64_t num_targets = 0;  // of the whole step, over all ranks: what the loss is divided by
  std::vector<Batch> micro_batches;
};

class Loader {
 public:
  // The data must outlive the loader.
  Loader(const TrainingData& data, const LoaderOptions& options);
  ~Loader();  // stops the thread when it has read the step that it is at
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next step; waits until it is read. Throws what reading threw, again at every call.
  StepBatches next();

 private:
  void run();
  StepBatches read_step(int64_t step) const;

  const TrainingData& data_;
  const LoaderOptions options_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<StepBatches> ready_;
  std::string user_error_;  // why reading ended
  std::string error_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace palimpsest
