// Regular expressions as public tokenizer files write them (Oniguruma's syntax), matched by PCRE2.
//
// The two differ in what \s, \w, \d and \p{Script} hold, so these are spelled out; what cannot be carried over is
// refused by name. Texts are valid UTF-8.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace palimpsest {

struct TextRange {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
  bool operator==(const TextRange&) const = default;
};

// What matching needs beside the pattern: one for each thread.
class PatternScratch {
 public:
  PatternScratch();
  ~PatternScratch();
  PatternScratch(const PatternScratch&) = delete;
  PatternScratch& operator=(const PatternScratch&) = delete;

 private:
  friend class TextPattern;
  struct State;
  std::unique_ptr<State> state_;
};

class TextPattern {
 public:
  // Throws a message that begins with `where` and names the fault: wrong syntax, a construct that is not supported, or
  // a pattern that can match the empty text.
  TextPattern(std::string_view expression, const std::string& where);
  static TextPattern literal(std::string_view text, const std::string& where);
  TextPattern(TextPattern&&) noexcept;
  TextPattern& operator=(TextPattern&&) noexcept;
  ~TextPattern();

  // The first match that begins at `begin` or later, never empty. Throws when the pattern needs too many steps.
  std::optional<TextRange> find(std::string_view text, size_t begin, PatternScratch& scratch) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
  std::string where_;
};

// Contents of a class, without brackets: characters of words as Unicode has them (UTS 18), which the public library
// asks for outside the patterns that files write.
inline constexpr std::string_view kUnicodeWords =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{"
    "1F189}"
    "\\x{200C}\\x{200D}";

// The PCRE2 spelling of an expression. Throws as TextPattern does.
std::string pcre2_spelling(std::string_view expression, const std::string& where);

}  // namespace palimpsest
