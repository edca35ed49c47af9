#include "data/normalizer.h"

#include <utf8proc.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "data/utf8.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

// Of one window of text: a file may ask for replacements of replacements.
constexpr size_t kMostBytes = size_t{16} << 20;

void check_size(const std::string& text) {
  if (text.size() > kMostBytes)
    throw_user_error("the tokenizer's normalizer makes more than ", kMostBytes, " bytes of one window of text");
}

struct Free {
  void operator()(utf8proc_uint8_t* memory) const { std::free(memory); }
};

bool is_ascii(std::string_view text) {
  for (const char c : text)
    if (static_cast<uint8_t>(c) >= 0x80) return false;
  return true;
}

// Replaces the text by what change(code point, out) writes for each of its characters.
template <class Change>
void change_characters(std::string& text, Change&& change) {
  std::string out;
  out.reserve(text.size());
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(utf8_character_length(rest)))
    change(utf8_code_point(rest), out);
  text = std::move(out);
}

void apply(const UnicodeForm& form, std::string& text) {
  if (is_ascii(text)) return;
  int options = UTF8PROC_STABLE;
  options |= form.kind == UnicodeForm::kNfc || form.kind == UnicodeForm::kNfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form.kind == UnicodeForm::kNfkc || form.kind == UnicodeForm::kNfkd) options |= UTF8PROC_COMPAT;
  utf8proc_uint8_t* out = nullptr;
  const utf8proc_ssize_t length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &out, static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, Free> owned(out);
  CHECK(length >= 0, utf8proc_errmsg(length));
  text.assign(reinterpret_cast<const char*>(out), length);
}

void lowercase(std::string& text) {
  change_characters(text, [](char32_t c, std::string& out) {
    constexpr char32_t kCapitalIWithDot = 0x130;  // the one letter whose lower case is two characters
    append_utf8(c == kCapitalIWithDot ? U'i' : utf8proc_tolower(static_cast<utf8proc_int32_t>(c)), out);
    if (c == kCapitalIWithDot) append_utf8(0x307, out);
  });
}

void strip_accents(std::string& text) {
  change_characters(text, [](char32_t c, std::string& out) {
    const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
    const bool mark =
        category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC || category == UTF8PROC_CATEGORY_ME;
    if (!mark) append_utf8(c, out);
  });
}

void strip(const StripWhiteSpace& step, std::string& text, TextStart start) {
  std::string_view rest = text;
  while (step.left && start != TextStart::kContinued && !rest.empty() && is_white_space(utf8_code_point(rest)))
    rest.remove_prefix(utf8_character_length(rest));
  while (step.right && !rest.empty()) {
    size_t last = rest.size() - 1;
    while ((static_cast<uint8_t>(rest[last]) & 0xC0) == 0x80) --last;
    if (!is_white_space(utf8_code_point(rest.substr(last)))) break;
    rest = rest.substr(0, last);
  }
  text = std::string(rest);
}

void replace(const Replace& step, std::string& text, PatternScratch& scratch) {
  std::string out;
  size_t at = 0;
  while (const auto match = step.pattern.find(text, at, scratch)) {
    out.append(text, at, match->begin - at) += step.content;
    at = match->end;
    check_size(out);
  }
  text = out.append(text, at);
}

// Bytes of the first grapheme cluster: what a reader takes for one character.
size_t grapheme_length(std::string_view text) {
  size_t length = utf8_character_length(text);
  auto last = static_cast<utf8proc_int32_t>(utf8_code_point(text));
  utf8proc_int32_t state = 0;
  while (length < text.size()) {
    const std::string_view rest = text.substr(length);
    const auto next = static_cast<utf8proc_int32_t>(utf8_code_point(rest));
    if (utf8proc_grapheme_break_stateful(last, next, &state)) break;
    length += utf8_character_length(rest);
    last = next;
  }
  return length;
}

}  // namespace

