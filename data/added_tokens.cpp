#include "data/added_tokens.h"

#include <algorithm>
#include <utility>

#include "data/utf8.h"

namespace palimpsest {

namespace {

// Where the last character of the text begins. The text is valid and not empty.
size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

bool word_goes_on(std::string_view before, std::string_view after) {
  return (!before.empty() && is_word_character(utf8_code_point(before.substr(last_character(before))))) ||
         (!after.empty() && is_word_character(utf8_code_point(after)));
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    trie_.add(tokens_[i].content, static_cast<int32_t>(i));
    first_bytes_.set(static_cast<uint8_t>(tokens_[i].content[0]));
  }
}

void AddedTokens::split(std::string_view text, bool special, std::vector<Part>& parts) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    if (!first_bytes_.test(static_cast<uint8_t>(text[at]))) {
      ++at;
      continue;
    }
    size_t length = 0;
    int32_t index = Trie::kNone;
    trie_.for_each_prefix(text.substr(at), [&](size_t found, int32_t i) {
      length = found;
      index = i;
    });
    if (index == Trie::kNone) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[index];
    const size_t match_end = at + length;
    size_t begin = at, end = match_end;
    at = match_end;
    if (token.special && !special) continue;
    if (token.single_word && word_goes_on(text.substr(0, begin), text.substr(end))) continue;
    begin = std::max(begin, done);
    while (token.strip_left && begin > done) {
      const size_t before = done + last_character(text.substr(done, begin - done));
      if (!is_white_space(utf8_code_point(text.substr(before)))) break;
      begin = before;
    }
    while (token.strip_right && end < text.size() && is_white_space(utf8_code_point(text.substr(end))))
      end += utf8_character_length(text.substr(end));
    if (begin > done) parts.push_back({{done, begin}, std::nullopt});
    parts.push_back({{begin, end}, token.id});
    done = std::max(done, end);
    at = std::max(at, done);
  }
  if (done < text.size()) parts.push_back({{done, text.size()}, std::nullopt});
}

}  // namespace palimpsest
