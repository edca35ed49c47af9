// Normalizer, pre-tokenizer and decoder of a tokenizer.json. A field or a kind that is not known here is refused by
// name: leaving one out silently would give other ids.
#include <optional>
#include <utility>

#include "data/byte_level.h"
#include "data/public_tokenizer_parts.h"
#include "data/tokenizer_json.h"
#include "data/utf8.h"
#include "kernels/check.h"

namespace palimpsest {

std::string type_of(const JsonNode& node) {
  const JsonNode type = node["type"];
  return type.is_null() ? "" : type.text();
}

void refuse_type(const JsonNode& node, const char* known) {
  node.refuse("the kind '", printable(type_of(node)), "' is not supported; supported are ", known);
}

void for_each_step(const JsonNode& node, const char* list, const std::function<void(const JsonNode&)>& visit) {
  if (node.is_null()) return;
  if (type_of(node) != "Sequence") return visit(node);
  node.allow({"type", list});
  const JsonNode steps = node[list];
  for (size_t i = 0; i < steps.size(); ++i) {
    const JsonNode step = steps.at(i);
    if (type_of(step) == "Sequence") step.refuse("a Sequence within a Sequence is not supported");
    visit(step);
  }
}

void refuse_unless_empty(const JsonNode& node, const char* name) {
  if (!node[name].is_empty()) node[name].refuse("is not supported; expected null");
}

namespace {

constexpr size_t kLongestText = 1024;  // of replacements and prefixes

std::string short_text(const JsonNode& node) {
  if (node.text().size() > kLongestText) node.refuse("is longer than ", kLongestText, " bytes");
  return node.text();
}

TextPattern read_pattern(const JsonNode& node) {
  node.allow({"String", "Regex"});
  const JsonNode regex = node["Regex"], literal = node["String"];
  if (regex.is_null() == literal.is_null()) node.refuse("expected either String or Regex");
  return regex.is_null() ? TextPattern::literal(literal.text(), literal.where())
                         : TextPattern(regex.text(), regex.where());
}

std::string decode_base64(const JsonNode& node) {
  const std::optional<std::string> bytes = base64_decoded(node.text());
  if (!bytes) node.refuse("is not base64");
  return *bytes;
}

// ---- normalizer -----------------------------------------------------------------------------------------------------

NormalizerStep read_normalizer_step(const JsonNode& node) {
  const std::string type = type_of(node);
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
    return Prepend{short_text(node["prepend"])};
  }
  if (type == "Replace") {
    node.allow({"type", "pattern", "content"});
    return Replace{read_pattern(node["pattern"]), short_text(node["content"])};
  }
  if (type == "Precompiled") {
    node.allow({"type", "precompiled_charsmap"});
    const JsonNode table = node["precompiled_charsmap"];
    return CharacterMap(decode_base64(table), table.where());
  }
  refuse_type(node, "NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Strip, Prepend, Replace, Precompiled, Sequence");
}

}  // namespace

std::vector<NormalizerStep> read_normalizer(const JsonNode& node, Losses& losses) {
  std::vector<NormalizerStep> steps;
  for_each_step(node, "normalizers", [&](const JsonNode& step) {
    steps.push_back(read_normalizer_step(step));
    losses.add("its normalizer " + type_of(step) + " changes text");
  });
  return steps;
}

