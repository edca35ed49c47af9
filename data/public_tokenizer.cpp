#include "data/public_tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <utility>

#include "data/file_ops.h"
#include "data/public_tokenizer_parts.h"
#include "data/utf8.h"
#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

// Ids of words seen before: text repeats itself. Each word has one place; a newer one takes it.
class WordCache {
 public:
  void encode(const WordModel& model, std::string_view word, std::vector<int32_t>& ids) {
    constexpr size_t kLongest = 32;
    if (word.size() > kLongest) return model.encode(word, ids);
    Entry& entry = entries_[std::hash<std::string_view>()(word) % kEntries];
    if (entry.word != word) {
      entry.word.clear();
      entry.ids.clear();
      model.encode(word, entry.ids);
      entry.word = word;
    }
    ids.insert(ids.end(), entry.ids.begin(), entry.ids.end());
  }

 private:
  static constexpr size_t kEntries = size_t{1} << 14;
  struct Entry {
    std::string word;  // empty: free
    std::vector<int32_t> ids;
  };
  std::vector<Entry> entries_ = std::vector<Entry>(kEntries);
};

// What one thread needs to encode.
struct Workspace {
  PatternScratch pattern;
  WordCache cache;
  std::vector<AddedTokens::Part> raw_parts, normalized_parts;
  std::string normalized;
  Words words;
};

class PublicTokenizer : public Tokenizer {
 public:
  explicit PublicTokenizer(PublicTokenizerParts parts)
      : Tokenizer(std::move(parts.table)),
        raw_tokens_(std::move(parts.raw_tokens)),
        normalized_tokens_(std::move(parts.normalized_tokens)),
        normalizer_(std::move(parts.normalizer)),
        pre_tokenizer_(std::move(parts.pre_tokenizer)),
        model_(std::move(parts.model)) {}

 private:
  void encode_window(std::string_view text, const EncodeOptions& options, std::vector<int32_t>& ids) const override {
    std::unique_ptr<Workspace> workspace = take_workspace();
    TextStart start = options.continues ? TextStart::kContinued : TextStart::kText;
    for (; !text.empty(); start = TextStart::kContinued) {
      const size_t valid = utf8_valid_length(text);
      if (valid > 0) encode_valid(text.substr(0, valid), options.special_tokens, start, *workspace, ids);
      text.remove_prefix(valid);
      size_t bad = 0;
      while (bad < text.size() && utf8_character_length(text.substr(bad)) == 0) ++bad;
      if (bad > 0) model_->encode_bytes(text.substr(0, bad), ids);
      text.remove_prefix(bad);
    }
    const std::lock_guard lock(mutex_);
    workspaces_.push_back(std::move(workspace));
  }

  void encode_valid(std::string_view text, bool special, TextStart start, Workspace& workspace,
                    std::vector<int32_t>& ids) const {
    workspace.raw_parts.clear();
    raw_tokens_.split(text, special, workspace.raw_parts);
    for (const AddedTokens::Part& part : workspace.raw_parts) {
      if (part.id)
        ids.push_back(*part.id);
      else
        encode_between(text.substr(part.range.begin, part.range.size()), special, start, workspace, ids);
      start = TextStart::kAfterToken;
    }
  }

  void encode_between(std::string_view text, bool special, TextStart start, Workspace& workspace,
                      std::vector<int32_t>& ids) const {
    workspace.normalized = text;
    normalize(normalizer_, workspace.normalized, start, workspace.pattern);
    const std::string_view normalized = workspace.normalized;
    workspace.normalized_parts.clear();
    normalized_tokens_.split(normalized, special, workspace.normalized_parts);
    for (const AddedTokens::Part& part : workspace.normalized_parts) {
      if (part.id)
        ids.push_back(*part.id);
      else
        encode_words(normalized.substr(part.range.begin, part.range.size()), start, workspace, ids);
      start = TextStart::kAfterToken;
    }
  }

  void encode_words(std::string_view text, TextStart start, Workspace& workspace, std::vector<int32_t>& ids) const {
    Words& words = workspace.words;
    words.text = text;
    pre_tokenizer_.split(words, start, workspace.pattern);
    for (const TextRange range : words.ranges)
      workspace.cache.encode(*model_, std::string_view(words.text).substr(range.begin, range.size()), ids);
  }

  // As many as threads ever encoded at once.
  std::unique_ptr<Workspace> take_workspace() const {
    {
      const std::lock_guard lock(mutex_);
      if (!workspaces_.empty()) {
        std::unique_ptr<Workspace> workspace = std::move(workspaces_.back());
        workspaces_.pop_back();
        return workspace;
      }
    }
    return std::make_unique<Workspace>();
  }

  AddedTokens raw_tokens_, normalized_tokens_;
  std::vector<NormalizerStep> normalizer_;
  PreTokenizer pre_tokenizer_;
  std::unique_ptr<WordModel> model_;
  mutable std::mutex mutex_;  // guards workspaces_
  mutable std::vector<std::unique_ptr<Workspace>> workspaces_;
};

constexpr int64_t kLargestFile = int64_t{256} << 20;

std::optional<std::string> config_beside(const std::string& path) {
  const std::string config = (std::filesystem::path(path).parent_path() / "tokenizer_config.json").string();
  if (!path_exists(config)) return std::nullopt;
  return read_whole_file(config, kLargestFile);
}

}  // namespace

std::unique_ptr<Tokenizer> make_public_tokenizer(PublicTokenizerParts parts) {
  return std::make_unique<PublicTokenizer>(std::move(parts));
}

std::unique_ptr<Tokenizer> load_tokenizer_json(const std::string& path) {
  return parse_tokenizer_json(read_whole_file(path, kLargestFile), config_beside(path), path);
}

std::unique_ptr<Tokenizer> load_tiktoken(const std::string& path) {
  return parse_tiktoken(read_whole_file(path, kLargestFile), config_beside(path), path);
}

}  // namespace palimpsest
