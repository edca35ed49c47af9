#include "data/shards.h"

#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <functional>
#include <numeric>

#include "data/file_ops.h"
#include "tests/support/files.h"
#include "tests/support/shard_files.h"

namespace palimpsest {
namespace {

using support::flip_bit;
using support::read_file;
using support::run_in_child;
using support::small_vocabulary;
using support::SmallFileSystem;
using support::TempDirectory;
using support::user_error_of;
using support::write_documents;
using support::write_file;

// Everything a shard is made of, so that a test can make one of them wrong.
struct RawShard {
  std::string format = "palimpsest tokens";
  int64_t version = 1;
  int64_t vocab_size = 10;
  int64_t bos = 8;
  int64_t num_tokens = 5;
  int64_t num_documents = 1;
  std::vector<int64_t> tokens = {8, 3, 4, 5, 9};
  std::vector<int64_t> doc_offsets = {0, 5};
  Hdf5Type type = Hdf5Type::kU16;
};

template <class T>
void put_tokens(Hdf5File& file, const RawShard& shard) {
  const std::vector<T> tokens(shard.tokens.begin(), shard.tokens.end());
  file.create_dataset("tokens", Hdf5TypeOf<T>::value, {static_cast<int64_t>(tokens.size())});
  file.write("tokens", std::span(tokens));
}

void write_raw(const std::string& path, const RawShard& shard) {
  Hdf5File file = Hdf5File::create(path);
  if (shard.type == Hdf5Type::kU16) put_tokens<uint16_t>(file, shard);
  if (shard.type == Hdf5Type::kU32) put_tokens<uint32_t>(file, shard);
  if (shard.type == Hdf5Type::kI32) put_tokens<int32_t>(file, shard);
  file.create_dataset("doc_offsets", Hdf5Type::kI64, {static_cast<int64_t>(shard.doc_offsets.size())});
  file.write("doc_offsets", std::span(shard.doc_offsets));
  file.set_string("/", "format", shard.format);
  file.set_int("/", "format_version", shard.version);
  file.set_int("/", "num_tokens", shard.num_tokens);
  file.set_int("/", "num_documents", shard.num_documents);
  file.set_int("/", "vocab_size", shard.vocab_size);
  file.set_string("/", "tokenizer", "test");
  file.set_string("/", "tokenizer_hash", "0");
  file.set_int("/", "bos", shard.bos);
  file.set_int("/", "eos", 9);
  file.set_int("/", "text_bytes", 3);
  file.set_int("/", "tokens_crc32", 0);
  file.close();
}

std::vector<int32_t> read_all(ShardReader& shard) {
  std::vector<int32_t> tokens(shard.num_tokens());
  shard.read(0, tokens);
  return tokens;
}

TEST(Shards, KeepDocumentsTokenizerAndTextBytes) {
  const TempDirectory folder;
  ShardWriter writer(folder / "out/", {100, "some.model", "00ff", 98, 99});
  writer.begin_document();
  writer.append(std::vector<int32_t>{1, 2});
  writer.append(std::vector<int32_t>{3});
  writer.end_document(7);
  writer.begin_document();
  writer.end_document(0);
  const ShardTotals totals = writer.finish();
  EXPECT_EQ(totals.shards, 1);
  EXPECT_EQ(totals.documents, 2);
  EXPECT_EQ(totals.tokens, 7);
  EXPECT_EQ(totals.text_bytes, 7);
  EXPECT_EQ(list_directory(folder.path()), std::vector<std::string>{"out"});
  ShardReader shard(folder / "out/tokens-00000.h5");
  EXPECT_EQ(read_all(shard), (std::vector<int32_t>{98, 1, 2, 3, 99, 98, 99}));
  EXPECT_EQ(shard.doc_offsets(), (std::vector<int64_t>{0, 5, 7}));
  EXPECT_EQ(shard.vocabulary(), (Vocabulary{100, "some.model", "00ff", 98, 99}));
  EXPECT_EQ(shard.text_bytes(), 7);
  shard.verify();
}

TEST(Shards, WidthFollowsTheVocabulary) {
  const TempDirectory folder;
  const auto round_trip = [&](const std::string& name, int64_t vocab_size, const std::vector<int32_t>& ids) {
    ShardWriter writer(folder / name, {vocab_size, "test", "0", 0, 1});
    writer.begin_document();
    writer.append(ids);
    writer.end_document(1);
    writer.finish();
    ShardReader shard((folder / name) + "/tokens-00000.h5");
    shard.verify();
    std::vector<int32_t> tokens(ids.size());
    shard.read(1, tokens);
    EXPECT_EQ(tokens, ids);
    return Hdf5File::open((folder / name) + "/tokens-00000.h5").dataset("tokens").type;
  };
  EXPECT_EQ(round_trip("largest16", 65536, {65535, 2}), Hdf5Type::kU16);
  EXPECT_EQ(round_trip("smallest32", 65537, {65535, 65536}), Hdf5Type::kU32);
  EXPECT_EQ(round_trip("large", 100000, {70000, 99999, 4464}), Hdf5Type::kU32);
}

TEST(Shards, TheWriterRefusesIdsOutsideTheVocabulary) {
  const TempDirectory folder;
  for (const auto& [vocab_size, id] : {std::pair<int64_t, int32_t>{65536, 65536}, {100000, 100000}, {258, -1}}) {
    ShardWriter writer(folder / "out", {vocab_size, "test", "0", 0, 1});
    writer.begin_document();
    const std::string message = user_error_of([&, id = id] { writer.append(std::vector<int32_t>{5, id}); });
    EXPECT_NE(message.find("token 2 would be " + std::to_string(id)), std::string::npos) << message;
    EXPECT_NE(message.find("vocabulary of " + std::to_string(vocab_size)), std::string::npos) << message;
  }
  EXPECT_TRUE(list_directory(folder.path()).empty());
}

TEST(Shards, RollAtTheEndOfADocument) {
  const TempDirectory folder;
  write_documents(folder / "out", small_vocabulary(50), {7, 4, 30, 2, 9, 3}, 1, 10);
  EXPECT_EQ(list_directory(folder / "out"),
            (std::vector<std::string>{"tokens-00000.h5", "tokens-00001.h5", "tokens-00002.h5", "tokens-00003.h5"}));
  EXPECT_EQ(ShardReader(folder / "out/tokens-00000.h5").doc_offsets(), (std::vector<int64_t>{0, 7, 11}));
  EXPECT_EQ(ShardReader(folder / "out/tokens-00001.h5").doc_offsets(), (std::vector<int64_t>{0, 30}));
  EXPECT_EQ(ShardReader(folder / "out/tokens-00002.h5").doc_offsets(), (std::vector<int64_t>{0, 2, 11}));
  EXPECT_EQ(ShardReader(folder / "out/tokens-00003.h5").doc_offsets(), (std::vector<int64_t>{0, 3}));
}

TEST(Shards, LongShardsAreWrittenInParts) {
  const TempDirectory folder;
  const Vocabulary vocabulary = small_vocabulary(300);
  ShardWriter writer(folder / "out", vocabulary);
  std::vector<int32_t> ids(1500000), expected = {vocabulary.bos};
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i % 298);
  expected.insert(expected.end(), ids.begin(), ids.end());
  expected.push_back(vocabulary.eos);
  writer.begin_document();
  writer.append(ids);
  writer.end_document(0);
  for (int i = 0; i < 20000; ++i) {
    writer.begin_document();
    writer.end_document(0);
    expected.insert(expected.end(), {vocabulary.bos, vocabulary.eos});
  }
  writer.finish();
  ShardReader shard(folder / "out/tokens-00000.h5");
  EXPECT_EQ(read_all(shard), expected);
  EXPECT_EQ(shard.num_documents(), 20001);
  shard.verify();
}

TEST(Shards, NothingIsLeftOfAWriterThatDidNotFinish) {
  const TempDirectory folder;
  {
    ShardWriter writer(folder / "new/out", small_vocabulary(9), 2);
    writer.begin_document();
    writer.end_document(0);
    EXPECT_TRUE(path_exists(folder / "new/out.tmp/tokens-00000.h5"));
  }
  EXPECT_FALSE(path_exists(folder / "new/out.tmp"));
  {
    ShardWriter writer(folder / "out", small_vocabulary(9));
    EXPECT_NE(user_error_of([&] { writer.finish(); }).find("there is no text to write"), std::string::npos);
  }
  EXPECT_FALSE(path_exists(folder / "out"));
  create_directories(folder / "used");
  write_file(folder / "used/file", "");
  EXPECT_NE(user_error_of([&] { ShardWriter(folder / "used", small_vocabulary(9)); }).find("not an empty folder"),
            std::string::npos);
}

TEST(Shards, AppearWholeOrNotAtAllWhereverTheWriterIsKilled) {
  const TempDirectory folder;
  int kills = 0;
  for (int operation = 1;; ++operation) {
    const int status = run_in_child([&] {
      inject_file_fault(FileFault::kKill, operation);
      write_documents(folder / "out", small_vocabulary(50), {7, 4, 30}, 1, 10);
    });
    if (path_exists(folder / "out")) {
      for (const std::string& name : list_directory(folder / "out")) ShardReader((folder / "out/") + name).verify();
      EXPECT_EQ(list_directory(folder / "out").size(), 2u);
      remove_tree(folder / "out");
    }
    if (!WIFSIGNALED(status)) break;
    ++kills;
  }
  EXPECT_GT(kills, 20);
}

TEST(Shards, AFullDiskIsReportedAndNothingIsLeft) {
  const SmallFileSystem disk(256 << 10);
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
  const std::string message = user_error_of([&] {
    write_documents(disk / "out", small_vocabulary(50), {200000, 200000}, 1, 1000);
  });
  EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
  EXPECT_NE(message.find(disk / "out.tmp/tokens-00000.h5"), std::string::npos) << message;
  EXPECT_TRUE(list_directory(disk.path()).empty());
}

TEST(Shards, EveryHeaderFieldIsChecked) {
  const TempDirectory folder;
  const std::string path = folder / "a.h5";
  const auto error_with = [&](const std::function<void(RawShard&)>& change) {
    RawShard shard;
    change(shard);
    write_raw(path, shard);
    const std::string message = user_error_of([&] {
      ShardReader reader(path);
      read_all(reader);
    });
    EXPECT_EQ(message.find(path + ": "), 0u) << message;
    return message.substr(path.size() + 2);
  };
  write_raw(path, {});
  ShardReader good(path);
  EXPECT_EQ(read_all(good), (std::vector<int32_t>{8, 3, 4, 5, 9}));

  EXPECT_EQ(error_with([](auto& s) { s.format = "other"; }),
            "not a token shard; make shards with 'palimpsest tokenize'");
  EXPECT_EQ(error_with([](auto& s) { s.version = 2; }),
            "token shard of format version 2, but this program reads version 1");
  EXPECT_EQ(error_with([](auto& s) { s.vocab_size = 0; }), "vocab_size is 0");
  EXPECT_EQ(error_with([](auto& s) { s.bos = 10; }), "bos is 10, outside the vocabulary of 10 ids");
  EXPECT_EQ(error_with([](auto& s) { s.num_tokens = 6; }), "num_tokens is 6 but dataset 'tokens' holds 5");
  EXPECT_EQ(error_with([](auto& s) { s.num_documents = 2; }),
            "num_documents is 2 but dataset 'doc_offsets' holds 2 numbers");
  EXPECT_EQ(error_with([](auto& s) { s.doc_offsets = {0, 4}; }), "doc_offsets go from 0 to 4, expected 0 to 5");
  EXPECT_EQ(error_with([](auto& s) {
              s.doc_offsets = {0, 3, 3, 5};
              s.num_documents = 3;
            }),
            "doc_offsets[2] is 3, not above doc_offsets[1], which is 3");
  EXPECT_EQ(error_with([](auto& s) { s.type = Hdf5Type::kI32; }), "dataset 'tokens' is i32, expected u16 or u32");
  EXPECT_EQ(error_with([](auto& s) {
              s.type = Hdf5Type::kI32;
              s.tokens[2] = -1;
            }),
            "dataset 'tokens' is i32, expected u16 or u32");
}

TEST(Shards, TheReaderRefusesIdsOutsideTheVocabularyWithFilePositionAndId) {
  const TempDirectory folder;
  for (const Hdf5Type type : {Hdf5Type::kU16, Hdf5Type::kU32}) {
    RawShard shard;
    shard.type = type;
    shard.tokens[3] = 10;
    write_raw(folder / "a.h5", shard);
    ShardReader reader(folder / "a.h5");
    std::vector<int32_t> before(3);
    reader.read(0, before);
    EXPECT_EQ(before, (std::vector<int32_t>{8, 3, 4}));
    std::vector<int32_t> with(2);
    EXPECT_EQ(user_error_of([&] { reader.read(2, with); }),
              (folder / "a.h5") + ": token 3 is 10, outside the vocabulary of 10 ids");
  }
}

TEST(Shards, OtherFilesAreRefused) {
  const TempDirectory folder;
  {
    Hdf5File file = Hdf5File::create(folder / "other.h5");
    file.create_dataset("tokens", Hdf5Type::kU16, {3});
    file.close();
  }
  write_file(folder / "text.h5", "tokens");
  EXPECT_NE(user_error_of([&] { ShardReader(folder / "other.h5"); }).find("not a token shard"), std::string::npos);
  EXPECT_NE(user_error_of([&] { ShardReader(folder / "text.h5"); }).find("cannot open as an HDF5 file"),
            std::string::npos);
}

TEST(Shards, EveryFlippedBitOfTheTokensAndEveryTruncationIsSeen) {
  const TempDirectory folder;
  write_documents(folder / "out", small_vocabulary(50000), {70, 41, 300});
  const std::string path = folder / "out/tokens-00000.h5";
  const std::string bytes = read_file(path);
  ShardReader whole(path);
  const std::vector<int32_t> tokens = read_all(whole);
  const std::vector<int64_t> offsets = whole.doc_offsets();
  const std::string damaged_path = folder / "damaged.h5";
  write_file(damaged_path, bytes);
  int seen = 0;
  for (size_t position = 0; position < bytes.size(); ++position) {
    if (bytes[position] == '\0' && position % 101 != 0) continue;  // mostly the unused ends of chunks
    const int bit = static_cast<int>(position * 3 % 8);
    flip_bit(damaged_path, position, bit);
    try {
      ShardReader shard(damaged_path);
      EXPECT_EQ(read_all(shard), tokens) << "silent damage at byte " << position;
      EXPECT_EQ(shard.doc_offsets(), offsets) << "silent damage at byte " << position;
      EXPECT_EQ(shard.fingerprint(), whole.fingerprint()) << "silent damage at byte " << position;
    } catch (const UserError&) {
      ++seen;
    }
    flip_bit(damaged_path, position, bit);
  }
  EXPECT_GT(seen, 800);
  for (size_t length = 0; length < bytes.size(); length += 1 + length / 16) {
    write_file(damaged_path, bytes.substr(0, length));
    user_error_of([&] {
      ShardReader shard(damaged_path);
      read_all(shard);
    });
  }
}

TEST(Shards, EightProcessesReadOneFileWhateverLocksAreHeld) {
  const TempDirectory folder;
  write_documents(folder / "out", small_vocabulary(50), {70, 41, 300});
  const std::string path = folder / "out/tokens-00000.h5";
  // Somebody else's exclusive lock makes any attempt to lock fail.
  const FileDescriptor locked = open_for_reading(path);
  ASSERT_EQ(::flock(locked.get(), LOCK_EX | LOCK_NB), 0);
  const int status = run_in_child([&] {
    std::vector<pid_t> children;
    for (int i = 0; i < 8; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        try {
          for (int round = 0; round < 20; ++round) ShardReader(path).verify();
          ::_exit(0);
        } catch (const std::exception&) {
          ::_exit(1);
        }
      }
      children.push_back(child);
    }
    for (const pid_t child : children) {
      int child_status = 0;
      CHECK(::waitpid(child, &child_status, 0) == child && child_status == 0);
    }
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace palimpsest
