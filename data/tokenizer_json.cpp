// Reads tokenizer.json (the format of the public `tokenizers` library, version 1.0) and tokenizer_config.json.
#include "data/tokenizer_json.h"

#include <charconv>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "data/public_tokenizer.h"
#include "data/public_tokenizer_parts.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

// ---- added tokens, bos and eos --------------------------------------------------------------------------------------

struct ListedToken {
  AddedToken token;
  bool normalized;
};

std::vector<ListedToken> read_added_tokens(const JsonNode& node) {
  std::vector<ListedToken> tokens;
  if (node.is_null()) return tokens;
  for (size_t i = 0; i < node.size(); ++i) {
    const JsonNode entry = node.at(i);
    entry.allow({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token = {.id = id_of(entry["id"]),
                        .content = entry["content"].text(),
                        .special = entry.flag("special", false),
                        .single_word = entry.flag("single_word", false),
                        .strip_left = entry.flag("lstrip", false),
                        .strip_right = entry.flag("rstrip", false)};
    if (token.content.empty() || token.content.size() > kLongestPiece)
      entry["content"].refuse("expected a text of 1 to ", kLongestPiece, " bytes");
    tokens.push_back({std::move(token), entry.flag("normalized", true)});
  }
  return tokens;
}

// The special tokens that the post-processor puts before and after a text.
struct Surroundings {
  std::string before, after;
};

Surroundings read_post_processor(const JsonNode& node) {
  Surroundings found;
  for_each_step(node, "processors", [&](const JsonNode& step) {
    const std::string type = type_of(step);
    if (type == "ByteLevel") return;  // about offsets
    if (type == "BertProcessing" || type == "RobertaProcessing") {
      if (step["cls"].size() == 2) found.before = step["cls"].at(0).text();
      if (step["sep"].size() == 2) found.after = step["sep"].at(0).text();
      return;
    }
    if (type != "TemplateProcessing")
      refuse_type(step, "ByteLevel, TemplateProcessing, BertProcessing, RobertaProcessing, Sequence");
    const JsonNode single = step["single"];
    bool text_seen = false;
    for (size_t i = 0; i < single.size(); ++i) {
      const JsonNode token = single.at(i)["SpecialToken"];
      text_seen |= token.is_null();
      if (!token.is_null()) (text_seen ? found.after : found.before) = token["id"].text();
    }
  });
  return found;
}

// Names that public models give their marks; used when nothing says which they are.
constexpr std::string_view kUsualBos[] = {"<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>"};
constexpr std::string_view kUsualEos[] = {"</s>",          "<eos>",   "[EOS]",      "<|end_of_text|>",
                                          "<|endoftext|>", "<|eos|>", "<|im_end|>", "<|eot_id|>"};

void choose_marks(const Surroundings& surroundings, const std::optional<TokenizerConfig>& config,
                  const std::map<std::string, int32_t, std::less<>>& special, const std::string& path,
                  TokenizerTable& table) {
  const auto usual = [&](const auto& names) {
    for (const std::string_view name : names)
      if (special.contains(name)) return std::string(name);
    return std::string();
  };
  std::string bos = surroundings.before, eos = surroundings.after;
  if (config) {
    bos = config->bos;
    eos = config->eos;
  }
  if (bos.empty() && eos.empty()) {
    bos = usual(kUsualBos);
    eos = usual(kUsualEos);
  } else if (!config && eos.empty()) {  // a template that only begins texts
    eos = usual(kUsualEos);
  } else if (!config && bos.empty()) {
    bos = usual(kUsualBos);
  }
  if (bos.empty()) bos = eos;
  if (eos.empty()) eos = bos;
  const auto id = [&](const std::string& name, const char* what) {
    const auto found = special.find(name);
    if (!name.empty() && found != special.end()) return found->second;
    throw_user_error(path, ": there is no token for the ", what, " of a document",
                     name.empty() ? "" : ", '" + printable(name) + "'",
                     "; name bos_token and eos_token, each an added token, in a tokenizer_config.json beside it");
  };
  table.bos = id(bos, "start");
  table.eos = id(eos, "end");
}

}  // namespace

TokenizerConfig parse_tokenizer_config(std::string_view json, const std::string& path) {
  const JsonDocument document(json, path);
  const JsonNode& config = document.root();
  const auto token_named = [&](const char* name) {
    const JsonNode node = config[name];
    if (node.is_null()) return std::string();
    return node.is_object() ? node["content"].text() : node.text();
  };
  TokenizerConfig out = {.bos = token_named("bos_token"), .eos = token_named("eos_token"), .special = {}};
  const JsonNode added = config["added_tokens_decoder"];
  if (added.is_null()) return out;
  added.for_each_field([&](const std::string& name, const JsonNode& token) {
    int32_t id = -1;
    const char* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data(), end, id);
    if (error != std::errc() || stop != end || id < 0 || id > kLargestId) token.refuse("expected an id as its name");
    out.special.emplace_back(id, token["content"].text());
  });
  return out;
}

