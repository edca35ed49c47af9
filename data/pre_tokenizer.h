// The pre-tokenizers of public tokenizer files: how text is cut into words, which a model then cuts into tokens. Texts
// are valid UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "data/normalizer.h"
#include "data/text_pattern.h"

namespace palimpsest {

// What becomes of the matches of a pattern.
enum class SplitBehavior : uint8_t { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct Split {
  TextPattern pattern;
  SplitBehavior behavior;
  bool invert;  // what lies between matches takes their place
};
// Spaces become a mark, which words begin with.
struct Metaspace {
  std::string mark;  // one character, usually U+2581
  enum Prefix : uint8_t { kNever, kFirst, kAlways } prefix;
  bool split;
};
// Each piece begins with a space.
struct PrefixSpace {};
using PreTokenizerStep = std::variant<Split, Metaspace, PrefixSpace>;

// Words of a text.
struct Words {
  std::string text;
  std::vector<TextRange> ranges;  // not empty; in order
};

// A part of a text, and whether a pattern matched it.
struct MatchPart {
  TextRange range;
  bool matched;
};

class PreTokenizer {
 public:
  explicit PreTokenizer(std::vector<PreTokenizerStep> steps) : steps_(std::move(steps)) {}

  // Cuts words.text; the ranges that stand in `words` before do not matter.
  void split(Words& words, TextStart start, PatternScratch& scratch) const;
  const std::vector<PreTokenizerStep>& steps() const { return steps_; }

 private:
  std::vector<PreTokenizerStep> steps_;
};

// Appends what the behaviour makes of parts that follow one another.
void join_parts(const std::vector<MatchPart>& parts, SplitBehavior behavior, std::vector<TextRange>& ranges);

}  // namespace palimpsest
