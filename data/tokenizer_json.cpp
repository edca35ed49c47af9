// Reads tokenizer.json (the format of the public `tokenizers` library, version 1.0) and tokenizer_config.json. A field
// or a kind that is not known here is refused by name: silently leaving one out would give other ids.
#include <algorithm>
#include <array>
#include <bitset>
#include <charconv>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "data/byte_level.h"
#include "data/public_tokenizer.h"
#include "data/public_tokenizer_parts.h"
#include "data/utf8.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

using Json = nlohmann::json;

constexpr size_t kLongestPiece = 1024;         // bytes: Viterbi's steps a character
constexpr int32_t kLargestId = (1 << 22) - 1;  // an id costs memory whether the file has it or not
constexpr size_t kLongestText = 1024;          // of replacements and prefixes

// Fit for a message of one line.
std::string printable(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string out(text.substr(0, kLongest));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < ' ' || c == 127) c = '?';
  return text.size() > kLongest ? out + "..." : out;
}

Json parse_json(std::string_view text, const std::string& path) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    std::string cause = error.what();
    if (const size_t begin = cause.find("] "); begin != std::string::npos) cause = cause.substr(begin + 2);
    constexpr size_t kLongestCause = 200;
    std::replace_if(
        cause.begin(), cause.end(), [](unsigned char c) { return c < ' '; }, ' ');
    throw_user_error(path, ": not JSON: ", cause.substr(0, kLongestCause));
  }
}

// A value and where it stands, for messages.
class Node {
 public:
  Node(const Json& value, std::string where) : value_(&value), where_(std::move(where)) {}

  const Json& json() const { return *value_; }
  const std::string& where() const { return where_; }
  bool is_null() const { return value_->is_null(); }
  [[noreturn]] void refuse(const std::string& fault) const { throw_user_error(where_, ": ", fault); }

  Node operator[](const char* name) const {  // null when there is none
    if (!value_->is_object()) refuse("expected an object");
    const auto found = value_->find(name);
    return {found == value_->end() ? null_ : *found, where_ + "." + name};
  }
  Node at(size_t index) const { return {(*value_)[index], where_ + "[" + std::to_string(index) + "]"}; }
  size_t size() const {
    if (!value_->is_array()) refuse("expected a list");
    return value_->size();
  }
  const std::string& text() const {
    if (!value_->is_string()) refuse("expected a text");
    return value_->get_ref<const std::string&>();
  }
  std::string short_text() const {
    if (text().size() > kLongestText) refuse("is longer than " + std::to_string(kLongestText) + " bytes");
    return text();
  }
  double number() const {
    if (!value_->is_number()) refuse("expected a number");
    return value_->get<double>();
  }
  int32_t id() const {
    const bool whole = value_->is_number_unsigned() && value_->get<uint64_t>() <= uint64_t{kLargestId};
    if (!whole) refuse("expected an id from 0 to " + std::to_string(kLargestId));
    return value_->get<int32_t>();
  }
  bool flag(const char* name, bool otherwise) const {
    const Node node = (*this)[name];
    if (node.is_null()) return otherwise;
    if (!node.value_->is_boolean()) node.refuse("expected true or false");
    return node.value_->get<bool>();
  }
  std::string type() const { return (*this)["type"].is_null() ? "" : (*this)["type"].text(); }

  // Throws unless all fields are among these.
  void allow(std::initializer_list<std::string_view> names) const {
    if (!value_->is_object()) refuse("expected an object");
    for (const auto& field : value_->items())
      if (std::find(names.begin(), names.end(), field.key()) == names.end())
        refuse("the field '" + printable(field.key()) + "' is not supported");
  }
  [[noreturn]] void refuse_type(const char* known) const {
    refuse("the kind '" + printable(type()) + "' is not supported; supported are " + known);
  }

 private:
  static const Json null_;
  const Json* value_;
  std::string where_;
};
const Json Node::null_;

