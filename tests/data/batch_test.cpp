#include "data/batch.h"

#include <gtest/gtest.h>

#include <numeric>

#include "data/file_ops.h"
#include "tests/support/files.h"
#include "tests/support/shard_files.h"

namespace palimpsest {
namespace {

using support::small_vocabulary;
using support::TempDirectory;
using support::user_error_of;
using support::write_documents;

// A data set whose shards hold documents of the given lengths.
std::string write_shards(const TempDirectory& folder, const std::vector<std::vector<int64_t>>& shards,
                         int64_t vocab_size = 500) {
  create_directories(folder / "data");
  for (size_t i = 0; i < shards.size(); ++i) {
    write_documents(folder / "part", small_vocabulary(vocab_size), shards[i], i + 1);
    rename_path(folder / "part/tokens-00000.h5", (folder / "data/") + std::to_string(i) + ".h5");
    remove_tree(folder / "part");
  }
  return folder / "data";
}

std::vector<int32_t> whole_stream(const Dataset& dataset) {
  std::vector<int32_t> stream(dataset.num_tokens());
  dataset.read(0, stream);
  return stream;
}

Batch training_rows(const Dataset& dataset, int64_t row_length) {
  std::vector<RowRequest> rows;
  for (int64_t row = 0; row < num_training_rows(dataset, row_length); ++row)
    rows.push_back({&dataset, row * row_length, 0});
  return read_batch(rows, row_length, 0);
}

TEST(Batch, DocumentsOf64And63And65TokensInRowsOf64) {
  const TempDirectory folder;
  const Dataset dataset(write_shards(folder, {{64, 63, 65}}));
  ASSERT_EQ(num_training_rows(dataset, 64), 3);
  const std::vector<std::vector<int64_t>> offsets = {{0, 64}, {0, 63, 64}, {0, 64}};
  for (int64_t row = 0; row < 3; ++row) {
    const Batch batch = read_batch({{&dataset, row * 64, 0}}, 64, row);
    EXPECT_EQ(batch.documents.offsets(), offsets[row]);
    EXPECT_EQ(batch.num_targets, 63);
    EXPECT_EQ(dataset.count_targets(row * 64, 64), 63);
  }
  const Batch all = training_rows(dataset, 64);
  EXPECT_EQ(all.num_targets, 189);
  EXPECT_EQ(all.documents.offsets(), (std::vector<int64_t>{0, 64, 127, 128, 192}));
}

TEST(Batch, TokensTargetsAndPositionsFollowTheStream) {
  const TempDirectory folder;
  const Dataset dataset(write_shards(folder, {{5, 2, 13}, {31, 3}, {2, 2, 2}}));
  const std::vector<int32_t> stream = whole_stream(dataset);
  ASSERT_EQ(stream.size(), 60u);
  std::vector<int64_t> starts;
  dataset.document_starts(0, 60, starts);
  ASSERT_EQ(starts, (std::vector<int64_t>{0, 5, 7, 20, 51, 54, 56, 58}));
  const auto begins_document = [&](int64_t p) { return std::find(starts.begin(), starts.end(), p) != starts.end(); };
  for (const int64_t row_length : {1, 7, 8, 20, 60}) {
    const Batch batch = training_rows(dataset, row_length);
    const int64_t num = batch.num_rows * row_length;
    ASSERT_EQ(static_cast<int64_t>(batch.tokens.size()), num);
    int64_t targets = 0, document = -1, position = 0;
    for (int64_t p = 0; p < num; ++p) {
      EXPECT_EQ(batch.tokens[p], stream[p]);
      const bool scored = p + 1 < 60 && !begins_document(p + 1);
      EXPECT_EQ(batch.targets[p], scored ? stream[p + 1] : Batch::kNoTarget) << row_length << " at " << p;
      targets += scored;
      const bool begins = p % row_length == 0 || begins_document(p);
      document += begins;
      position = begins ? 0 : position + 1;
      EXPECT_EQ(batch.positions[p], position);
      EXPECT_TRUE(batch.documents.begin(document) <= p && p < batch.documents.end(document));
    }
    EXPECT_EQ(batch.documents.count(), document + 1);
    EXPECT_EQ(batch.num_targets, targets);
    int64_t counted = 0;
    for (int64_t row = 0; row < batch.num_rows; ++row) counted += dataset.count_targets(row * row_length, row_length);
    EXPECT_EQ(counted, targets);
  }
}

TEST(Batch, RowsOfOneTokenDocumentsHaveNoTargets) {
  const TempDirectory folder;
  const Dataset dataset(write_shards(folder, {{2, 2, 2, 2}}));
  const Batch batch = read_batch({{&dataset, 1, 0}}, 1, 0);  // an eos
  EXPECT_EQ(batch.num_targets, 0);
  EXPECT_EQ(batch.targets, std::vector<int32_t>{Batch::kNoTarget});
}

TEST(Batch, TheHashSeesEveryToken) {
  const TempDirectory folder;
  const Dataset dataset(write_shards(folder, {{50, 70}}));
  const Batch once = read_batch({{&dataset, 0, 0}, {&dataset, 8, 0}}, 8, 0);
  EXPECT_EQ(read_batch({{&dataset, 0, 0}, {&dataset, 8, 0}}, 8, 5).hash, once.hash);
  EXPECT_NE(read_batch({{&dataset, 0, 0}, {&dataset, 9, 0}}, 8, 0).hash, once.hash);
  EXPECT_NE(read_batch({{&dataset, 8, 0}, {&dataset, 0, 0}}, 8, 0).hash, once.hash);
}

TEST(Evaluation, ScoresEachTokenOnceForAnyBatch) {
  const TempDirectory folder;
  const Dataset dataset(write_shards(folder, {{5, 64, 300}}));
  const std::vector<int32_t> stream = whole_stream(dataset);
  const EvaluationRows rows = {&dataset, 64, 64};
  EXPECT_EQ(rows.num_targets(), 4 + 63 + 299);
  for (const int64_t batch_rows : {1, 2, 3, 6}) {
    int64_t targets = 0;
    for (int64_t row = 0; row < rows.count(); row += batch_rows)
      targets += rows.read(row, std::min(batch_rows, rows.count() - row)).num_targets;
    EXPECT_EQ(targets, 366);
  }
}

TEST(Evaluation, ScoresEachTokenOnceForAnyStride) {
  const TempDirectory folder;
  for (const int64_t num_tokens : {1000, 63, 64, 65, 128, 2}) {
    const Dataset dataset(write_shards(folder, {{num_tokens}}));
    const std::vector<int32_t> stream = whole_stream(dataset);
    for (const int64_t stride : {1, 16, 32, 63, 64}) {
      const EvaluationRows rows = {&dataset, 64, stride};
      const Batch batch = rows.read(0, rows.count());
      std::vector<int> scored(num_tokens);
      for (int64_t row = 0; row < batch.num_rows; ++row)
        for (int64_t p = 0; p < 64; ++p) {
          const int32_t target = batch.targets[row * 64 + p];
          if (target == Batch::kNoTarget) continue;
          const int64_t place = batch.row_begin[row] + p + 1;
          EXPECT_EQ(target, stream[place]);
          ++scored[place];
          // A smaller stride gives context: all but the first row see row_length - stride tokens before a target.
          if (row > 0) {
            EXPECT_GE(p, 64 - stride);
          }
        }
      EXPECT_EQ(scored[0], 0);
      EXPECT_EQ(std::count(scored.begin() + 1, scored.end(), 1), num_tokens - 1) << num_tokens << " by " << stride;
      EXPECT_EQ(batch.num_targets, rows.num_targets());
    }
    remove_tree(folder / "data");
  }
}

TEST(Evaluation, TheLastRowIsPaddedWithADocumentOfItsOwn) {
  const TempDirectory folder;
  const Dataset dataset(write_shards(folder, {{10}}));
  const EvaluationRows rows = {&dataset, 8, 8};
  ASSERT_EQ(rows.count(), 2);
  const Batch last = rows.read(1, 1);
  EXPECT_EQ(last.documents.offsets(), (std::vector<int64_t>{0, 2, 8}));
  EXPECT_EQ(last.num_targets, 1);
  EXPECT_EQ(last.positions, (std::vector<int32_t>{0, 1, 0, 1, 2, 3, 4, 5}));
  for (int64_t p = 2; p < 8; ++p) EXPECT_EQ(last.tokens[p], dataset.vocabulary().eos);
  EXPECT_EQ(rows.read(0, 2).documents.offsets(), (std::vector<int64_t>{0, 8, 10, 16}));
}

TEST(Dataset, IsTheShardsInNameOrder) {
  const TempDirectory folder;
  const Dataset dataset(write_shards(folder, {{100}, {65}, {64}}));
  EXPECT_EQ(dataset.num_shards(), 3);
  EXPECT_EQ(dataset.num_tokens(), 229);
  EXPECT_EQ(dataset.num_documents(), 3);
  EXPECT_EQ(dataset.text_bytes(), 229 - 6);
  const std::vector<int32_t> stream = whole_stream(dataset);
  std::vector<int32_t> joined;
  for (const char* name : {"0.h5", "1.h5", "2.h5"}) {
    const Dataset one((folder / "data/") + name);
    const std::vector<int32_t> part = whole_stream(one);
    joined.insert(joined.end(), part.begin(), part.end());
  }
  EXPECT_EQ(stream, joined);
  dataset.verify();
  EXPECT_EQ(dataset.count_document_starts(0, 229), 3);
  EXPECT_EQ(dataset.count_document_starts(1, 100), 0);
  EXPECT_EQ(dataset.count_document_starts(100, 101), 1);
  EXPECT_EQ(dataset.count_document_starts(101, 166), 1);
}

TEST(Dataset, KeepsFewFilesOpen) {
  const TempDirectory folder;
  write_documents(folder / "data", small_vocabulary(50), std::vector<int64_t>(100, 3), 1, 1);
  const Dataset dataset(folder / "data");
  ASSERT_EQ(dataset.num_shards(), 100);
  const std::vector<int32_t> stream = whole_stream(dataset);
  EXPECT_LT(list_directory("/proc/self/fd").size(), 90u);
  std::vector<int32_t> again(300);
  for (int64_t i = 0; i < 300; ++i) dataset.read(i, std::span(again).subspan(i, 1));
  EXPECT_EQ(again, stream);
}

TEST(Dataset, FaultsNameTheFile) {
  const TempDirectory folder;
  create_directories(folder / "empty");
  EXPECT_EQ(user_error_of([&] { Dataset dataset(folder / "none"); }),
            (folder / "none") + ": no such folder or file of token shards");
  EXPECT_EQ(user_error_of([&] { Dataset dataset(folder / "empty"); }),
            (folder / "empty") + ": the folder holds no token shards (*.h5)");
  write_shards(folder, {{10}, {10}});
  write_documents(folder / "other", small_vocabulary(501), {10});
  rename_path(folder / "other/tokens-00000.h5", folder / "data/2.h5");
  EXPECT_EQ(user_error_of([&] { Dataset dataset(folder / "data"); }).find((folder / "data/2.h5") + ": made with"), 0u);
  const Dataset dataset(folder / "data/0.h5");
  EXPECT_EQ(user_error_of([&] { dataset.check_vocabulary(499); }),
            (folder / "data/0.h5") + ": made with a vocabulary of 500 ids (tokenizer test), but the model has 499");
  dataset.check_vocabulary(500);
}

TEST(Dataset, MixesWidthsOfTokens) {
  // A shard of a smaller writer may hold wider numbers than it needs.
  const TempDirectory folder;
  write_shards(folder, {{10}});
  {
    Hdf5File file = Hdf5File::create(folder / "data/1.h5");
    const std::vector<uint32_t> tokens = {498, 7, 499};
    const std::vector<int64_t> offsets = {0, 3};
    file.create_dataset("tokens", Hdf5Type::kU32, {3});
    file.write("tokens", std::span(tokens));
    file.create_dataset("doc_offsets", Hdf5Type::kI64, {2});
    file.write("doc_offsets", std::span(offsets));
    file.set_string("/", "format", "palimpsest tokens");
    file.set_string("/", "tokenizer", "test");
    file.set_string("/", "tokenizer_hash", "0123456789abcdef");
    for (const auto& [name, value] : std::vector<std::pair<const char*, int64_t>>{{"format_version", 1},
                                                                                  {"num_tokens", 3},
                                                                                  {"num_documents", 1},
                                                                                  {"vocab_size", 500},
                                                                                  {"bos", 498},
                                                                                  {"eos", 499},
                                                                                  {"text_bytes", 1},
                                                                                  {"tokens_crc32", 0}})
      file.set_int("/", name, value);
    file.close();
  }
  const Dataset dataset(folder / "data");
  const std::vector<int32_t> stream = whole_stream(dataset);
  EXPECT_EQ(std::vector<int32_t>(stream.end() - 3, stream.end()), (std::vector<int32_t>{498, 7, 499}));
  EXPECT_NE(user_error_of([&] { dataset.verify(); }).find("1.h5: the tokens have CRC"), std::string::npos);
}

TEST(Dataset, TheFingerprintSeesAnyChange) {
  const TempDirectory folder;
  const auto fingerprint = [&](const std::vector<std::vector<int64_t>>& shards) {
    const uint64_t value = Dataset(write_shards(folder, shards)).fingerprint();
    remove_tree(folder / "data");
    return value;
  };
  const uint64_t first = fingerprint({{10, 20}, {30}});
  EXPECT_EQ(fingerprint({{10, 20}, {30}}), first);
  EXPECT_NE(fingerprint({{10, 20}, {31}}), first);
  EXPECT_NE(fingerprint({{20, 10}, {30}}), first);
  EXPECT_NE(fingerprint({{10}, {20, 30}}), first);
  // One token of one shard: only its content differs.
  write_shards(folder, {{10, 20}, {30}});
  write_documents(folder / "part", small_vocabulary(500), {30}, 77);
  rename_path(folder / "part/tokens-00000.h5", folder / "data/1.h5");
  EXPECT_NE(Dataset(folder / "data").fingerprint(), first);
}

}  // namespace
}  // namespace palimpsest
