// A data set: the documents of its shards, one after another, as one stream of tokens.
//
// Training and evaluation cut the stream into rows of T tokens that start at multiples of a stride; a row also needs
// the token after it, as its last target, so rows at stride T use every token and lose no target, also where a shard
// ends. A document is cut where a row ends.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "data/shards.h"

namespace palimpsest {

class Dataset {
 public:
  // A folder of *.h5 in name order (byte order), or one shard. All shards must have the same vocabulary.
  explicit Dataset(const std::string& path);

  const std::string& path() const { return path_; }
  const Vocabulary& vocabulary() const { return shards_.front().vocabulary(); }
  int64_t num_shards() const { return static_cast<int64_t>(shards_.size()); }
  int64_t num_tokens() const { return first_token_.back(); }
  int64_t num_documents() const;
  int64_t text_bytes() const;  // of the original documents

  // Throws unless every id of the data set is one of a model with that many.
  void check_vocabulary(int64_t model_vocab_size) const;

  // Over names, sizes and contents of the shards: ranks compare it before the first step.
  uint64_t fingerprint() const;

  // The tokens begin .. begin + out.size() - 1 of the stream. May be called from several threads at once.
  void read(int64_t begin, std::span<int32_t> out) const;

  // Positions p of the stream, begin <= p < end, at which a document starts: how many, and which (appended).
  int64_t count_document_starts(int64_t begin, int64_t end) const;
  void document_starts(int64_t begin, int64_t end, std::vector<int64_t>& out) const;

  // Scored targets of the row of row_length tokens that starts at `begin`: positions whose next token exists and
  // belongs to the same document.
  int64_t count_targets(int64_t begin, int64_t row_length) const;

  // Reads every token and compares checksums.
  void verify() const;
  // The same for a data set of at most this many tokens, which takes a second: damage is then found before anything is
  // computed or written. A larger one is checked piece by piece as it is read.
  static constexpr int64_t kVerifiedTokens = int64_t{1} << 28;
  void verify_if_small() const;

 private:
  // Calls body(shard, first token of the shard in the stream) for each shard that overlaps begin .. end - 1.
  template <class Body>
  void for_each_shard(int64_t begin, int64_t end, Body&& body) const;
  void close_idle_shards(size_t in_use) const;

  std::string path_;
  std::vector<int64_t> first_token_;  // [shards + 1], in the stream
  mutable std::mutex mutex_;          // guards shards_' files and recent_
  mutable std::vector<ShardReader> shards_;
  mutable std::vector<size_t> recent_;  // shards with an open file, the one used last at the end
};

}  // namespace palimpsest
