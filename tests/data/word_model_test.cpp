#include "data/word_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "data/added_tokens.h"
#include "data/pre_tokenizer.h"
#include "data/utf8.h"
#include "kernels/random.h"
#include "tests/support/files.h"

namespace palimpsest {
namespace {

using support::user_error_of;

using Ids = std::vector<int32_t>;

// The definition: of all neighbours that a merge joins, the lowest rank first, the leftmost of equals.
Ids joined_by_definition(Ids ids, const std::vector<BpeMerge>& merges) {
  while (true) {
    size_t best_rank = merges.size(), best = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      for (size_t rank = 0; rank < best_rank; ++rank)
        if (merges[rank].left == ids[i] && merges[rank].right == ids[i + 1]) {
          best_rank = rank;
          best = i;
        }
    if (best_rank == merges.size()) return ids;
    ids[best] = merges[best_rank].joined;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(Bpe, JoinsAsTheDefinitionDoesAtEveryLength) {
  std::vector<std::string> pieces = {"a", "b", "c"};
  std::vector<BpeMerge> merges;
  for (uint64_t i = 0; pieces.size() < 40; ++i) {
    const auto left = static_cast<int32_t>(random_bits(1, 0, i) % pieces.size());
    const auto right = static_cast<int32_t>(random_bits(1, 1, i) % pieces.size());
    const std::string piece = pieces[left] + pieces[right];
    if (piece.size() > 9 || std::find(pieces.begin(), pieces.end(), piece) != pieces.end()) continue;
    merges.push_back({left, right, static_cast<int32_t>(pieces.size())});
    pieces.push_back(piece);
  }
  std::rotate(merges.begin(), merges.begin() + 5, merges.end());  // ranks need not follow ids
  const auto bpe = make_bpe(pieces, merges, {});
  for (size_t length = 1; length < 90; ++length) {
    std::string word;
    Ids symbols;
    for (size_t i = 0; i < length; ++i) {
      symbols.push_back(static_cast<int32_t>(random_bits(2, length, i) % 3));
      word += pieces[symbols.back()];
    }
    Ids ids;
    bpe->encode(word, ids);
    EXPECT_EQ(ids, joined_by_definition(symbols, merges)) << word;
  }
}

TEST(Bpe, UnknownTextBecomesWhatTheOptionsSay) {
  const std::vector<std::string> pieces = {"a", "?", "<whole>"};
  const std::string text = "aéba";
  const auto ids_with = [&](BpeOptions options) {
    options.unit = BpeOptions::Unit::kCharacter;
    Ids ids;
    make_bpe(pieces, {}, options)->encode(text, ids);
    return ids;
  };
  EXPECT_EQ(ids_with({}), (Ids{0, 0}));
  EXPECT_EQ(ids_with({.unknown = {.id = 1}}), (Ids{0, 1, 1, 0}));
  EXPECT_EQ(ids_with({.unknown = {.id = 1, .fuse = true}}), (Ids{0, 1, 0}));
  std::array<int32_t, 256> bytes;
  for (int byte = 0; byte < 256; ++byte) bytes[byte] = 1000 + byte;
  EXPECT_EQ(ids_with({.unknown = {.bytes = bytes, .id = 1}}), (Ids{0, 1000 + 0xC3, 1000 + 0xA9, 1000 + 'b', 0}));
}

// The best sum over all ways to cut a text, by trying all of them.
double best_by_definition(std::string_view text, const std::map<std::string, double, std::less<>>& scores,
                          double unknown) {
  if (text.empty()) return 0.0;
  double best = -1e300;
  for (size_t length = 1; length <= text.size(); ++length) {
    const auto found = scores.find(text.substr(0, length));
    if (found == scores.end() && length > 1) continue;
    const double score = found == scores.end() ? unknown : found->second;
    best = std::max(best, score + best_by_definition(text.substr(length), scores, unknown));
  }
  return best;
}

TEST(Unigram, FindsTheBestOfAllCuts) {
  std::vector<UnigramPiece> pieces = {{"", 0.0}};
  std::map<std::string, double, std::less<>> scores;
  const std::vector<std::string> texts = {"a", "b", "ab", "ba", "aab", "bab", "abab", "bb", "cab"};
  for (uint64_t i = 0; i < texts.size(); ++i) {
    pieces.push_back({texts[i], -1.0 - 4.0 * random_uniform(3, 0, i)});
    scores[texts[i]] = pieces.back().score;
  }
  const double lowest = -7.0;
  const auto unigram = make_unigram(pieces, lowest, {.id = 0, .fuse = true});
  for (uint64_t round = 0; round < 60; ++round) {
    std::string word;
    for (uint64_t i = 0; i < 1 + round % 12; ++i) word += "abc"[random_bits(4, round, i) % 3];
    Ids ids;
    unigram->encode(word, ids);
    double sum = 0.0;
    std::string text;
    for (const int32_t id : ids) {
      sum += id == 0 ? 0.0 : pieces[id].score;
      text += pieces[id].text;
    }
    // A piece of c alone is unknown, and neighbours of them are one id.
    const auto unknown = static_cast<double>(word.size() - text.size());
    EXPECT_NEAR(sum + unknown * (lowest - 10.0), best_by_definition(word, scores, lowest - 10.0), 1e-9) << word;
  }
}

TEST(Unigram, SaysWhichTextItCannotTake) {
  const auto unigram = make_unigram({{"a", -1.0}}, -1.0, {});
  Ids ids;
  EXPECT_NE(user_error_of([&] { unigram->encode("aé", ids); }).find("'é'"), std::string::npos);
  EXPECT_NE(user_error_of([&] { unigram->encode_bytes("\xFF", ids); }).find("'a byte'"), std::string::npos);
}

TEST(PreTokenizer, JoinsMatchesAsThePublicLibraryDescribes) {
  const std::string text = "the-final--countdown";
  const auto cut = [&](SplitBehavior behavior) {
    std::vector<PreTokenizerStep> steps;
    steps.emplace_back(Split{TextPattern::literal("-", "test"), behavior, false});
    Words words = {.text = text, .ranges = {}};
    PatternScratch scratch;
    PreTokenizer(std::move(steps)).split(words, TextStart::kText, scratch);
    std::string joined;
    for (const TextRange range : words.ranges)
      joined.append(joined.empty() ? "" : "|").append(text, range.begin, range.size());
    return joined;
  };
  EXPECT_EQ(cut(SplitBehavior::kRemoved), "the|final|countdown");
  EXPECT_EQ(cut(SplitBehavior::kIsolated), "the|-|final|-|-|countdown");
  EXPECT_EQ(cut(SplitBehavior::kMergedWithPrevious), "the-|final-|-|countdown");
  EXPECT_EQ(cut(SplitBehavior::kMergedWithNext), "the|-final|-|-countdown");
  EXPECT_EQ(cut(SplitBehavior::kContiguous), "the|-|final|--|countdown");
}

TEST(TextPattern, MatchesWhatOnigurumaDoes) {
  PatternScratch scratch;
  const auto first = [&](const char* expression, const std::string& text) {
    const auto match = TextPattern(expression, "test").find(text, 0, scratch);
    return match ? text.substr(match->begin, match->size()) : "none";
  };
  EXPECT_EQ(first("\\s+", "a\u180E b"), " ");  // U+180E is no white space
  EXPECT_EQ(first("[\\s]+", "a\u3000\u0085b"), "\u3000\u0085");
  EXPECT_EQ(first("[^\\S]+", "a \tb"), " \t");
  EXPECT_EQ(first("\\w+", "-a\u0301\u203Fb-"), "a\u0301\u203Fb");
  EXPECT_EQ(first("\\w+", "-a½²Ⅷⓐ\u200Da"), "a½²Ⅷⓐ");
  EXPECT_EQ(first("\\d+", "½²12३"), "12३");
  EXPECT_EQ(first("\\p{Han}+", "あー漢字"), "漢字");  // the script, not its extensions
  EXPECT_EQ(first("\\p{^L}+", "ab12"), "12");
  EXPECT_EQ(first("(?i:'s|'ll)", "IT'S"), "'S");
  EXPECT_EQ(first("[\\p{L}&&[^\\p{Han}]]+", "漢ab漢"), "ab");
  EXPECT_EQ(first("[\\p{L}&&[\\p{Han}]]{1,2}", "ab漢漢漢"), "漢漢");
  EXPECT_EQ(first("\\u0041\\x42\\x{1F600}", "AB😀"), "AB😀");
  EXPECT_EQ(first("a\\v", "a\v"), "a\v");
  EXPECT_EQ(first("(a)(b)+", "xabb"), "abb");
  EXPECT_EQ(first("a.c", "a\nc a\rc"), "a\rc");  // only \n is no character
  EXPECT_EQ(first("x", "ab"), "none");
}

TEST(TextPattern, RefusesWhatItCannotCarryOver) {
  const auto error = [](const std::string& expression) {
    return user_error_of([&] { TextPattern(expression, "file: Split"); });
  };
  for (const char* expression :
       {"\\h",   "\\1",     "\\Ra",     "^a",       "a$",    "\\b",   "[[:alpha:]]", "[a&&b]", "[^a&&[b]]", "a{,3}",
        "a{2}+", "(?<n>a)", "(*VERB)a", "\\p{X Y}", "\\u12", "[\\W]", "[]a]",        "(?m:a)", "\\k<a>",    "\\"}) {
    EXPECT_NE(error(expression).find("file: Split: the regular expression has '"), std::string::npos) << expression;
  }
  EXPECT_NE(error("a*").find("matches the empty text"), std::string::npos);
  EXPECT_NE(error("(a").find("cannot be read"), std::string::npos);
  EXPECT_NE(error("[a").find("not closed"), std::string::npos);
  EXPECT_NE(error("\\p{Nothing}a").find("cannot be read"), std::string::npos);
  EXPECT_NE(error(std::string(20000, 'a')).find("longer than"), std::string::npos);
  // A pattern with exponentially many ways to fail gives up.
  PatternScratch scratch;
  const TextPattern slow("(?:a|a)+[bc]", "file: Split");
  EXPECT_NE(user_error_of([&] { slow.find(std::string(60, 'a'), 0, scratch); }).find("too many steps"),
            std::string::npos);
}

TEST(TextPattern, CharactersOfWordsAreThoseOfAddedTokens) {
  PatternScratch scratch;
  const TextPattern words("[" + std::string(kUnicodeWords) + "]", "test");
  // Blocks to which Unicode has added nothing for long: the two libraries may be of other versions.
  const std::pair<char32_t, char32_t> kBlocks[] = {{0, 0x590}, {0x2000, 0x2FE0}, {0x1F100, 0x1F200}};
  for (const auto& [begin, end] : kBlocks) {
    for (char32_t c = begin; c < end; ++c) {
      std::string text;
      append_utf8(c, text);
      ASSERT_EQ(words.find(text, 0, scratch).has_value(), is_word_character(c)) << std::hex << static_cast<uint32_t>(c);
    }
  }
}

TEST(AddedTokens, AreCutOutTheLongestFirst) {
  const AddedTokens tokens({{.id = 1, .content = "<a>"},
                            {.id = 2, .content = "<a><b>"},
                            {.id = 3, .content = "<s>", .special = true},
                            {.id = 4, .content = "word", .single_word = true},
                            {.id = 5, .content = "<m>", .strip_left = true, .strip_right = true}});
  const auto cut = [&](const std::string& text, bool special) {
    std::vector<AddedTokens::Part> parts;
    tokens.split(text, special, parts);
    std::string joined;
    for (const auto& part : parts) {
      joined.append("[").append(part.id ? std::to_string(*part.id).append(":") : "");
      joined.append(text, part.range.begin, part.range.size()).append("]");
    }
    return joined;
  };
  EXPECT_EQ(cut("x<a><a><b>y", false), "[x][1:<a>][2:<a><b>][y]");
  EXPECT_EQ(cut("<s>x", false), "[<s>x]");
  EXPECT_EQ(cut("<s>x", true), "[3:<s>][x]");
  EXPECT_EQ(cut("word words sword (word) éword", false), "[4:word][ words sword (][4:word][) éword]");
  EXPECT_EQ(cut("Ⅷword word\u200D ½word", false), "[Ⅷword word\u200D ½][4:word]");
  EXPECT_EQ(cut("a \u3000<m>  b <m>", false), "[a][5: \u3000<m>  ][b][5: <m>]");
  EXPECT_EQ(cut("", true), "");
}

}  // namespace
}  // namespace palimpsest
