#include "data/loader.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>

#include "data/file_ops.h"
#include "tests/support/files.h"
#include "tests/support/shard_files.h"

namespace palimpsest {
namespace {

using support::read_file;
using support::small_vocabulary;
using support::TempDirectory;
using support::user_error_of;
using support::write_documents;
using support::write_file;

std::vector<int64_t> uneven_lengths(int64_t count) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) lengths.push_back(2 + i * 37 % 61);
  return lengths;
}

// A small corpus in shards of about 300 tokens: some rows cross shard borders.
std::string write_corpus(const TempDirectory& folder, const std::string& name = "data", uint64_t seed = 1) {
  write_documents(folder / name, small_vocabulary(90), uneven_lengths(60), seed, 300);
  return folder / name;
}

TEST(Loader, EachEpochHoldsEachRowOnceForAnyNumberOfRanks) {
  const TempDirectory folder;
  const TrainingData data({{write_corpus(folder)}}, 16, 90, 3);
  const int64_t per_step = 12, rows = data.num_rows(), steps = 2 * rows / per_step;
  ASSERT_GT(rows, 100);
  std::vector<std::vector<int64_t>> orders;
  for (const int64_t ranks : {1, 2, 4}) {
    std::vector<int64_t> order(steps * per_step, -1);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Loader loader(data, {.sequences_per_step = per_step, .micro_batch = 2, .rank = rank, .num_ranks = ranks});
      for (int64_t step = 0; step < steps; ++step) {
        const StepBatches batches = loader.next();
        EXPECT_EQ(batches.step, step);
        int64_t seen = 0;
        for (const Batch& batch : batches.micro_batches) {
          EXPECT_LE(batch.num_rows, 2);
          for (int64_t row = 0; row < batch.num_rows; ++row) order[batch.first_row + row] = batch.row_begin[row] / 16;
          seen += batch.num_rows;
        }
        EXPECT_EQ(seen, per_step / ranks);
      }
    }
    orders.push_back(order);
  }
  EXPECT_EQ(orders[1], orders[0]);
  EXPECT_EQ(orders[2], orders[0]);
  const std::set<int64_t> first_epoch(orders[0].begin(), orders[0].begin() + rows);
  EXPECT_EQ(static_cast<int64_t>(first_epoch.size()), rows);
  EXPECT_EQ(first_epoch.count(-1), 0u);
}

TEST(Loader, KnowsTheTargetsOfTheWholeStepBeforehand) {
  const TempDirectory folder;
  const TrainingData data({{write_corpus(folder)}}, 16, 90, 3);
  for (const int64_t ranks : {1, 3}) {
    std::vector<std::unique_ptr<Loader>> loaders;
    for (int64_t rank = 0; rank < ranks; ++rank)
      loaders.push_back(std::make_unique<Loader>(
          data, LoaderOptions{.sequences_per_step = 9, .micro_batch = 2, .rank = rank, .num_ranks = ranks}));
    for (int64_t step = 0; step < 10; ++step) {
      int64_t announced = 0, counted = 0;
      for (const auto& loader : loaders) {
        const StepBatches batches = loader->next();
        announced = batches.num_targets;
        for (const Batch& batch : batches.micro_batches) counted += batch.num_targets;
      }
      EXPECT_EQ(announced, counted);
      EXPECT_GT(counted, 0);
    }
  }
}

TEST(Loader, TheMicroBatchIsAnUpperLimit) {
  const TempDirectory folder;
  const TrainingData data({{write_corpus(folder)}}, 16, 90, 3);
  Loader loader(data, {.sequences_per_step = 7, .micro_batch = 3});
  const StepBatches batches = loader.next();
  ASSERT_EQ(batches.micro_batches.size(), 3u);
  EXPECT_EQ(batches.micro_batches[0].num_rows, 3);
  EXPECT_EQ(batches.micro_batches[1].num_rows, 3);
  EXPECT_EQ(batches.micro_batches[2].num_rows, 1);
}

TEST(Loader, ResumesFromAnyStep) {
  const TempDirectory folder;
  const TrainingData data({{write_corpus(folder)}, {write_corpus(folder, "other", 9), 0.5}}, 16, 90, 3);
  const LoaderOptions options = {.sequences_per_step = 8, .micro_batch = 3};
  std::vector<uint64_t> hashes;
  {
    Loader loader(data, options);
    for (int64_t step = 0; step < 60; ++step) hashes.push_back(loader.next().micro_batches.back().hash);
  }
  for (const int64_t first : {1, 13, 40}) {  // in the middle of a shard, of an epoch, in a later epoch
    LoaderOptions resumed = options;
    resumed.first_step = first;
    Loader loader(data, resumed);
    for (int64_t step = first; step < first + 5; ++step) {
      const StepBatches batches = loader.next();
      EXPECT_EQ(batches.step, step);
      EXPECT_EQ(batches.micro_batches.back().hash, hashes[step]);
    }
  }
}

