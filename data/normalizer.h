// The normalizers of public tokenizer files: what happens to text before it is cut into words. Texts are valid UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "data/text_pattern.h"

namespace palimpsest {

// Where a piece of text stands.
enum class TextStart : uint8_t {
  kText,        // at the start of the text
  kAfterToken,  // after a token that stands for itself
  kContinued,   // the text goes on from an earlier window: nothing is put before it
};

// SentencePiece's compiled table of replacements (public files call it Precompiled): a double-array trie of texts, and
// their replacements.
class CharacterMap {
 public:
  // Throws a message that begins with `where`.
  CharacterMap(std::string_view bytes, const std::string& where);
  void apply(std::string& text) const;

 private:
  // The replacement of the shortest text in the table that the given one begins with; null data when there is none.
  std::string_view find(std::string_view text) const;

  std::vector<uint32_t> units_;
  std::string replacements_;  // NUL-terminated texts
};

struct UnicodeForm {
  enum Kind : uint8_t { kNfc, kNfd, kNfkc, kNfkd } kind;
};
struct Lowercase {};
struct StripAccents {};  // removes combining marks
struct StripWhiteSpace {
  bool left, right;
};
struct Prepend {
  std::string text;
};
struct Replace {
  TextPattern pattern;
  std::string content;
};
using NormalizerStep =
    std::variant<UnicodeForm, Lowercase, StripAccents, StripWhiteSpace, Prepend, Replace, CharacterMap>;

void normalize(const std::vector<NormalizerStep>& steps, std::string& text, TextStart start, PatternScratch& scratch);

}  // namespace palimpsest