// What text -> ids -> text may lose, in words.
class Losses {
 public:
  void add(const std::string& loss) {
    if (text_.find(loss) == std::string::npos) text_ += (text_.empty() ? "" : "; ") + loss;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Calls visit(node) for each step of a component: itself, or those of a Sequence, however nested.
template <class Visit>
void for_each_step(const Node& node, const char* list, Visit&& visit, int depth = 0) {
  constexpr int kDeepest = 16;
  if (node.is_null()) return;
  if (node.type() != "Sequence") return visit(node);
  if (depth == kDeepest) node.refuse("is nested too deeply");
  node.allow({"type", list});
  const Node steps = node[list];
  for (size_t i = 0; i < steps.size(); ++i) for_each_step(steps.at(i), list, visit, depth + 1);
}

TextPattern read_pattern(const Node& node) {
  node.allow({"String", "Regex"});
  const Node regex = node["Regex"], literal = node["String"];
  if (regex.is_null() == literal.is_null()) node.refuse("expected either String or Regex");
  return regex.is_null() ? TextPattern::literal(literal.text(), literal.where())
                         : TextPattern(regex.text(), regex.where());
}

std::string decode_base64(const Node& node) {
  const std::optional<std::string> bytes = base64_decoded(node.text());
  if (!bytes) node.refuse("is not base64");
  return *bytes;
}

// ---- normalizer -----------------------------------------------------------------------------------------------------

NormalizerStep read_normalizer_step(const Node& node) {
  const std::string type = node.type();
  const std::pair<const char*, UnicodeForm::Kind> kForms[] = {{"NFC", UnicodeForm::kNfc},
                                                              {"NFD", UnicodeForm::kNfd},
                                                              {"NFKC", UnicodeForm::kNfkc},
                                                              {"NFKD", UnicodeForm::kNfkd}};
  for (const auto& [name, kind] : kForms) {
    if (type != name) continue;
    node.allow({"type"});
    return UnicodeForm{kind};
  }
  if (type == "Lowercase") {
    node.allow({"type"});
    return Lowercase{};
  }
  if (type == "StripAccents") {
    node.allow({"type"});
    return StripAccents{};
  }
  if (type == "Strip") {
    node.allow({"type", "strip_left", "strip_right"});
    return StripWhiteSpace{node.flag("strip_left", true), node.flag("strip_right", true)};
  }
  if (type == "Prepend") {
    node.allow({"type", "prepend"});
    return Prepend{node["prepend"].short_text()};
  }
  if (type == "Replace") {
    node.allow({"type", "pattern", "content"});
    return Replace{read_pattern(node["pattern"]), node["content"].short_text()};
  }
  if (type == "Precompiled") {
    node.allow({"type", "precompiled_charsmap"});
    const Node table = node["precompiled_charsmap"];
    return CharacterMap(decode_base64(table), table.where());
  }
  node.refuse_type("NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Strip, Prepend, Replace, Precompiled, Sequence");
}

std::vector<NormalizerStep> read_normalizer(const Node& node, Losses& losses) {
  std::vector<NormalizerStep> steps;
  for_each_step(node, "normalizers", [&](const Node& step) {
    steps.push_back(read_normalizer_step(step));
    losses.add("its normalizer " + step.type() + " changes text");
  });
  return steps;
}

// ---- pre-tokenizer --------------------------------------------------------------------------------------------------

Metaspace read_metaspace(const Node& node) {
  node.allow({"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  Metaspace step = {node["replacement"].text(), Metaspace::kAlways, node.flag("split", true)};
  if (step.mark.empty() || utf8_character_length(step.mark) != step.mark.size())
    node["replacement"].refuse("expected one character");
  const Node scheme = node["prepend_scheme"];
  if (scheme.is_null())
    step.prefix = node.flag("add_prefix_space", true) ? Metaspace::kAlways : Metaspace::kNever;
  else if (scheme.text() == "first")
    step.prefix = Metaspace::kFirst;
  else if (scheme.text() == "never")
    step.prefix = Metaspace::kNever;
  else if (scheme.text() != "always")
    scheme.refuse("expected always, first or never");
  return step;
}

SplitBehavior read_behavior(const Node& node) {
  const std::pair<const char*, SplitBehavior> kBehaviors[] = {
      {"Removed", SplitBehavior::kRemoved},
      {"Isolated", SplitBehavior::kIsolated},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous}};
  for (const auto& [name, behavior] : kBehaviors)
    if (node.text() == name) return behavior;
  node.refuse("the behaviour '" + printable(node.text()) + "' is not supported");
}

struct PreTokenizerParts {
  std::vector<PreTokenizerStep> steps;
  bool byte_level = false;  // the model's pieces are spelled in the alphabet of bytes
};

void read_pre_tokenizer_step(const Node& node, PreTokenizerParts& parts, Losses& losses) {
  const auto split = [&](std::string_view regex, SplitBehavior behavior, bool invert = false) {
    if (behavior == SplitBehavior::kRemoved) losses.add("its pre-tokenizer " + node.type() + " removes text");
    parts.steps.emplace_back(Split{TextPattern(regex, node.where()), behavior, invert});
  };
  const std::string type = node.type();
  if (parts.byte_level) node.refuse("nothing may follow ByteLevel in a pre-tokenizer here");
  if (type == "ByteLevel") {
    node.allow({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    parts.byte_level = true;
    if (node.flag("add_prefix_space", true)) {
      parts.steps.emplace_back(PrefixSpace{});
      losses.add("its pre-tokenizer puts a space before a text that has none");
    }
    if (node.flag("use_regex", true)) split(kGpt2Pattern, SplitBehavior::kIsolated);
  } else if (type == "Split") {
    node.allow({"type", "pattern", "behavior", "invert"});
    const SplitBehavior behavior = read_behavior(node["behavior"]);
    if (behavior == SplitBehavior::kRemoved) losses.add("its pre-tokenizer Split removes text");
    parts.steps.emplace_back(Split{read_pattern(node["pattern"]), behavior, node.flag("invert", false)});
  } else if (type == "Digits") {
    node.allow({"type", "individual_digits"});
    split("\\p{N}", node.flag("individual_digits", false) ? SplitBehavior::kIsolated : SplitBehavior::kContiguous);
  } else if (type == "Punctuation") {
    node.allow({"type", "behavior"});
    const Node behavior = node["behavior"];
    split("[!-/:-@\\[-`{-~\\p{P}]", behavior.is_null() ? SplitBehavior::kIsolated : read_behavior(behavior));
  } else if (type == "WhitespaceSplit") {
    node.allow({"type"});
    split("\\s", SplitBehavior::kRemoved);
  } else if (type == "Whitespace") {
    node.allow({"type"});
    split("\\w+|[^\\w\\s]+", SplitBehavior::kRemoved, true);
  } else if (type == "Metaspace") {
    parts.steps.emplace_back(read_metaspace(node));
    losses.add("its pre-tokenizer Metaspace does not tell spaces from marks, nor a space before the text from none");
  } else {
    node.refuse_type("ByteLevel, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, Metaspace, Sequence");
  }
}

PreTokenizerParts read_pre_tokenizer(const Node& node, Losses& losses) {
  PreTokenizerParts parts;
  for_each_step(node, "pretokenizers", [&](const Node& step) { read_pre_tokenizer_step(step, parts, losses); });
  return parts;
}

// ---- decoder --------------------------------------------------------------------------------------------------------

struct Decoder {
  bool byte_level = false;
  bool byte_fallback = false;
  std::vector<std::pair<std::string, std::string>> replacements;
  bool strips_leading_space = false;
};

void read_decoder_step(const Node& node, Decoder& decoder) {
  const std::string type = node.type();
  if (type == "ByteLevel") {
    node.allow({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    decoder.byte_level = true;
  } else if (type == "ByteFallback") {
    node.allow({"type"});
    decoder.byte_fallback = true;
  } else if (type == "Fuse") {
    node.allow({"type"});
  } else if (type == "Metaspace") {
    const Metaspace step = read_metaspace(node);
    decoder.replacements.emplace_back(step.mark, " ");
    decoder.strips_leading_space |= step.prefix != Metaspace::kNever;
  } else if (type == "Replace") {
    node.allow({"type", "pattern", "content"});
    const Node pattern = node["pattern"];
    pattern.allow({"String"});
    if (pattern["String"].short_text().empty()) pattern.refuse("expected a text that is not empty");
    decoder.replacements.emplace_back(pattern["String"].text(), node["content"].short_text());
  } else if (type == "Strip") {
    node.allow({"type", "content", "start", "stop"});
    if (node["content"].text() != " " || node["start"].id() > 1 || node["stop"].id() != 0)
      node.refuse("only one space at the start can be stripped here: content ' ', start 1, stop 0");
    decoder.strips_leading_space |= node["start"].id() == 1;
  } else {
    node.refuse_type("ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, Sequence");
  }
}

// The text of a piece as the decoder gives it back.
std::string decoded(std::string piece, const Decoder& decoder) {
  if (decoder.byte_level) return bytes_of_byte_level(piece).value_or(piece);
  for (const auto& [from, to] : decoder.replacements) {
    std::string out;
    size_t at = 0;
    for (size_t found; (found = piece.find(from, at)) != std::string::npos; at = found + from.size())
      out.append(piece, at, found - at) += to;
    piece = out.append(piece, at);
  }
  if (decoder.byte_fallback)
    if (const std::optional<char> byte = byte_of_fallback_piece(piece)) return std::string(1, *byte);
  return piece;
}

// ---- model ----------------------------------------------------------------------------------------------------------

// Pieces by id; holes are empty.
struct Pieces {
  std::vector<std::string> by_id;
  std::map<std::string, int32_t, std::less<>> ids;

  void add(const std::string& piece, int32_t id, const Node& node) {
    if (piece.size() > kLongestPiece) node.refuse("a piece is longer than " + std::to_string(kLongestPiece) + " bytes");
    if (static_cast<size_t>(id) >= by_id.size()) by_id.resize(id + 1);
    if (!by_id[id].empty() && by_id[id] != piece)
      node.refuse("id " + std::to_string(id) + " is both '" + printable(by_id[id]) + "' and '" + printable(piece) +
                  "'");
    by_id[id] = piece;
    ids.insert_or_assign(piece, id);  // where a file repeats a piece, the last one counts
  }
  std::optional<int32_t> find(std::string_view piece) const {
    const auto found = ids.find(piece);
    return found == ids.end() ? std::nullopt : std::optional(found->second);
  }
};

std::optional<std::array<int32_t, 256>> byte_pieces(const Pieces& pieces) {
  std::array<int32_t, 256> ids;
  for (int byte = 0; byte < 256; ++byte) {
    const std::optional<int32_t> id = pieces.find(fallback_piece(static_cast<char>(byte)));
    if (!id) return std::nullopt;
    ids[byte] = *id;
  }
  return ids;
}

void refuse_unless_empty(const Node& node, const char* name) {
  const Node field = node[name];
  const bool empty = field.is_null() || (field.json().is_string() && field.text().empty()) ||
                     (field.json().is_number() && field.number() == 0.0);
  if (!empty) field.refuse("is not supported; expected null");
}

struct Model {
  Pieces pieces;
  std::unique_ptr<WordModel> words;
};

std::pair<std::string, std::string> read_pair(const Node& node) {
  if (node.json().is_array()) {
    if (node.size() != 2) node.refuse("expected two pieces");
    return {node.at(0).text(), node.at(1).text()};
  }
  const std::string& text = node.text();
  const size_t space = text.find(' ');
  if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
    node.refuse("expected two pieces with a space between");
  return {text.substr(0, space), text.substr(space + 1)};
}

std::vector<BpeMerge> read_merges(const Node& node, const Pieces& pieces) {
  std::vector<BpeMerge> merges;
  merges.reserve(node.size());
  for (size_t i = 0; i < node.size(); ++i) {
    const Node merge = node.at(i);
    const auto [left, right] = read_pair(merge);
    const auto id = [&](const std::string& piece) {
      const std::optional<int32_t> found = pieces.find(piece);
      if (!found) merge.refuse("'" + printable(piece) + "' is not in the vocabulary");
      return *found;
    };
    merges.push_back({id(left), id(right), id(left + right)});
  }
  return merges;
}

Model read_bpe(const Node& node, bool byte_level, const std::set<int32_t>& special, Losses& losses) {
  node.allow({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
              "byte_fallback", "ignore_merges", "vocab", "merges"});
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
    refuse_unless_empty(node, name);
  Model model;
  const Node vocab = node["vocab"];
  if (!vocab.json().is_object()) vocab.refuse("expected an object of pieces and ids");
  for (const auto& field : vocab.json().items())
    model.pieces.add(field.key(), Node(field.value(), vocab.where() + "['" + printable(field.key()) + "']").id(),
                     vocab);

  BpeOptions options = {.unit = byte_level ? BpeOptions::Unit::kByte : BpeOptions::Unit::kCharacter,
                        .whole_words = node.flag("ignore_merges", false)};
  options.unknown.fuse = node.flag("fuse_unk", false);
  if (const Node unknown = node["unk_token"]; !unknown.is_null()) {
    options.unknown.id = model.pieces.find(unknown.text());
    if (!options.unknown.id) unknown.refuse("is not in the vocabulary");
  }
  if (node.flag("byte_fallback", false)) options.unknown.bytes = byte_pieces(model.pieces);

  std::vector<std::string> texts(model.pieces.by_id.size());
  std::bitset<256> known_bytes;
  for (size_t id = 0; id < texts.size(); ++id) {
    if (special.contains(static_cast<int32_t>(id))) continue;
    const std::string& piece = model.pieces.by_id[id];
    texts[id] = byte_level ? bytes_of_byte_level(piece).value_or("") : piece;
    if (byte_level && texts[id].size() == 1) known_bytes.set(static_cast<uint8_t>(texts[id][0]));
  }
  if (!options.unknown.bytes && !known_bytes.all()) losses.add("text outside its vocabulary is lost");
  model.words = make_bpe(texts, read_merges(node["merges"], model.pieces), options);
  return model;
}

Model read_unigram(const Node& node, bool byte_level, const std::set<int32_t>& special, Losses& losses) {
  node.allow({"type", "unk_id", "vocab", "byte_fallback"});
  if (byte_level) node.refuse("a Unigram model after a ByteLevel pre-tokenizer is not supported");
  Model model;
  const Node vocab = node["vocab"];
  std::vector<UnigramPiece> pieces(vocab.size());
  double lowest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < vocab.size(); ++i) {
    const Node entry = vocab.at(i);
    if (entry.size() != 2) entry.refuse("expected a piece and its score");
    const std::string& text = entry.at(0).text();
    pieces[i].score = entry.at(1).number();
    lowest = std::min(lowest, pieces[i].score);
    model.pieces.add(text, static_cast<int32_t>(i), entry);
    if (!special.contains(static_cast<int32_t>(i))) pieces[i].text = text;
  }
  UnknownText unknown = {.fuse = true};
  if (const Node id = node["unk_id"]; !id.is_null()) {
    unknown.id = id.id();
    if (static_cast<size_t>(*unknown.id) >= pieces.size()) id.refuse("is outside the vocabulary");
    pieces[*unknown.id].text.clear();
  }
  if (node.flag("byte_fallback", false)) unknown.bytes = byte_pieces(model.pieces);
  if (!unknown.bytes) losses.add("text outside its vocabulary is lost");
  model.words = make_unigram(pieces, lowest, unknown);
  return model;
}

Model read_model(const Node& node, bool byte_level, const std::set<int32_t>& special, Losses& losses) {
  const std::string type = node.type();
  if (type == "BPE" || (type.empty() && !node["merges"].is_null())) return read_bpe(node, byte_level, special, losses);
  if (type == "Unigram" || (type.empty() && node["vocab"].json().is_array()))
    return read_unigram(node, byte_level, special, losses);
  node.refuse_type("BPE, Unigram");
}

// ---- added tokens, bos and eos --------------------------------------------------------------------------------------

struct ListedToken {
  AddedToken token;
  bool normalized;
};

std::vector<ListedToken> read_added_tokens(const Node& node) {
  std::vector<ListedToken> tokens;
  if (node.is_null()) return tokens;
  for (size_t i = 0; i < node.size(); ++i) {
    const Node entry = node.at(i);
    entry.allow({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token = {.id = entry["id"].id(),
                        .content = entry["content"].text(),
                        .special = entry.flag("special", false),
                        .single_word = entry.flag("single_word", false),
                        .strip_left = entry.flag("lstrip", false),
                        .strip_right = entry.flag("rstrip", false)};
    if (token.content.empty() || token.content.size() > kLongestPiece)
      entry["content"].refuse("expected a text of 1 to " + std::to_string(kLongestPiece) + " bytes");
    tokens.push_back({std::move(token), entry.flag("normalized", true)});
  }
  return tokens;
}

// The special tokens that the post-processor puts before and after a text.
struct Surroundings {
  std::string before, after;
};

Surroundings read_post_processor(const Node& node) {
  Surroundings found;
  for_each_step(node, "processors", [&](const Node& step) {
    const std::string type = step.type();
    if (type == "ByteLevel") return;  // about offsets
    if (type == "BertProcessing" || type == "RobertaProcessing") {
      if (step["cls"].size() == 2) found.before = step["cls"].at(0).text();
      if (step["sep"].size() == 2) found.after = step["sep"].at(0).text();
      return;
    }
    if (type != "TemplateProcessing")
      step.refuse_type("ByteLevel, TemplateProcessing, BertProcessing, RobertaProcessing, Sequence");
    const Node single = step["single"];
    bool text_seen = false;
    for (size_t i = 0; i < single.size(); ++i) {
      const Node token = single.at(i)["SpecialToken"];
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
  const Json root = parse_json(json, path);
  const Node config(root, path);
  const auto token_named = [&](const char* name) {
    const Node node = config[name];
    if (node.is_null()) return std::string();
    return node.json().is_object() ? node["content"].text() : node.text();
  };
  TokenizerConfig out = {.bos = token_named("bos_token"), .eos = token_named("eos_token"), .special = {}};
  const Node added = config["added_tokens_decoder"];
  if (added.is_null()) return out;
  if (!added.json().is_object()) added.refuse("expected an object");
  for (const auto& field : added.json().items()) {
    const Node token(field.value(), added.where() + "['" + printable(field.key()) + "']");
    int32_t id = -1;
    const char* end = field.key().data() + field.key().size();
    const auto [stop, error] = std::from_chars(field.key().data(), end, id);
    if (error != std::errc() || stop != end || id < 0 || id > kLargestId) token.refuse("expected an id as its name");
    out.special.emplace_back(id, token["content"].text());
  }
  return out;
}

std::unique_ptr<Tokenizer> parse_tokenizer_json(std::string_view json, std::optional<std::string_view> config_json,
                                                const std::string& path) {
  const Json root_json = parse_json(json, path);
  const Node root(root_json, path);
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
  Decoder decoder;
  for_each_step(root["decoder"], "decoders", [&](const Node& step) { read_decoder_step(step, decoder); });
  if (root["decoder"].is_null()) decoder.byte_level = pre_tokenizer.byte_level;

  const std::vector<ListedToken> added = read_added_tokens(root["added_tokens"]);
  std::set<int32_t> special_ids;
  for (const ListedToken& listed : added)
    if (listed.token.special) special_ids.insert(listed.token.id);
  Model model = read_model(root["model"], pre_tokenizer.byte_level, special_ids, losses);

  TokenizerTable& table = parts.table;
  for (const std::string& piece : model.pieces.by_id) table.bytes_of.push_back(decoded(piece, decoder));
  std::map<std::string, int32_t, std::less<>> marks;
  PatternScratch scratch;
  for (size_t i = 0; i < added.size(); ++i) {
    AddedToken token = added[i].token;
    const Node entry = root["added_tokens"].at(i);
    const std::optional<int32_t> in_model = model.pieces.find(token.content);
    if (in_model && *in_model != token.id)
      entry.refuse("has id " + std::to_string(token.id) + ", but the model gives it " + std::to_string(*in_model));
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
