// The model of a tokenizer.json: BPE or Unigram.
#include <algorithm>
#include <array>
#include <bitset>
#include <limits>
#include <utility>

#include "data/byte_level.h"
#include "data/tokenizer_json.h"

namespace palimpsest {

void Pieces::add(const std::string& piece, int32_t id, const JsonNode& node) {
  if (piece.size() > kLongestPiece) node.refuse("a piece is longer than ", kLongestPiece, " bytes");
  if (static_cast<size_t>(id) >= by_id.size()) by_id.resize(id + 1);
  if (!by_id[id].empty() && by_id[id] != piece)
    node.refuse("id ", id, " is both '", printable(by_id[id]), "' and '", printable(piece), "'");
  by_id[id] = piece;
  ids.insert_or_assign(piece, id);  // where a file repeats a piece, the last one counts
}

std::optional<int32_t> Pieces::find(std::string_view piece) const {
  const auto found = ids.find(piece);
  return found == ids.end() ? std::nullopt : std::optional(found->second);
}

namespace {

std::optional<std::array<int32_t, 256>> byte_pieces(const Pieces& pieces) {
  std::array<int32_t, 256> ids;
  for (int byte = 0; byte < 256; ++byte) {
    const std::optional<int32_t> id = pieces.find(fallback_piece(static_cast<char>(byte)));
    if (!id) return std::nullopt;
    ids[byte] = *id;
  }
  return ids;
}

std::pair<std::string, std::string> read_pair(const JsonNode& node) {
  if (node.is_array()) {
    if (node.size() != 2) node.refuse("expected two pieces");
    return {node.at(0).text(), node.at(1).text()};
  }
  const std::string& text = node.text();
  const size_t space = text.find(' ');
  if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
    node.refuse("expected two pieces with a space between");
  return {text.substr(0, space), text.substr(space + 1)};
}

std::vector<BpeMerge> read_merges(const JsonNode& node, const Pieces& pieces) {
  std::vector<BpeMerge> merges;
  merges.reserve(node.size());
  for (size_t i = 0; i < node.size(); ++i) {
    const JsonNode merge = node.at(i);
    const auto [left, right] = read_pair(merge);
    const auto id = [&](const std::string& piece) {
      const std::optional<int32_t> found = pieces.find(piece);
      if (!found) merge.refuse("'", printable(piece), "' is not in the vocabulary");
      return *found;
    };
    merges.push_back({id(left), id(right), id(left + right)});
  }
  return merges;
}

VocabularyModel read_bpe(const JsonNode& node, bool byte_level, const std::set<int32_t>& special, Losses& losses) {
  node.allow({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
              "byte_fallback", "ignore_merges", "vocab", "merges"});
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
    refuse_unless_empty(node, name);
  VocabularyModel model;
  const JsonNode vocab = node["vocab"];
  vocab.for_each_field(
      [&](const std::string& piece, const JsonNode& id) { model.pieces.add(piece, id_of(id), vocab); });

  BpeOptions options = {.unit = byte_level ? BpeOptions::Unit::kByte : BpeOptions::Unit::kCharacter,
                        .whole_words = node.flag("ignore_merges", false)};
  options.unknown.fuse = node.flag("fuse_unk", false);
  if (const JsonNode unknown = node["unk_token"]; !unknown.is_null()) {
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

VocabularyModel read_unigram(const JsonNode& node, bool byte_level, const std::set<int32_t>& special, Losses& losses) {
  node.allow({"type", "unk_id", "vocab", "byte_fallback"});
  if (byte_level) node.refuse("a Unigram model after a ByteLevel pre-tokenizer is not supported");
  VocabularyModel model;
  const JsonNode vocab = node["vocab"];
  std::vector<UnigramPiece> pieces(vocab.size());
  double lowest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < vocab.size(); ++i) {
    const JsonNode entry = vocab.at(i);
    if (entry.size() != 2) entry.refuse("expected a piece and its score");
    const std::string text(entry.at(0).text());
    pieces[i].score = entry.at(1).number();
    lowest = std::min(lowest, pieces[i].score);
    model.pieces.add(text, static_cast<int32_t>(i), entry);
    if (!special.contains(static_cast<int32_t>(i))) pieces[i].text = text;
  }
  UnknownText unknown = {.fuse = true};
  if (const JsonNode id = node["unk_id"]; !id.is_null()) {
    unknown.id = id_of(id);
    if (static_cast<size_t>(*unknown.id) >= pieces.size()) id.refuse("is outside the vocabulary");
    pieces[*unknown.id].text.clear();
  }
  if (node.flag("byte_fallback", false)) unknown.bytes = byte_pieces(model.pieces);
  if (!unknown.bytes) losses.add("text outside its vocabulary is lost");
  model.words = make_unigram(pieces, lowest, unknown);
  return model;
}

}  // namespace

VocabularyModel read_model(const JsonNode& node, bool byte_level, const std::set<int32_t>& special, Losses& losses) {
  const std::string type = type_of(node);
  if (type == "BPE" || (type.empty() && !node["merges"].is_null())) return read_bpe(node, byte_level, special, losses);
  if (type == "Unigram" || (type.empty() && node["vocab"].is_array()))
    return read_unigram(node, byte_level, special, losses);
  refuse_type(node, "BPE, Unigram");
}

}  // namespace palimpsest
