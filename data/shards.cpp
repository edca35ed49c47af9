#include "data/shards.h"

#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <utility>

#include "data/file_ops.h"
#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

constexpr const char* kFormat = "palimpsest tokens";
constexpr int64_t kFormatVersion = 1;
constexpr int64_t kLargest16BitVocabulary = 65536;
// A row of some thousand tokens should not cost the reading of megabytes.
constexpr int64_t kTokenChunk = 32768, kOffsetChunk = 8192;
constexpr size_t kTokensKept = 32 * kTokenChunk;  // in memory before they are written

Hdf5Type width_for(int64_t vocab_size) {
  return vocab_size <= kLargest16BitVocabulary ? Hdf5Type::kU16 : Hdf5Type::kU32;
}

std::string without_end_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

void check_absent_or_empty(const std::string& directory) {
  if (path_exists(directory) && (!is_directory(directory) || !list_directory(directory).empty()))
    throw_user_error(directory, ": exists and is not an empty folder; name another one, or remove it");
}

template <class T>
uint32_t crc32_of(uint32_t crc, std::span<const T> values) {
  return static_cast<uint32_t>(
      ::crc32_z(crc, reinterpret_cast<const unsigned char*>(values.data()), values.size_bytes()));
}

}  // namespace

Vocabulary vocabulary_of(const Tokenizer& tokenizer) {
  return {tokenizer.vocab_size(), tokenizer.name(), tokenizer.hash(), tokenizer.bos(), tokenizer.eos()};
}

// ---- writing --------------------------------------------------------------------------------------------------------

ShardWriter::ShardWriter(const std::string& directory, Vocabulary vocabulary, int64_t shard_tokens)
    : directory_(without_end_slash(directory)),
      temporary_(directory_ + ".tmp"),
      vocabulary_(std::move(vocabulary)),
      shard_tokens_(shard_tokens) {
  CHECK(!directory_.empty() && shard_tokens_ > 0);
  check_absent_or_empty(directory_);
  if (path_exists(temporary_)) remove_tree(temporary_);  // of a run that was killed
  create_directories(temporary_);
}

ShardWriter::~ShardWriter() {
  shard_.reset();
  if (!finished_) try_remove(temporary_);
}

std::string ShardWriter::shard_path() const {
  char name[32];
  std::snprintf(name, sizeof(name), "/tokens-%05lld.h5", static_cast<long long>(totals_.shards));
  return temporary_ + name;
}

void ShardWriter::open_shard() {
  shard_.emplace(OpenShard{Hdf5File::create(shard_path()), {}, 0, {}, {}});
  shard_->file.create_growing_dataset("tokens", width_for(vocabulary_.size), kTokenChunk);
  shard_->file.create_growing_dataset("doc_offsets", Hdf5Type::kI64, kOffsetChunk);
  shard_->doc_offsets.push_back(0);
}

void ShardWriter::close_shard() {
  flush_tokens();
  flush_offsets();
  Hdf5File& file = shard_->file;
  const ShardTotals& totals = shard_->totals;
  file.set_string("/", "format", kFormat);
  file.set_int("/", "format_version", kFormatVersion);
  file.set_int("/", "num_tokens", totals.tokens);
  file.set_int("/", "num_documents", totals.documents);
  file.set_int("/", "vocab_size", vocabulary_.size);
  file.set_string("/", "tokenizer", vocabulary_.tokenizer);
  file.set_string("/", "tokenizer_hash", vocabulary_.tokenizer_hash);
  file.set_int("/", "bos", vocabulary_.bos);
  file.set_int("/", "eos", vocabulary_.eos);
  file.set_int("/", "text_bytes", totals.text_bytes);
  file.set_int("/", "tokens_crc32", shard_->crc);
  file.close();
  sync_file(file.path());
  totals_.shards += 1;
  totals_.documents += totals.documents;
  totals_.tokens += totals.tokens;
  totals_.text_bytes += totals.text_bytes;
  shard_.reset();
}

