// Reads tiktoken.model: a line for each token, its bytes in base64 and its rank, which is its id too. The file names no
// pattern and no special tokens; both are those of Kimi Linear's public tokenizer.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <utility>

#include "data/byte_level.h"
#include "data/public_tokenizer.h"
#include "data/public_tokenizer_parts.h"
#include "data/trie.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

constexpr const char* kFileName = "tiktoken.model";
constexpr size_t kLongestToken = 512;
constexpr int32_t kNumSpecial = 256;  // ids kept for special tokens after the ranks
constexpr std::string_view kBos = "[BOS]", kEos = "[EOS]";

struct Line {
  std::string_view base64;
  int32_t rank = 0;
};

std::optional<Line> parse_line(std::string_view text) {
  const size_t space = text.find(' ');
  if (space == 0 || space == std::string_view::npos) return std::nullopt;
  Line line = {.base64 = text.substr(0, space)};
  const char *begin = text.data() + space + 1, *end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, line.rank);
  if (error != std::errc() || stop != end || line.rank < 0) return std::nullopt;
  return line;
}

// Tokens by rank, which go from 0 up without a gap.
std::vector<std::string> parse_ranks(std::string_view content, const std::string& path) {
  std::vector<std::string> tokens;
  for (size_t number = 1; !content.empty(); ++number) {
    const size_t length = std::min(content.find('\n'), content.size());
    const std::optional<Line> line = parse_line(content.substr(0, length));
    const std::optional<std::string> token = line ? base64_decoded(line->base64) : std::nullopt;
    if (!token) throw_user_error(path, ":", number, ": expected a token in base64, a space and its rank");
    if (token->empty() || token->size() > kLongestToken)
      throw_user_error(path, ":", number, ": the token has ", token->size(), " bytes, expected 1 to ", kLongestToken);
    if (static_cast<size_t>(line->rank) != tokens.size())
      throw_user_error(path, ":", number, ": rank ", line->rank, ", expected ", tokens.size());
    tokens.push_back(*token);
    content.remove_prefix(std::min(length + 1, content.size()));
  }
  return tokens;
}

// All pairs of tokens whose bytes together are a token: joined in order of its rank.
std::vector<BpeMerge> merges_of(const std::vector<std::string>& tokens, const std::string& path) {
  Trie ids;
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (ids.find(tokens[id]) != Trie::kNone)
      throw_user_error(path, ":", id + 1, ": the same token as in line ", ids.find(tokens[id]) + 1);
    ids.add(tokens[id], static_cast<int32_t>(id));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char text = static_cast<char>(byte);
    if (ids.find({&text, 1}) == Trie::kNone) throw_user_error(path, ": there is no token for the byte ", byte);
  }
  std::vector<BpeMerge> merges;
  for (size_t id = 0; id < tokens.size(); ++id) {
    const std::string_view token = tokens[id];
    ids.for_each_prefix(token, [&](size_t length, int32_t left) {
      const int32_t right = length < token.size() ? ids.find(token.substr(length)) : Trie::kNone;
      if (right != Trie::kNone) merges.push_back({left, right, static_cast<int32_t>(id)});
    });
  }
  return merges;
}

}  // namespace

bool looks_like_tiktoken(std::string_view content) {
  const std::optional<Line> line = parse_line(content.substr(0, content.find('\n')));
  return line && base64_decoded(line->base64);
}

std::unique_ptr<Tokenizer> parse_tiktoken(std::string_view content, std::optional<std::string_view> config_json,
                                          const std::string& path) {
  const std::filesystem::path file(path);
  if (file.filename() != kFileName)
    throw_user_error(path, ": a tiktoken file does not say how text is cut into words; only ", kFileName,
                     ", as Kimi Linear ships it, is known");
  const std::vector<std::string> tokens = parse_ranks(content, path);
  const auto num_tokens = static_cast<int32_t>(tokens.size());
  TokenizerConfig config;
  if (config_json)
    config = parse_tokenizer_config(*config_json, (file.parent_path() / "tokenizer_config.json").string());
  if (config.bos.empty()) config.bos = kBos;
  if (config.eos.empty()) config.eos = kEos;
  if (config.special.empty()) config.special = {{num_tokens, std::string(kBos)}, {num_tokens + 1, std::string(kEos)}};

  PublicTokenizerParts parts;
  TokenizerTable& table = parts.table;
  table.bytes_of = tokens;
  table.bytes_of.resize(tokens.size() + kNumSpecial);
  const auto special_id = [&](const std::string& name) {
    for (const auto& [id, content_of] : config.special)
      if (content_of == name) return id;
    throw_user_error(path, ": ", name, " is not among the special tokens of tokenizer_config.json");
  };
  for (const auto& [id, name] : config.special) {
    if (id < num_tokens || id >= num_tokens + kNumSpecial || name.empty())
      throw_user_error(path, ": tokenizer_config.json gives the special token '", name, "' the id ", id, ", expected ",
                       num_tokens, " to ", num_tokens + kNumSpecial - 1);
    parts.raw_tokens.push_back({.id = id, .content = name, .special = true});
  }
  table.bos = special_id(config.bos);
  table.eos = special_id(config.eos);
  table.name = kFileName;
  table.hash =
      tokenizer_hash_of(std::string(content) + " " + std::to_string(table.bos) + " " + std::to_string(table.eos));
  parts.pre_tokenizer.emplace_back(Split{TextPattern(kKimiPattern, path), SplitBehavior::kIsolated, false});
  parts.model = make_bpe(tokens, merges_of(tokens, path), {.unit = BpeOptions::Unit::kByte, .whole_words = true});
  return make_public_tokenizer(std::move(parts));
}

}  // namespace palimpsest