TEST(Loader, ShardsOf100And65And64TokensAreCutTheSameOnEveryRank) {
  const TempDirectory folder;
  create_directories(folder / "data");
  for (const auto& [name, length] : {std::pair<std::string, int64_t>{"a", 100}, {"b", 65}, {"c", 64}}) {
    write_documents(folder / "part", small_vocabulary(90), {length});
    rename_path(folder / "part/tokens-00000.h5", (folder / "data/") + name + ".h5");
    remove_tree(folder / "part");
  }
  const TrainingData data({{folder / "data"}}, 8, 90, 3);
  ASSERT_EQ(data.num_rows(), 28);  // of 229 tokens the last 5 are dropped
  std::vector<int> used(229);
  for (int64_t rank = 0; rank < 4; ++rank) {
    Loader loader(data, {.sequences_per_step = 4, .micro_batch = 2, .rank = rank, .num_ranks = 4});
    for (int64_t step = 0; step < 7; ++step)  // one epoch, the same number of steps on each rank
      for (const Batch& batch : loader.next().micro_batches)
        for (const int64_t begin : batch.row_begin)
          for (int64_t p = begin; p < begin + 8; ++p) ++used.at(p);
  }
  EXPECT_EQ(std::count(used.begin(), used.end(), 1), 224);
  EXPECT_EQ(std::count(used.end() - 5, used.end(), 0), 5);
}

TEST(Loader, ErrorsReachTheConsumerAfterTheStepsBeforeThem) {
  const TempDirectory folder;
  write_corpus(folder);
  // A damaged chunk: the header still opens.
  std::string bytes = read_file(folder / "data/tokens-00001.h5");
  const TrainingData whole({{folder / "data"}}, 16, 90, 3);
  const Dataset shard(folder / "data/tokens-00001.h5");
  std::vector<int32_t> ids(8);
  shard.read(0, ids);
  std::string stored;
  for (const int32_t id : ids) {
    stored.push_back(static_cast<char>(id & 0xFF));
    stored.push_back(static_cast<char>(id >> 8));
  }
  const size_t place = bytes.find(stored);
  ASSERT_NE(place, std::string::npos);
  bytes[place] = static_cast<char>(bytes[place] ^ 1);
  write_file(folder / "data/tokens-00001.h5", bytes);

  const TrainingData data({{folder / "data"}}, 16, 90, 3);
  Loader loader(data, {.sequences_per_step = 1, .steps_ahead = 3});
  int64_t delivered = 0;
  const std::string message = user_error_of([&] {
    for (; delivered < data.num_rows(); ++delivered) loader.next();
  });
  EXPECT_GT(delivered, 0);
  EXPECT_NE(message.find("tokens-00001.h5: cannot read the dataset 'tokens'"), std::string::npos) << message;
  EXPECT_EQ(user_error_of([&] { loader.next(); }), message);
}

TEST(Loader, StopsAtAnyMoment) {
  const TempDirectory folder;
  const TrainingData data({{write_corpus(folder)}}, 16, 90, 3);
  for (int64_t round = 0; round < 30; ++round) {
    Loader loader(data, {.sequences_per_step = 4, .micro_batch = 2, .steps_ahead = 1 + round % 3});
    for (int64_t step = 0; step < round % 5; ++step) loader.next();
    if (round % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST(Loader, SeveralLoadersShareOneDataSet) {
  const TempDirectory folder;
  const TrainingData data({{write_corpus(folder)}}, 16, 90, 3);
  Loader first(data, {.sequences_per_step = 4}), second(data, {.sequences_per_step = 4});
  const Dataset evaluation(folder / "data");
  const EvaluationRows rows = {&evaluation, 16, 16};
  for (int64_t step = 0; step < 20; ++step) {
    const Batch batch = rows.read(step, 1);
    EXPECT_EQ(first.next().micro_batches[0].hash, second.next().micro_batches[0].hash);
    EXPECT_EQ(batch.num_rows, 1);
  }
}

TEST(TrainingData, FaultsAreUserErrors) {
  const TempDirectory folder;
  write_corpus(folder);
  write_documents(folder / "short", small_vocabulary(90), {10});
  write_documents(folder / "other", small_vocabulary(80), {100});
  const auto error_of = [](const std::vector<WeightedPath>& sources, int64_t vocab_size) {
    return user_error_of([&] { TrainingData data(sources, 16, vocab_size, 1); });
  };
  EXPECT_NE(error_of({}, 90).find("names no token shards"), std::string::npos);
  EXPECT_NE(error_of({{folder / "data", 0.0}}, 90).find("the weight is 0"), std::string::npos);
  EXPECT_NE(error_of({{folder / "data"}}, 89).find("but the model has 89"), std::string::npos);
  EXPECT_NE(error_of({{folder / "data"}, {folder / "other"}}, 90).find("made with the tokenizer"), std::string::npos);
  EXPECT_NE(error_of({{folder / "short"}}, 90).find("10 tokens do not fill one row of 16"), std::string::npos);
  const TrainingData data({{folder / "data"}}, 16, 90, 1);
  EXPECT_NE(user_error_of([&] { Loader(data, {.sequences_per_step = 10, .num_ranks = 4}); }).find("multiple of the 4"),
            std::string::npos);
}

TEST(TrainingData, TheFingerprintCoversDataOrderAndRows) {
  const TempDirectory folder;
  const std::string first = write_corpus(folder), second = write_corpus(folder, "other", 9);
  const auto fingerprint = [](const std::vector<WeightedPath>& sources, int64_t row_length, uint64_t seed) {
    return TrainingData(sources, row_length, 90, seed).fingerprint();
  };
  const uint64_t base = fingerprint({{first}, {second}}, 16, 1);
  EXPECT_EQ(fingerprint({{first}, {second}}, 16, 1), base);
  EXPECT_NE(fingerprint({{second}, {first}}, 16, 1), base);
  EXPECT_NE(fingerprint({{first}, {second, 2.0}}, 16, 1), base);
  EXPECT_NE(fingerprint({{first}, {second}}, 17, 1), base);
  EXPECT_NE(fingerprint({{first}, {second}}, 16, 2), base);
}

}  // namespace
}  // namespace palimpsest
