#include "data/text_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cctype>
#include <utility>

#include "kernels/check.h"

namespace palimpsest {

namespace {

constexpr size_t kLongestExpression = size_t{16} << 10;
// Patterns of public tokenizers need a few steps a character. One that needs this many at one place is hostile.
constexpr uint32_t kMostSteps = 2'000'000;
constexpr uint32_t kMostHeapKiB = 64 << 10;
constexpr size_t kFirstStackBytes = size_t{32} << 10, kMostStackBytes = size_t{64} << 20;

// Contents of classes, without brackets. White space is Unicode's property; PCRE2's \s adds U+180E.
constexpr std::string_view kSpaces =
    "\\x{9}-\\x{D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}";
// Oniguruma counts superscripts and fractions of Latin-1 among words, and leaves the joiners of kUnicodeWords out.
constexpr std::string_view kWords =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{"
    "1F189}"
    "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}";
constexpr std::string_view kDigits = "\\p{Nd}";

// Goes through an expression from left to right and writes the same for PCRE2.
class Translator {
 public:
  Translator(std::string_view expression, const std::string& where) : in_(expression), where_(where) {}

  std::string translate() {
    if (in_.size() > kLongestExpression) refuse("is longer than " + std::to_string(kLongestExpression) + " bytes");
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\')
        escape(false);
      else if (c == '[')
        character_class();
      else if (c == '(')
        group();
      else if (c == '{')
        repeat();
      else if (c == '^' || c == '$')
        refuse_construct(1);
      else
        out_ += in_[at_++];
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) { throw_user_error(where_, ": the regular expression ", what); }
  [[noreturn]] void refuse_construct(size_t length) {
    std::string text(in_.substr(at_, length));
    for (char& c : text)
      if (static_cast<unsigned char>(c) < ' ') c = '?';
    refuse("has '" + text + "' at byte " + std::to_string(at_) + ", which is not supported");
  }
  bool next_is(std::string_view text) const { return in_.substr(at_).starts_with(text); }

  // A class of characters: bare within brackets, bracketed outside.
  void put_class(std::string_view content, bool negated, bool in_brackets) {
    if (in_brackets && negated && content == kWords) refuse_construct(2);
    if (in_brackets && negated)
      out_ += content == kDigits ? "\\P{Nd}" : "\\P{White_Space}";
    else
      (out_ += in_brackets ? "" : negated ? "[^" : "[").append(content) += in_brackets ? "" : "]";
  }

  void escape(bool in_brackets) {
    const char c = at_ + 1 < in_.size() ? in_[at_ + 1] : '\0';
    switch (c) {
      case 's':
      case 'S':
        put_class(kSpaces, c == 'S', in_brackets);
        break;
      case 'w':
      case 'W':
        put_class(kWords, c == 'W', in_brackets);
        break;
      case 'd':
      case 'D':
        put_class(kDigits, c == 'D', in_brackets);
        break;
      case 'n':
      case 'r':
      case 't':
      case 'f':
        (out_ += '\\') += c;
        break;
      case 'v':
        out_ += "\\x{B}";
        break;
      case 'p':
      case 'P':
        return property();
      case 'x':
      case 'u':
        return code_point();
      default:
        if (c == '\0' || !std::ispunct(static_cast<unsigned char>(c))) refuse_construct(2);
        (out_ += '\\') += c;
    }
    at_ += 2;
  }

  // \p{L}, \p{^L}, \p{Han}: general categories are the same in both, scripts need PCRE2 to be told that it is the
  // script, not its extensions.
  void property() {
    const size_t close = in_.find('}', at_);
    if (in_.substr(at_ + 2, 1) != "{" || close == std::string_view::npos) refuse_construct(2);
    std::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    bool negated = in_[at_ + 1] == 'P';
    if (name.starts_with('^')) {
      negated = !negated;
      name.remove_prefix(1);
    }
    for (const char c : name)
      if (!std::isalpha(static_cast<unsigned char>(c)) && c != '_') refuse_construct(close + 1 - at_);
    const bool category = name.size() <= 2;
    ((out_ += negated ? "\\P{" : "\\p{") += category ? "" : "sc:").append(name) += '}';
    at_ = close + 1;
  }

  // \xHH, \x{H...}, \uHHHH
  void code_point() {
    const bool braces = in_[at_ + 1] == 'x' && in_.substr(at_ + 2, 1) == "{";
    const size_t begin = at_ + (braces ? 3 : 2), least = braces ? 1 : in_[at_ + 1] == 'x' ? 2 : 4;
    const size_t most = braces ? 6 : least;
    size_t digits = 0;
    while (digits < most && begin + digits < in_.size() &&
           std::isxdigit(static_cast<unsigned char>(in_[begin + digits])))
      ++digits;
    const bool closed = !braces || in_.substr(begin + digits, 1) == "}";
    if (digits < least || !closed) refuse_construct(begin + digits - at_);
    (out_ += "\\x{").append(in_.substr(begin, digits)) += '}';
    at_ = begin + digits + (braces ? 1 : 0);
  }

  // What stands between brackets, up to ']' or '&&'.
  void class_content() {
    if (next_is("]")) refuse_construct(1);  // empty, or a ']' that Oniguruma would warn about
    while (at_ < in_.size() && in_[at_] != ']' && !next_is("&&")) {
      if (in_[at_] == '[') refuse_construct(1);
      if (in_[at_] == '\\')
        escape(true);
      else
        out_ += in_[at_++];
    }
    if (at_ == in_.size()) refuse("has a '[' that is not closed");
  }

  // [A], or [A&&[B]], which is a look-ahead for B before [A].
  void character_class() {
    const size_t start = out_.size();
    open_class();
    class_content();
    if (next_is("]")) {
      out_ += in_[at_++];
      return;
    }
    if (out_.compare(start, 2, "[^") == 0 || !next_is("&&[")) refuse_construct(3);
    const std::string first = out_.substr(start) + "]";
    out_.resize(start);
    at_ += 2;
    out_ += "(?:(?=";
    open_class();
    class_content();
    if (!next_is("]]")) refuse_construct(2);
    at_ += 2;
    (out_ += "])").append(first) += ')';
  }
  void open_class() {
    out_ += in_[at_++];
    if (next_is("^")) out_ += in_[at_++];
  }

  void group() {
    for (const std::string_view opening : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (!next_is(opening)) continue;
      out_ += opening;
      at_ += opening.size();
      return;
    }
    if (next_is("(?") || next_is("(*")) refuse_construct(3);
    out_ += "(?:";  // nothing refers to what a group matched
    ++at_;
  }

  // {n}, {n,}, {n,m}; what follows it may not be '+', which the two read differently.
  void repeat() {
    size_t end = at_ + 1;
    const auto digits = [&] {
      const size_t begin = end;
      while (end < in_.size() && std::isdigit(static_cast<unsigned char>(in_[end]))) ++end;
      return end > begin;
    };
    bool good = digits();
    if (good && in_.substr(end, 1) == ",") {
      ++end;
      digits();
    }
    good = good && in_.substr(end, 1) == "}" && in_.substr(end + 1, 1) != "+";
    if (!good) refuse_construct(end + 1 - at_);
    out_.append(in_.substr(at_, end + 1 - at_));
    at_ = end + 1;
  }

  std::string_view in_;
  const std::string& where_;
  size_t at_ = 0;
  std::string out_;
};

std::string cause_of(int code) {
  PCRE2_UCHAR text[256];
  ::pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

template <class T, void (*free)(T*)>
struct Freed {
  void operator()(T* object) const { free(object); }
};
template <class T, void (*free)(T*)>
using Owned = std::unique_ptr<T, Freed<T, free>>;

}  // namespace

std::string pcre2_spelling(std::string_view expression, const std::string& where) {
  return Translator(expression, where).translate();
}

struct PatternScratch::State {
  Owned<pcre2_match_data, pcre2_match_data_free> match{::pcre2_match_data_create(1, nullptr)};
  Owned<pcre2_jit_stack, pcre2_jit_stack_free> stack{
      ::pcre2_jit_stack_create(kFirstStackBytes, kMostStackBytes, nullptr)};  // null where there is no JIT
  Owned<pcre2_match_context, pcre2_match_context_free> context{::pcre2_match_context_create(nullptr)};
};

PatternScratch::PatternScratch() : state_(std::make_unique<State>()) {
  CHECK(state_->match && state_->context, "out of memory");
  if (state_->stack) ::pcre2_jit_stack_assign(state_->context.get(), nullptr, state_->stack.get());
  CHECK(::pcre2_set_match_limit(state_->context.get(), kMostSteps) == 0);
  CHECK(::pcre2_set_heap_limit(state_->context.get(), kMostHeapKiB) == 0);
}
PatternScratch::~PatternScratch() = default;

struct TextPattern::Code {
  Owned<pcre2_code, pcre2_code_free> code;
  bool jit = false;
};

TextPattern::TextPattern(std::string_view expression, const std::string& where)
    : code_(std::make_unique<Code>()), where_(where) {
  const std::string spelling = pcre2_spelling(expression, where);
  const Owned<pcre2_compile_context, pcre2_compile_context_free> context{::pcre2_compile_context_create(nullptr)};
  CHECK(context && ::pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF) == 0, "out of memory");
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_->code.reset(::pcre2_compile(reinterpret_cast<PCRE2_SPTR>(spelling.data()), spelling.size(),
                                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, context.get()));
  if (!code_->code) throw_user_error(where, ": the regular expression cannot be read: ", cause_of(error));
  uint32_t matches_empty = 0;
  CHECK(::pcre2_pattern_info(code_->code.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty) == 0);
  if (matches_empty != 0) throw_user_error(where, ": the regular expression matches the empty text");
  code_->jit = ::pcre2_jit_compile(code_->code.get(), PCRE2_JIT_COMPLETE) == 0;  // without, it is interpreted
}
TextPattern::TextPattern(TextPattern&&) noexcept = default;
TextPattern& TextPattern::operator=(TextPattern&&) noexcept = default;
TextPattern::~TextPattern() = default;

TextPattern TextPattern::literal(std::string_view text, const std::string& where) {
  std::string expression;
  for (const char c : text) {
    if (std::ispunct(static_cast<unsigned char>(c))) expression += '\\';
    expression += c;
  }
  return {expression, where};
}

std::optional<TextRange> TextPattern::find(std::string_view text, size_t begin, PatternScratch& scratch) const {
  PatternScratch::State& state = *scratch.state_;
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int count = PCRE2_ERROR_JIT_STACKLIMIT;
  if (code_->jit)
    count =
        ::pcre2_jit_match(code_->code.get(), subject, text.size(), begin, 0, state.match.get(), state.context.get());
  if (count == PCRE2_ERROR_JIT_STACKLIMIT)
    count = ::pcre2_match(code_->code.get(), subject, text.size(), begin, PCRE2_NO_JIT | PCRE2_NO_UTF_CHECK,
                          state.match.get(), state.context.get());
  if (count == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (count == PCRE2_ERROR_MATCHLIMIT || count == PCRE2_ERROR_HEAPLIMIT || count == PCRE2_ERROR_DEPTHLIMIT)
    throw_user_error(where_, ": the regular expression needs too many steps on the text");
  CHECK(count >= 0, cause_of(count));
  const PCRE2_SIZE* range = ::pcre2_get_ovector_pointer(state.match.get());
  return TextRange{range[0], range[1]};
}

}  // namespace palimpsest
