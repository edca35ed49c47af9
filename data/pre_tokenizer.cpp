#include "data/pre_tokenizer.h"

#include <algorithm>
#include <utility>

namespace palimpsest {

namespace {

void cut(const Split& step, Words& words, PatternScratch& scratch) {
  std::vector<TextRange> ranges;
  ranges.reserve(words.ranges.size() + words.text.size() / 4);
  std::vector<MatchPart> parts;
  for (const TextRange word : words.ranges) {
    // The word alone: what a pattern looks ahead for does not reach beyond it.
    const std::string_view text = std::string_view(words.text).substr(word.begin, word.size());
    if (step.behavior == SplitBehavior::kIsolated) {  // the usual kind needs no list of parts
      size_t at = 0;
      while (const auto match = step.pattern.find(text, at, scratch)) {
        if (match->begin > at) ranges.push_back({word.begin + at, word.begin + match->begin});
        ranges.push_back({word.begin + match->begin, word.begin + match->end});
        at = match->end;
      }
      if (at < text.size()) ranges.push_back({word.begin + at, word.end});
      continue;
    }
    parts.clear();
    size_t at = 0;
    while (const auto match = step.pattern.find(text, at, scratch)) {
      if (match->begin > at) parts.push_back({{word.begin + at, word.begin + match->begin}, step.invert});
      parts.push_back({{word.begin + match->begin, word.begin + match->end}, !step.invert});
      at = match->end;
    }
    if (at < text.size()) parts.push_back({{word.begin + at, word.end}, step.invert});
    join_parts(parts, step.behavior, ranges);
  }
  words.ranges = std::move(ranges);
}

// Writes the words anew and cuts nothing: rewrite(word, whether it stands at the start of words.text, out).
template <class Rewrite>
void rewrite_words(Words& words, Rewrite&& rewrite) {
  Words out;
  out.text.reserve(words.text.size() + words.text.size() / 4);
  for (const TextRange word : words.ranges) {
    const size_t begin = out.text.size();
    rewrite(std::string_view(words.text).substr(word.begin, word.size()), word.begin == 0, out.text);
    out.ranges.push_back({begin, out.text.size()});
  }
  words = std::move(out);
}

void cut_before_marks(const std::string& mark, Words& words) {
  std::vector<TextRange> ranges;
  std::vector<MatchPart> parts;
  for (const TextRange word : words.ranges) {
    parts.clear();
    for (size_t at = word.begin; at < word.end;) {
      const size_t found = std::min(words.text.find(mark, at), word.end);
      if (found > at) parts.push_back({{at, found}, false});
      if (found == word.end) break;
      parts.push_back({{found, found + mark.size()}, true});
      at = found + mark.size();
    }
    join_parts(parts, SplitBehavior::kMergedWithNext, ranges);
  }
  words.ranges = std::move(ranges);
}

void mark_spaces(const Metaspace& step, Words& words, TextStart start) {
  rewrite_words(words, [&](std::string_view word, bool first, std::string& out) {
    const bool wanted = step.prefix == Metaspace::kAlways
                            ? !first || start != TextStart::kContinued
                            : step.prefix == Metaspace::kFirst && first && start == TextStart::kText;
    if (wanted && !word.starts_with(' ') && !word.starts_with(step.mark)) out += step.mark;
    for (const char c : word)
      if (c == ' ')
        out += step.mark;
      else
        out += c;
  });
  if (step.split) cut_before_marks(step.mark, words);
}

void put_space_first(Words& words, TextStart start) {
  rewrite_words(words, [&](std::string_view word, bool first, std::string& out) {
    const bool continued = first && start == TextStart::kContinued;
    if (!continued && !word.starts_with(' ')) out += ' ';
    out += word;
  });
}

}  // namespace

void join_parts(const std::vector<MatchPart>& parts, SplitBehavior behavior, std::vector<TextRange>& ranges) {
  const size_t start = ranges.size();
  bool last_matched = false;
  switch (behavior) {
    case SplitBehavior::kRemoved:
      for (const MatchPart& part : parts)
        if (!part.matched) ranges.push_back(part.range);
      return;
    case SplitBehavior::kIsolated:
      for (const MatchPart& part : parts) ranges.push_back(part.range);
      return;
    case SplitBehavior::kMergedWithPrevious:
      for (const MatchPart& part : parts) {
        if (part.matched && !last_matched && ranges.size() > start)
          ranges.back().end = part.range.end;
        else
          ranges.push_back(part.range);
        last_matched = part.matched;
      }
      return;
    case SplitBehavior::kMergedWithNext:
      for (size_t i = parts.size(); i-- > 0;) {
        if (parts[i].matched && !last_matched && ranges.size() > start)
          ranges.back().begin = parts[i].range.begin;
        else
          ranges.push_back(parts[i].range);
        last_matched = parts[i].matched;
      }
      std::reverse(ranges.begin() + static_cast<std::ptrdiff_t>(start), ranges.end());
      return;
    case SplitBehavior::kContiguous:
      for (const MatchPart& part : parts) {
        if (part.matched == last_matched && ranges.size() > start)
          ranges.back().end = part.range.end;
        else
          ranges.push_back(part.range);
        last_matched = part.matched;
      }
      return;
  }
}

void PreTokenizer::split(Words& words, TextStart start, PatternScratch& scratch) const {
  words.ranges.clear();
  if (!words.text.empty()) words.ranges.push_back({0, words.text.size()});
  for (const PreTokenizerStep& step : steps_) {
    if (const auto* pattern = std::get_if<Split>(&step))
      cut(*pattern, words, scratch);
    else if (const auto* metaspace = std::get_if<Metaspace>(&step))
      mark_spaces(*metaspace, words, start);
    else
      put_space_first(words, start);
  }
}

}  // namespace palimpsest