std::unique_ptr<Tokenizer> parse_tokenizer_json(std::string_view json, std::optional<std::string_view> config_json,
                                                const std::string& path) {
  const JsonDocument document(json, path);
  const JsonNode& root = document.root();
  root.allow({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
              "decoder", "model"});
  if (root["version"].is_null() || root["version"].text() != "1.0") root["version"].refuse("expected \"1.0\"");
  refuse_unless_empty(root, "truncation");
  refuse_unless_empty(root, "padding");

  Losses losses;
  PublicTokenizerParts parts;
  parts.normalizer = read_normalizer(root["normalizer"], losses);
  PreTokenizerParts pre_tokenizer = read_pre_tokenizer(root["pre_tokenizer"], losses);
  parts.pre_tokenizer = std::move(pre_tokenizer.steps);
  PieceDecoder decoder = read_decoder(root["decoder"]);
  if (root["decoder"].is_null()) decoder.byte_level = pre_tokenizer.byte_level;

  const std::vector<ListedToken> added = read_added_tokens(root["added_tokens"]);
  std::set<int32_t> special_ids;
  for (const ListedToken& listed : added)
    if (listed.token.special) special_ids.insert(listed.token.id);
  VocabularyModel model = read_model(root["model"], pre_tokenizer.byte_level, special_ids, losses);

  TokenizerTable& table = parts.table;
  for (const std::string& piece : model.pieces.by_id) table.bytes_of.push_back(decoder.text_of(piece));
  std::map<std::string, int32_t, std::less<>> marks;
  PatternScratch scratch;
  for (size_t i = 0; i < added.size(); ++i) {
    AddedToken token = added[i].token;
    const JsonNode entry = root["added_tokens"].at(i);
    const std::optional<int32_t> in_model = model.pieces.find(token.content);
    if (in_model && *in_model != token.id) entry.refuse("has id ", token.id, ", but the model gives it ", *in_model);
    if (!in_model) model.pieces.add(token.content, token.id, entry);
    if (table.bytes_of.size() <= static_cast<size_t>(token.id)) table.bytes_of.resize(token.id + 1);
    table.bytes_of[token.id] = token.special ? "" : token.content;
    marks.emplace(token.content, token.id);
    if (token.strip_left || token.strip_right) losses.add("an added token takes white space beside it away");
    if (!added[i].normalized) {
      parts.raw_tokens.push_back(std::move(token));
      continue;
    }
    normalize(parts.normalizer, token.content, TextStart::kText, scratch);
    if (!token.content.empty()) parts.normalized_tokens.push_back(std::move(token));
  }

  std::optional<TokenizerConfig> config;
  if (config_json) {
    const auto beside = std::filesystem::path(path).parent_path() / "tokenizer_config.json";
    config = parse_tokenizer_config(*config_json, beside.string());
  }
  choose_marks(read_post_processor(root["post_processor"]), config, marks, path, table);
  table.bytes_of[table.bos].clear();
  table.bytes_of[table.eos].clear();
  table.name = std::filesystem::path(path).filename().string();
  table.hash = tokenizer_hash_of(std::string(json) + " " + std::to_string(table.bos) + " " + std::to_string(table.eos));
  table.loss = losses.text();
  table.adds_leading_space = decoder.strips_leading_space;
  parts.model = std::move(model.words);
  return make_public_tokenizer(std::move(parts));
}

}  // namespace palimpsest