void ShardWriter::begin_document() {
  if (!shard_) open_shard();
  put(vocabulary_.bos);
}

void ShardWriter::append(std::span<const int32_t> ids) {
  for (const int32_t id : ids) put(id);
}

void ShardWriter::end_document(int64_t text_bytes) {
  put(vocabulary_.eos);
  shard_->totals.documents += 1;
  shard_->totals.text_bytes += text_bytes;
  shard_->doc_offsets.push_back(shard_->totals.tokens);
  if (shard_->doc_offsets.size() >= kOffsetChunk) flush_offsets();
  if (shard_->totals.tokens >= shard_tokens_) close_shard();
}

ShardTotals ShardWriter::finish() {
  if (shard_) close_shard();
  if (totals_.documents == 0) throw_user_error(directory_, ": there is no text to write");
  sync_directory(temporary_);
  check_absent_or_empty(directory_);
  rename_path(temporary_, directory_);  // takes the place of an empty folder
  finished_ = true;
  const auto parent = std::filesystem::path(directory_).parent_path();
  sync_directory(parent.empty() ? "." : parent.string());
  return totals_;
}

void ShardWriter::put(int32_t id) {
  if (id < 0 || id >= vocabulary_.size)
    throw_user_error(shard_path(), ": token ", shard_->totals.tokens, " would be ", id, ", outside the vocabulary of ",
                     vocabulary_.size, " ids");
  shard_->tokens.push_back(id);
  shard_->totals.tokens += 1;
  if (shard_->tokens.size() == kTokensKept) flush_tokens();
}

void ShardWriter::flush_tokens() {
  if (width_for(vocabulary_.size) == Hdf5Type::kU16)
    flush_tokens_as<uint16_t>();
  else
    flush_tokens_as<uint32_t>();
}

template <class T>
void ShardWriter::flush_tokens_as() {
  const std::vector<T> stored(shard_->tokens.begin(), shard_->tokens.end());
  shard_->crc = crc32_of(shard_->crc, std::span(stored));
  shard_->file.append("tokens", std::span(stored));
  shard_->tokens.clear();
}

void ShardWriter::flush_offsets() {
  shard_->file.append("doc_offsets", std::span<const int64_t>(shard_->doc_offsets));
  shard_->doc_offsets.clear();
}

// ---- reading --------------------------------------------------------------------------------------------------------

ShardReader::ShardReader(std::string path) : path_(std::move(path)) {
  open();
  read_header();
}

void ShardReader::open() {
  if (!file_) file_ = Hdf5File::open(path_);
}

