#include "data/tokenizer.h"

#include <gtest/gtest.h>
#include <sentencepiece_trainer.h>

#include <thread>

#include "data/file_ops.h"
#include "data/utf8.h"
#include "kernels/random.h"
#include "tests/support/files.h"

namespace palimpsest {
namespace {

using namespace std::string_literals;

using support::TempDirectory;
using support::user_error_of;
using support::write_file;

// About 40 kB of lines made of invented words.
std::string invented_text() {
  static const char* const kSyllables[] = {"ka", "lo", "mi", "ne", "tur", "ba", "si", "po", "ré", "gen"};
  std::string text;
  for (uint64_t word = 0; word < 7000; ++word) {
    const uint64_t bits = random_bits(5, 0, word % 700 + word % 31);
    for (uint64_t i = 0; i <= bits % 3; ++i) text += kSyllables[(bits >> (8 * i)) % 10];
    text += word % 11 == 10 ? ".\n" : " ";
  }
  return text;
}

std::string train_on(const std::string& text, int64_t vocab_size) {
  bool given = false;
  return train_sentencepiece(
      [&](std::string& out) {
        out = text;
        return !std::exchange(given, true);
      },
      vocab_size);
}

std::unique_ptr<Tokenizer> small_sentencepiece(const TempDirectory& folder) {
  write_file(folder / "small.model", train_on(invented_text(), 400));
  return load_tokenizer(folder / "small.model");
}

std::vector<std::string> difficult_texts() {
  std::vector<std::string> texts = {
      "",
      " ",
      "   two  spaces   at every  place  ",
      "\n\n\ttabs\tand\r\nline ends\v\f\n",
      "nul \0 in the middle\0"s,
      "\0\0\0"s,
      "\xE2\x96\x81",  // U+2581, the mark that stands for a space
      "a\xE2\x96\x81 \xE2\x96\x81\xE2\x96\x81 b\xE2\x96",
      "\xEF\xBF\xBD is what bad bytes often become",
      "\xE2\x96\x85 and \xE2\x81\x87",                     // characters with a meaning inside the library
      "\xEF\xAC\x81 \xEF\xBC\xA1 \xE2\x91\xA0 e\xCC\x81",  // what normalisation would change
      "<s></s><unk><0x41><0xFF>",
      "\xFF\xFE\x80\x80\xC0\xAF\xED\xA0\x80\xF4\x90\x80\x80\xE2\x82",
      "\xF0\x9F\x98\x80\xF0\x9F\x98",
      "日本語のテキスト и русский",
      std::string(200000, 'x'),
      std::string(100000, ' '),
  };
  std::string lines;
  for (int i = 0; i < 30000; ++i) lines += "word " + std::to_string(i) + "\n";
  texts.push_back(lines);
  std::string bytes(3000, '\0');
  for (uint64_t round = 0; round < 20; ++round) {
    // Half the rounds draw from few bytes, so that valid characters and U+2581 come up.
    static constexpr char kFew[] = " \n\xE2\x96\x81\x85\xC3\xA9\xF0\x9F\x98\x80ka";
    for (size_t i = 0; i < bytes.size(); ++i) {
      const uint64_t bits = random_bits(7, round, i);
      bytes[i] = round % 2 == 0 ? static_cast<char>(bits) : kFew[bits % (sizeof(kFew) - 1)];
    }
    texts.push_back(bytes);
  }
  return texts;
}

TEST(Utf8, KnowsValidCharacters) {
  EXPECT_EQ(utf8_character_length(""), 0u);
  EXPECT_EQ(utf8_character_length(std::string_view("\0", 1)), 1u);
  EXPECT_EQ(utf8_character_length("\x7F"), 1u);
  EXPECT_EQ(utf8_character_length("\xC2\x80"), 2u);
  EXPECT_EQ(utf8_character_length("\xE0\xA0\x80"), 3u);
  EXPECT_EQ(utf8_character_length("\xED\x9F\xBF"), 3u);
  EXPECT_EQ(utf8_character_length("\xF0\x90\x80\x80"), 4u);
  EXPECT_EQ(utf8_character_length("\xF4\x8F\xBF\xBF"), 4u);
  for (const char* bad : {"\x80", "\xC0\x80", "\xC1\xBF", "\xC2", "\xC2 ", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xE2\x96",
                          "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF"})
    EXPECT_EQ(utf8_character_length(bad), 0u) << bad;
}

TEST(ByteTokenizer, HasTheDocumentedIds) {
  const auto tokenizer = load_tokenizer("bytes");
  EXPECT_EQ(tokenizer->vocab_size(), 258);
  EXPECT_EQ(tokenizer->bos(), 256);
  EXPECT_EQ(tokenizer->eos(), 257);
  EXPECT_EQ(tokenizer->name(), "bytes");
  EXPECT_EQ(tokenizer->encode("a\0\xFF"s), (std::vector<int32_t>{97, 0, 255}));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{256, 97, 257}), "a");
  EXPECT_NE(user_error_of([&] { tokenizer->bytes_of(258); }).find("token id 258"), std::string::npos);
  EXPECT_NE(user_error_of([&] { tokenizer->bytes_of(-1); }).find("token id -1"), std::string::npos);
}

TEST(ByteTokenizer, IsLossless) {
  const auto tokenizer = make_byte_tokenizer();
  for (const std::string& text : difficult_texts()) EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
}