CharacterMap::CharacterMap(std::string_view bytes, const std::string& where) {
  uint32_t trie_bytes = 0;
  if (bytes.size() >= sizeof(trie_bytes)) std::memcpy(&trie_bytes, bytes.data(), sizeof(trie_bytes));
  if (trie_bytes < sizeof(uint32_t) || trie_bytes % sizeof(uint32_t) != 0 ||
      trie_bytes > bytes.size() - sizeof(trie_bytes))
    throw_user_error(where, ": the table of ", bytes.size(), " bytes says that ", trie_bytes, " of them are a trie");
  bytes.remove_prefix(sizeof(trie_bytes));
  units_.resize(trie_bytes / sizeof(uint32_t));
  std::memcpy(units_.data(), bytes.data(), trie_bytes);
  replacements_ = bytes.substr(trie_bytes);
  if (utf8_valid_length(replacements_) != replacements_.size())
    throw_user_error(where, ": the replacements are not UTF-8");
  if (replacements_.size() > kMostBytes) throw_user_error(where, ": the replacements are longer than ", kMostBytes);
}

std::string_view CharacterMap::find(std::string_view text) const {
  const auto offset = [](uint32_t unit) { return size_t{unit >> 10} << ((unit & (1u << 9)) >> 6); };
  constexpr uint32_t kLabelMask = 0x800000FFu, kValueMask = 0x7FFFFFFFu, kHasLeaf = 1u << 8;
  size_t node = offset(units_[0]);
  for (const char c : text) {
    const auto label = static_cast<uint8_t>(c);
    node ^= label;
    if (label == 0 || node >= units_.size() || (units_[node] & kLabelMask) != label) return {};
    const uint32_t unit = units_[node];
    node ^= offset(unit);
    if ((unit & kHasLeaf) == 0) continue;
    const size_t begin = node < units_.size() ? units_[node] & kValueMask : replacements_.size();
    const bool whole = begin < replacements_.size() && (static_cast<uint8_t>(replacements_[begin]) & 0xC0) != 0x80;
    if (!whole) return {};                                  // a damaged table
    return std::string_view(replacements_.data() + begin);  // up to the NUL
  }
  return {};
}

// A grapheme of a few bytes is looked up whole, then character by character.
void CharacterMap::apply(std::string& text) const {
  constexpr size_t kLongestGrapheme = 5;
  std::string out;
  out.reserve(text.size());
  const auto put = [&](std::string_view piece) {
    const std::string_view replacement = find(piece);
    const bool found = replacement.data() != nullptr;
    if (found) out += replacement;
    return found;
  };
  for (std::string_view rest = text; !rest.empty();) {
    const size_t length = grapheme_length(rest);
    std::string_view grapheme = rest.substr(0, length);
    rest.remove_prefix(length);
    check_size(out);
    if (length <= kLongestGrapheme && put(grapheme)) continue;
    while (!grapheme.empty()) {
      const std::string_view character = grapheme.substr(0, utf8_character_length(grapheme));
      if (!put(character)) out += character;
      grapheme.remove_prefix(character.size());
    }
  }
  text = std::move(out);
}

void normalize(const std::vector<NormalizerStep>& steps, std::string& text, TextStart start, PatternScratch& scratch) {
  for (const NormalizerStep& step : steps) {
    if (const auto* form = std::get_if<UnicodeForm>(&step)) {
      palimpsest::apply(*form, text);
    } else if (std::holds_alternative<Lowercase>(step)) {
      lowercase(text);
    } else if (std::holds_alternative<StripAccents>(step)) {
      strip_accents(text);
    } else if (const auto* stripped = std::get_if<StripWhiteSpace>(&step)) {
      strip(*stripped, text, start);
    } else if (const auto* prefix = std::get_if<Prepend>(&step)) {
      if (!text.empty() && start != TextStart::kContinued) text.insert(0, prefix->text);
    } else if (const auto* replaced = std::get_if<Replace>(&step)) {
      replace(*replaced, text, scratch);
    } else {
      std::get<CharacterMap>(step).apply(text);
    }
  }
}

}  // namespace palimpsest
