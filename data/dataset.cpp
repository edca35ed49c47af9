#include "data/dataset.h"

#include <algorithm>
#include <filesystem>

#include "data/file_ops.h"
#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

constexpr size_t kMostOpenFiles = 64;

std::vector<std::string> shard_paths(const std::string& path) {
  if (!path_exists(path)) throw_user_error(path, ": no such folder or file of token shards");
  if (!is_directory(path)) return {path};
  std::vector<std::string> paths;
  for (const std::string& name : list_directory(path))
    if (name.ends_with(".h5")) paths.push_back((std::filesystem::path(path) / name).string());
  if (paths.empty()) throw_user_error(path, ": the folder holds no token shards (*.h5)");
  return paths;
}

}  // namespace

Dataset::Dataset(const std::string& path) : path_(path), first_token_{0} {
  for (const std::string& shard_path : shard_paths(path)) {
    ShardReader& shard = shards_.emplace_back(shard_path);
    shard.close();
    if (shard.vocabulary() != vocabulary())
      throw_user_error(shard_path, ": made with the tokenizer ", shard.vocabulary().tokenizer, " (hash ",
                       shard.vocabulary().tokenizer_hash, ", ", shard.vocabulary().size, " ids), unlike ",
                       shards_.front().path(), ": ", vocabulary().tokenizer, " (hash ", vocabulary().tokenizer_hash,
                       ", ", vocabulary().size, " ids)");
    first_token_.push_back(first_token_.back() + shard.num_tokens());
  }
}

int64_t Dataset::num_documents() const {
  int64_t count = 0;
  for (const ShardReader& shard : shards_) count += shard.num_documents();
  return count;
}

int64_t Dataset::text_bytes() const {
  int64_t count = 0;
  for (const ShardReader& shard : shards_) count += shard.text_bytes();
  return count;
}

void Dataset::check_vocabulary(int64_t model_vocab_size) const {
  if (vocabulary().size > model_vocab_size)
    throw_user_error(path_, ": made with a vocabulary of ", vocabulary().size, " ids (tokenizer ",
                     vocabulary().tokenizer, "), but the model has ", model_vocab_size);
}

uint64_t Dataset::fingerprint() const {
  std::string text;
  for (const ShardReader& shard : shards_)
    text += detail::concatenate(std::filesystem::path(shard.path()).filename().string(), " ", file_size(shard.path()),
                                " ", shard.fingerprint(), "\n");
  return hash_of(text);
}

template <class Body>
void Dataset::for_each_shard(int64_t begin, int64_t end, Body&& body) const {
  size_t i = std::upper_bound(first_token_.begin(), first_token_.end(), begin) - first_token_.begin() - 1;
  for (; i < shards_.size() && first_token_[i] < end; ++i) body(i, first_token_[i]);
}

void Dataset::read(int64_t begin, std::span<int32_t> out) const {
  const int64_t end = begin + static_cast<int64_t>(out.size());
  CHECK(begin >= 0 && end <= num_tokens(), path_, ": tokens ", begin, " to ", end, " of ", num_tokens());
  const std::lock_guard lock(mutex_);
  for_each_shard(begin, end, [&](size_t i, int64_t first) {
    ShardReader& shard = shards_[i];
    const int64_t from = std::max(begin, first), to = std::min(end, first + shard.num_tokens());
    close_idle_shards(i);
    shard.read(from - first, out.subspan(from - begin, to - from));
  });
}

void Dataset::close_idle_shards(size_t in_use) const {
  std::erase(recent_, in_use);
  recent_.push_back(in_use);
  if (recent_.size() <= kMostOpenFiles) return;
  shards_[recent_.front()].close();
  recent_.erase(recent_.begin());
}

void Dataset::document_starts(int64_t begin, int64_t end, std::vector<int64_t>& out) const {
  for_each_shard(begin, end, [&](size_t i, int64_t first) {
    const std::vector<int64_t>& offsets = shards_[i].doc_offsets();
    // The last offset is the end of the shard and starts nothing.
    for (auto offset = std::lower_bound(offsets.begin(), offsets.end() - 1, begin - first);
         offset != offsets.end() - 1 && first + *offset < end; ++offset)
      out.push_back(first + *offset);
  });
}

int64_t Dataset::count_document_starts(int64_t begin, int64_t end) const {
  int64_t count = 0;
  for_each_shard(begin, end, [&](size_t i, int64_t first) {
    const std::vector<int64_t>& offsets = shards_[i].doc_offsets();
    count += std::lower_bound(offsets.begin(), offsets.end() - 1, end - first) -
             std::lower_bound(offsets.begin(), offsets.end() - 1, begin - first);
  });
  return count;
}

int64_t Dataset::count_targets(int64_t begin, int64_t row_length) const {
  const int64_t end = std::min(begin + row_length, num_tokens() - 1);  // of the positions that have a next token
  return end <= begin ? 0 : end - begin - count_document_starts(begin + 1, end + 1);
}

void Dataset::verify() const {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < shards_.size(); ++i) {
    close_idle_shards(i);
    shards_[i].verify();
  }
}

void Dataset::verify_if_small() const {
  if (num_tokens() <= kVerifiedTokens) verify();
}

}  // namespace palimpsest