TEST(SentencePiece, IsLossless) {
  const TempDirectory folder;
  const auto tokenizer = small_sentencepiece(folder);
  for (const std::string& text : difficult_texts()) {
    const std::vector<int32_t> ids = tokenizer->encode(text);
    EXPECT_EQ(tokenizer->decode(ids), text);
    for (const int32_t id : ids) ASSERT_TRUE(id != tokenizer->bos() && id != tokenizer->eos() && id != 0);
  }
}

TEST(SentencePiece, CompressesWhatItWasTrainedOn) {
  const TempDirectory folder;
  const auto tokenizer = small_sentencepiece(folder);
  const std::string text = invented_text();
  EXPECT_EQ(tokenizer->vocab_size(), 400);
  EXPECT_EQ(tokenizer->bos(), 1);
  EXPECT_EQ(tokenizer->eos(), 2);
  EXPECT_EQ(tokenizer->name(), "small.model");
  EXPECT_EQ(tokenizer->hash().size(), 16u);
  EXPECT_LT(tokenizer->encode(text).size() * 2, text.size());
}

TEST(SentencePiece, TrainingIsReproducible) {
  EXPECT_EQ(train_on(invented_text(), 350), train_on(invented_text(), 350));
}

TEST(SentencePiece, WindowsEncodedOneByOneGiveTheWhole) {
  const TempDirectory folder;
  const auto tokenizer = small_sentencepiece(folder);
  for (const std::string& text : difficult_texts()) {
    std::vector<int32_t> ids;
    for (std::string_view rest = text; !rest.empty();) {
      const size_t length = encoding_window(rest.substr(0, kEncodingWindow + 1));
      ASSERT_TRUE(length > 0 && length <= kEncodingWindow);
      tokenizer->encode(rest.substr(0, length), ids);
      rest.remove_prefix(length);
    }
    EXPECT_EQ(ids, tokenizer->encode(text));
  }
}

TEST(SentencePiece, EncodesFromSeveralThreads) {
  const TempDirectory folder;
  const auto tokenizer = small_sentencepiece(folder);
  const std::string text = invented_text();
  const std::vector<int32_t> expected = tokenizer->encode(text);
  std::vector<std::thread> threads;
  threads.reserve(3);
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { EXPECT_EQ(tokenizer->encode(text), expected); });
  for (std::thread& thread : threads) thread.join();
}

TEST(SentencePiece, RefusesModelsThatLoseText) {
  const TempDirectory folder;
  write_file(folder / "text.txt", invented_text());
  const auto error_with = [&](const std::string& settings) {
    const auto status =
        sentencepiece::SentencePieceTrainer::Train("--minloglevel=2 --vocab_size=320 --input=" + (folder / "text.txt") +
                                                   " --model_prefix=" + (folder / "m") + " " + settings);
    CHECK(status.ok(), status.ToString());
    return user_error_of([&] { load_tokenizer(folder / "m.model"); });
  };
  const std::string kept = "--normalization_rule_name=identity --add_dummy_prefix=false --byte_fallback=true ";
  EXPECT_NE(error_with("--hard_vocab_limit=false").find("byte_fallback=true"), std::string::npos);
  EXPECT_NE(error_with("--byte_fallback=true").find("add_dummy_prefix=false"), std::string::npos);
  EXPECT_NE(error_with(kept).find("remove_extra_whitespaces=false"), std::string::npos);
  EXPECT_NE(error_with("--byte_fallback=true --add_dummy_prefix=false --remove_extra_whitespaces=false")
                .find("normalization_rule_name=identity"),
            std::string::npos);
  EXPECT_NE(error_with(kept + "--remove_extra_whitespaces=false --bos_id=-1").find("bos_id"), std::string::npos);
}

TEST(SentencePiece, BadFilesAndSizesAreUserErrors) {
  const TempDirectory folder;
  write_file(folder / "text.model", "no model");
  write_file(folder / "empty.model", "");
  EXPECT_NE(user_error_of([&] { load_tokenizer(folder / "text.model"); }).find("not a SentencePiece model"),
            std::string::npos);
  EXPECT_NE(user_error_of([&] { load_tokenizer(folder / "empty.model"); }).find("not a SentencePiece model"),
            std::string::npos);
  EXPECT_NE(user_error_of([&] { load_tokenizer(folder / "none.model"); }).find("No such file"), std::string::npos);
  EXPECT_NE(user_error_of([&] { train_on(invented_text(), 100000); }).find("Vocabulary size too high"),
            std::string::npos);
  EXPECT_NE(user_error_of([&] { train_on(invented_text(), 100); }).find("of 100 ids"), std::string::npos);
  EXPECT_NE(user_error_of([&] { train_on("", 300); }).find("needs some text"), std::string::npos);
}

TEST(SentencePiece, ADamagedModelNeverCrashes) {
  const TempDirectory folder;
  const std::string model = train_on(invented_text(), 300);
  const std::string text = "kalo  mi\n";
  for (size_t position = 0; position < model.size(); position += 1 + position / 16) {
    std::string damaged = model;
    damaged[position] = static_cast<char>(damaged[position] ^ (1 << (position % 8)));
    write_file(folder / "flipped.model", damaged);
    write_file(folder / "short.model", model.substr(0, position));
    for (const char* name : {"flipped.model", "short.model"}) {
      try {  // the format has no checksum: a model that can be used must still be lossless
        const auto tokenizer = load_tokenizer(folder / name);
        EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
      } catch (const UserError&) {
      }
    }
  }
}

}  // namespace
}  // namespace palimpsest
