// Token shards: the HDF5 files that training reads.
//
//   tokens       [num_tokens] u16 when the vocabulary has at most 65536 ids, else u32; documents one after another,
//   each
//                stored as bos, its tokens, eos
//   doc_offsets  [num_documents + 1] i64: document i owns the tokens doc_offsets[i] .. doc_offsets[i+1] - 1
//   attributes   format ("palimpsest tokens"), format_version, num_tokens, num_documents, vocab_size, tokenizer,
//                tokenizer_hash, bos, eos, text_bytes (of the original documents), tokens_crc32 (of the bytes of
//                tokens)
//
// Both datasets are chunked and checksummed. A document lies in one shard.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/hdf5_file.h"
#include "data/tokenizer.h"

namespace palimpsest {

// What must agree between shards of a data set, and with the model.
struct Vocabulary {
  int64_t size = 0;
  std::string tokenizer;       // Tokenizer::name
  std::string tokenizer_hash;  // Tokenizer::hash
  int32_t bos = 0;
  int32_t eos = 0;
  bool operator==(const Vocabulary&) const = default;
};
Vocabulary vocabulary_of(const Tokenizer& tokenizer);

struct ShardTotals {
  int64_t shards = 0;
  int64_t documents = 0;
  int64_t tokens = 0;  // bos and eos included
  int64_t text_bytes = 0;
};

// Writes a folder of shards tokens-00000.h5, ... The folder appears under its name, whole and on the disk, when finish
// returns; until then it is "<directory>.tmp", which the destructor removes.
class ShardWriter {
 public:
  static constexpr int64_t kDefaultShardTokens = int64_t{1} << 27;

  // Throws when the directory exists and is not empty. A shard ends with the first document that brings it to
  // shard_tokens or more.
  ShardWriter(const std::string& directory, Vocabulary vocabulary, int64_t shard_tokens = kDefaultShardTokens);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // One document: begin, its ids in any number of parts, end with the length of its text in bytes. bos and eos are
  // added. Ids outside the vocabulary throw.
  void begin_document();
  void append(std::span<const int32_t> ids);
  void end_document(int64_t text_bytes);

  ShardTotals finish();  // throws when there is no document

 private:
  struct OpenShard {
    Hdf5File file;
    ShardTotals totals;
    uint32_t crc = 0;
    std::vector<int32_t> tokens;       // not yet in the file
    std::vector<int64_t> doc_offsets;  // not yet in the file
  };

  std::string shard_path() const;
  void open_shard();
  void close_shard();
  void put(int32_t id);
  void flush_tokens();
  template <class T>
  void flush_tokens_as();
  void flush_offsets();

  std::string directory_;  // without a slash at the end
  std::string temporary_;
  Vocabulary vocabulary_;
  int64_t shard_tokens_;
  ShardTotals totals_;  // of closed shards
  std::optional<OpenShard> shard_;
  bool finished_ = false;
};

// One shard, checked when opened: kind, version, widths, counts, offsets. Reading is not for several threads at once.
class ShardReader {
 public:
  explicit ShardReader(std::string path);

  const std::string& path() const { return path_; }
  const Vocabulary& vocabulary() const { return vocabulary_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_documents() const { return static_cast<int64_t>(doc_offsets_.size()) - 1; }
  int64_t text_bytes() const { return text_bytes_; }
  const std::vector<int64_t>& doc_offsets() const { return doc_offsets_; }  // [num_documents + 1]

  // The tokens begin .. begin + out.size() - 1. An id outside the vocabulary throws with file, position and id.
  void read(int64_t begin, std::span<int32_t> out);
  // Reads everything and compares with tokens_crc32.
  void verify();
  // Changes with anything the shard says about itself, its tokens (by their CRC) and documents.
  uint64_t fingerprint() const;

  // Reading opens the file; a data set of many shards closes those that it does not need for a while.
  bool is_open() const { return file_.has_value(); }
  void close() { file_.reset(); }

 private:
  void open();
  void read_header();
  template <class T>
  void read_as(int64_t begin, std::span<int32_t> out);
  template <class T>
  uint32_t crc_of_tokens();

  std::string path_;
  std::optional<Hdf5File> file_;
  Vocabulary vocabulary_;
  Hdf5Type width_ = Hdf5Type::kU16;
  int64_t num_tokens_ = 0;
  int64_t text_bytes_ = 0;
  int64_t crc_ = 0;
  std::vector<int64_t> doc_offsets_;
};

}  // namespace palimpsest
