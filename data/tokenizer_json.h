// Between the files that read a tokenizer.json: what its components say. See data/public_tokenizer.h for what can be
// read.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/json_node.h"
#include "data/normalizer.h"
#include "data/pre_tokenizer.h"
#include "data/word_model.h"

namespace palimpsest {

constexpr size_t kLongestPiece = 1024;         // bytes: Viterbi's steps a character
constexpr int32_t kLargestId = (1 << 22) - 1;  // an id costs memory whether the file has it or not

inline int32_t id_of(const JsonNode& node) {
  return node.number_up_to(kLargestId);
}
std::string type_of(const JsonNode& node);  // its field "type", or ""
[[noreturn]] void refuse_type(const JsonNode& node, const char* known);
// Calls visit for each step of a component: itself, or those that a Sequence lists in the field `list`, however nested.
void for_each_step(const JsonNode& node, const char* list, const std::function<void(const JsonNode&)>& visit);
void refuse_unless_empty(const JsonNode& node, const char* name);

// What text -> ids -> text may lose, in words.
class Losses {
 public:
  void add(const std::string& loss) {
    if (text_.find(loss) == std::string::npos) text_.append(text_.empty() ? "" : "; ").append(loss);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::vector<NormalizerStep> read_normalizer(const JsonNode& node, Losses& losses);

struct PreTokenizerParts {
  std::vector<PreTokenizerStep> steps;
  bool byte_level = false;  // the model's pieces are spelled in the alphabet of bytes
};
PreTokenizerParts read_pre_tokenizer(const JsonNode& node, Losses& losses);

struct PieceDecoder {
  bool byte_level = false;
  bool byte_fallback = false;
  std::vector<std::pair<std::string, std::string>> replacements;
  bool strips_leading_space = false;

  std::string text_of(std::string piece) const;
};
PieceDecoder read_decoder(const JsonNode& node);

// Pieces by id; holes are empty.
struct Pieces {
  std::vector<std::string> by_id;
  std::map<std::string, int32_t, std::less<>> ids;

  void add(const std::string& piece, int32_t id, const JsonNode& node);  // throws when the id has another piece
  std::optional<int32_t> find(std::string_view piece) const;
};
struct VocabularyModel {
  Pieces pieces;
  std::unique_ptr<WordModel> words;
};
// Text never becomes a special id.
VocabularyModel read_model(const JsonNode& node, bool byte_level, const std::set<int32_t>& special, Losses& losses);

}  // namespace palimpsest