void ShardReader::read_header() {
  if (!file_->has_attribute("/", "format") || file_->get_string("/", "format") != kFormat)
    throw_user_error(path_, ": not a token shard; make shards with 'palimpsest tokenize'");
  const int64_t version = file_->get_int("/", "format_version");
  if (version != kFormatVersion)
    throw_user_error(path_, ": token shard of format version ", version, ", but this program reads version ",
                     kFormatVersion);
  const auto id_attribute = [&](const char* name) {
    const int64_t id = file_->get_int("/", name);
    if (id < 0 || id >= vocabulary_.size)
      throw_user_error(path_, ": ", name, " is ", id, ", outside the vocabulary of ", vocabulary_.size, " ids");
    return static_cast<int32_t>(id);
  };
  vocabulary_.size = file_->get_int("/", "vocab_size");
  if (vocabulary_.size < 1 || vocabulary_.size > std::numeric_limits<int32_t>::max())
    throw_user_error(path_, ": vocab_size is ", vocabulary_.size);
  vocabulary_.tokenizer = file_->get_string("/", "tokenizer");
  vocabulary_.tokenizer_hash = file_->get_string("/", "tokenizer_hash");
  vocabulary_.bos = id_attribute("bos");
  vocabulary_.eos = id_attribute("eos");
  text_bytes_ = file_->get_int("/", "text_bytes");
  crc_ = file_->get_int("/", "tokens_crc32");
  if (text_bytes_ < 0) throw_user_error(path_, ": text_bytes is ", text_bytes_);

  const Hdf5Dataset tokens = file_->dataset("tokens");
  width_ = tokens.type;
  if (width_ != Hdf5Type::kU16 && width_ != Hdf5Type::kU32)
    throw_user_error(path_, ": dataset 'tokens' is ", name_of(width_), ", expected u16 or u32");
  num_tokens_ = file_->get_int("/", "num_tokens");
  if (tokens.shape != std::vector<int64_t>{num_tokens_} || tokens.stored_bytes / size_of(width_) < num_tokens_)
    throw_user_error(path_, ": num_tokens is ", num_tokens_, " but dataset 'tokens' holds ",
                     std::min(tokens.num_elements(), tokens.stored_bytes / size_of(width_)));

  const int64_t num_documents = file_->get_int("/", "num_documents");
  doc_offsets_ = file_->read<int64_t>("doc_offsets");
  if (num_documents < 1 || static_cast<int64_t>(doc_offsets_.size()) != num_documents + 1)
    throw_user_error(path_, ": num_documents is ", num_documents, " but dataset 'doc_offsets' holds ",
                     doc_offsets_.size(), " numbers");
  for (size_t i = 0; i + 1 < doc_offsets_.size(); ++i)
    if (doc_offsets_[i] >= doc_offsets_[i + 1])
      throw_user_error(path_, ": doc_offsets[", i + 1, "] is ", doc_offsets_[i + 1], ", not above doc_offsets[", i,
                       "], which is ", doc_offsets_[i]);
  if (doc_offsets_.front() != 0 || doc_offsets_.back() != num_tokens_)
    throw_user_error(path_, ": doc_offsets go from ", doc_offsets_.front(), " to ", doc_offsets_.back(),
                     ", expected 0 to ", num_tokens_);
}

template <class T>
void ShardReader::read_as(int64_t begin, std::span<int32_t> out) {
  std::vector<T> stored(out.size());
  file_->read<T>("tokens", stored, {begin}, {static_cast<int64_t>(out.size())});
  for (size_t i = 0; i < out.size(); ++i) {
    if (static_cast<int64_t>(stored[i]) >= vocabulary_.size)
      throw_user_error(path_, ": token ", begin + static_cast<int64_t>(i), " is ", stored[i],
                       ", outside the vocabulary of ", vocabulary_.size, " ids");
    out[i] = static_cast<int32_t>(stored[i]);
  }
}

void ShardReader::read(int64_t begin, std::span<int32_t> out) {
  open();
  if (width_ == Hdf5Type::kU16)
    read_as<uint16_t>(begin, out);
  else
    read_as<uint32_t>(begin, out);
}

template <class T>
uint32_t ShardReader::crc_of_tokens() {
  uint32_t crc = 0;
  for (int64_t begin = 0; begin < num_tokens_; begin += kTokensKept) {
    const int64_t count = std::min<int64_t>(kTokensKept, num_tokens_ - begin);
    std::vector<int32_t> ids(count);
    read_as<T>(begin, ids);
    const std::vector<T> stored(ids.begin(), ids.end());
    crc = crc32_of(crc, std::span(stored));
  }
  return crc;
}

void ShardReader::verify() {
  open();
  const uint32_t crc = width_ == Hdf5Type::kU16 ? crc_of_tokens<uint16_t>() : crc_of_tokens<uint32_t>();
  if (crc != crc_) throw_user_error(path_, ": the tokens have CRC ", crc, ", expected ", crc_);
}

uint64_t ShardReader::fingerprint() const {
  std::string text = detail::concatenate(name_of(width_), " ", num_tokens_, " ", text_bytes_, " ", crc_, " ",
                                         vocabulary_.size, " ", vocabulary_.tokenizer, " ", vocabulary_.tokenizer_hash,
                                         " ", vocabulary_.bos, " ", vocabulary_.eos, " ");
  text.append(reinterpret_cast<const char*>(doc_offsets_.data()), doc_offsets_.size() * sizeof(int64_t));
  return hash_of(text);
}

}  // namespace palimpsest
