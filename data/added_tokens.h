// The tokens that public tokenizer files add to a model: texts that become one id wherever they stand, before words are
// cut.
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/text_pattern.h"
#include "data/trie.h"

namespace palimpsest {

struct AddedToken {
  int32_t id = 0;
  std::string content;                           // as it is searched for
  bool special = false;                          // stands for no text: found only where the caller asks for it
  bool single_word = false;                      // not where a word goes on beside it
  bool strip_left = false, strip_right = false;  // takes white space beside it away
};

class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Part {
    TextRange range;            // what it takes of the text, white space included
    std::optional<int32_t> id;  // none: text between tokens
  };
  // Cuts a valid text; the longest token counts where several begin. Appends parts that are not empty.
  void split(std::string_view text, bool special, std::vector<Part>& parts) const;

 private:
  std::vector<AddedToken> tokens_;
  Trie trie_;  // content -> index in tokens_
  std::bitset<256> first_bytes_;
};

}  // namespace palimpsest