namespace {

// ---- pre-tokenizer --------------------------------------------------------------------------------------------------

Metaspace read_metaspace(const JsonNode& node) {
  node.allow({"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  Metaspace step = {node["replacement"].text(), Metaspace::kAlways, node.flag("split", true)};
  if (step.mark.empty() || utf8_character_length(step.mark) != step.mark.size())
    node["replacement"].refuse("expected one character");
  const JsonNode scheme = node["prepend_scheme"];
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

// ASCII signs and Unicode's punctuation, of which the public library knows that of version 8.
constexpr std::string_view kPunctuation =
    "(?![\\x{61D}\\x{9FD}\\x{A76}\\x{C77}\\x{C84}\\x{1B7D}\\x{1B7E}\\x{2E43}-\\x{2E4F}\\x{2E52}-\\x{2E5D}\\x{10EAD}"
    "\\x{10F55}-\\x{10F59}\\x{10F86}-\\x{10F89}\\x{1144B}-\\x{1144F}\\x{1145A}\\x{1145B}\\x{1145D}\\x{11660}-\\x{1166C}"
    "\\x{116B9}\\x{1183B}\\x{11944}-\\x{11946}\\x{119E2}\\x{11A3F}-\\x{11A46}\\x{11A9A}-\\x{11A9C}"
    "\\x{11A9E}-\\x{11AA2}\\x{11B00}-\\x{11B09}\\x{11C41}-\\x{11C45}\\x{11C70}\\x{11C71}\\x{11EF7}\\x{11EF8}"
    "\\x{11F43}-\\x{11F4F}\\x{11FFF}\\x{12FF1}\\x{12FF2}\\x{16E97}-\\x{16E9A}\\x{16FE2}\\x{1E95E}\\x{1E95F}])"
    "[!-/:-@\\[-`{-~\\p{P}\\x{166D}\\x{111C9}]";

SplitBehavior read_behavior(const JsonNode& node) {
  const std::pair<const char*, SplitBehavior> kBehaviors[] = {
      {"Removed", SplitBehavior::kRemoved},
      {"Isolated", SplitBehavior::kIsolated},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous}};
  for (const auto& [name, behavior] : kBehaviors)
    if (node.text() == name) return behavior;
  node.refuse("the behaviour '", printable(node.text()), "' is not supported");
}

void read_pre_tokenizer_step(const JsonNode& node, PreTokenizerParts& parts, Losses& losses) {
  const auto split = [&](std::string_view regex, SplitBehavior behavior, bool invert = false) {
    if (behavior == SplitBehavior::kRemoved) losses.add("its pre-tokenizer " + type_of(node) + " removes text");
    parts.steps.emplace_back(Split{TextPattern(regex, node.where()), behavior, invert});
  };
  const std::string type = type_of(node);
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
    const JsonNode behavior = node["behavior"];
    split(kPunctuation, behavior.is_null() ? SplitBehavior::kIsolated : read_behavior(behavior));
  } else if (type == "WhitespaceSplit") {
    node.allow({"type"});
    split("\\s", SplitBehavior::kRemoved);
  } else if (type == "Whitespace") {
    node.allow({"type"});
    const std::string words(kUnicodeWords);
    split("[" + words + "]+|[^" + words + "\\s]+", SplitBehavior::kRemoved, true);
  } else if (type == "Metaspace") {
    parts.steps.emplace_back(read_metaspace(node));
    losses.add("its pre-tokenizer Metaspace does not tell spaces from marks, nor a space before the text from none");
  } else {
    refuse_type(node, "ByteLevel, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, Metaspace, Sequence");
  }
}

}  // namespace

PreTokenizerParts read_pre_tokenizer(const JsonNode& node, Losses& losses) {
  PreTokenizerParts parts;
  for_each_step(node, "pretokenizers", [&](const JsonNode& step) { read_pre_tokenizer_step(step, parts, losses); });
  return parts;
}

namespace {

// ---- decoder --------------------------------------------------------------------------------------------------------

void read_decoder_step(const JsonNode& node, PieceDecoder& decoder) {
  const std::string type = type_of(node);
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
    const JsonNode pattern = node["pattern"];
    pattern.allow({"String"});
    if (short_text(pattern["String"]).empty()) pattern.refuse("expected a text that is not empty");
    decoder.replacements.emplace_back(pattern["String"].text(), short_text(node["content"]));
  } else if (type == "Strip") {
    node.allow({"type", "content", "start", "stop"});
    if (node["content"].text() != " " || id_of(node["start"]) > 1 || id_of(node["stop"]) != 0)
      node.refuse("only one space at the start can be stripped here: content ' ', start 1, stop 0");
    decoder.strips_leading_space |= id_of(node["start"]) == 1;
  } else {
    refuse_type(node, "ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, Sequence");
  }
}

}  // namespace

// The text of a piece as the decoder gives it back.
std::string PieceDecoder::text_of(std::string piece) const {
  if (byte_level) return bytes_of_byte_level(piece).value_or(piece);
  for (const auto& [from, to] : replacements) {
    std::string out;
    size_t at = 0;
    for (size_t found; (found = piece.find(from, at)) != std::string::npos; at = found + from.size())
      out.append(piece, at, found - at) += to;
    piece = out.append(piece, at);
  }
  if (byte_fallback)
    if (const std::optional<char> byte = byte_of_fallback_piece(piece)) return std::string(1, *byte);
  return piece;
}

PieceDecoder read_decoder(const JsonNode& node) {
  PieceDecoder decoder;
  for_each_step(node, "decoders", [&](const JsonNode& step) { read_decoder_step(step, decoder); });
  return decoder;
}

}  // namespace palimpsest
