// Tokenizers of public models against the public library: small ones whose ids stand in tests/data/tokenizers, made by
// train_tokenizers.py, and, where the library can be had, fresh ones on a megabyte of text.
#include "data/public_tokenizer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "data/file_ops.h"
#include "kernels/random.h"
#include "tests/support/files.h"

namespace palimpsest {
namespace {

using namespace std::string_literals;

using support::read_file;
using support::TempDirectory;
using support::user_error_of;
using support::write_file;

const std::string kFixtures = PALIMPSEST_SOURCE_DIR "/tests/data/tokenizers";

std::string model_path(const std::string& folder) {
  for (const char* name : {"/tokenizer.json", "/tiktoken.model"})
    if (path_exists(folder + name)) return folder + name;
  ADD_FAILURE() << folder << " holds no tokenizer";
  return "";
}

std::vector<int32_t> read_ids(const std::string& path) {
  const std::string bytes = read_file(path);
  std::vector<int32_t> ids(bytes.size() / sizeof(int32_t));
  std::memcpy(ids.data(), bytes.data(), ids.size() * sizeof(int32_t));
  return ids;
}

// The text that two lists of ids agree on up to their first difference, its end.
std::string agreement(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, size_t count) {
  const size_t begin = count > 6 ? count - 6 : 0;
  std::string text;
  for (size_t i = begin; i < std::min(ids.size(), count + 4); ++i) text.append("|").append(tokenizer.bytes_of(ids[i]));
  return text;
}

// Compares every folder below `root`; returns their names.
std::vector<std::string> expect_public_ids(const std::string& root) {
  const std::string text = read_file(root + "/text.txt");
  std::vector<std::string> kinds;
  for (const std::string& kind : list_directory(root)) {
    const std::string folder = root + "/" + kind;
    if (!is_directory(folder)) continue;
    kinds.push_back(kind);
    const auto tokenizer = load_tokenizer(model_path(folder));
    const std::vector<int32_t> expected = read_ids(folder + "/ids.bin"), ids = tokenizer->encode(text);
    const size_t same = std::mismatch(ids.begin(), ids.end(), expected.begin(), expected.end()).first - ids.begin();
    EXPECT_EQ(ids.size(), expected.size()) << kind;
    EXPECT_TRUE(ids == expected) << kind << ": id " << same << " differs:\n"
                                 << agreement(*tokenizer, ids, same) << "\nexpected\n"
                                 << agreement(*tokenizer, expected, same);
    EXPECT_TRUE(!tokenizer->loss().empty() || tokenizer->decode(ids) == text) << kind;
  }
  return kinds;
}

TEST(PublicTokenizer, GivesTheIdsOfThePublicLibrary) {
  EXPECT_EQ(expect_public_ids(kFixtures).size(), 14u);
}

// Runs a command with its output in a file; 0 when it succeeded.
int run_quietly(const std::string& command, const std::string& log) {
  return std::system((command + " > '" + log + "' 2>&1").c_str());  // NOLINT(cert-env33-c): a test of its own machine
}

TEST(PublicTokenizer, GivesTheIdsOfFreshlyTrainedTokenizersOnAMegabyte) {
  const TempDirectory folder;
  const std::string python = "PYTHONPATH='" + folder.path() + "/site' python3 ", log = folder / "log";
  if (run_quietly("python3 -c 'import tokenizers'", log) != 0 &&
      run_quietly("timeout 100 python3 -m pip install --no-deps --quiet --retries 1 --timeout 10 --target '" +
                      folder.path() + "/site' tokenizers",
                  log) != 0)
    GTEST_SKIP() << "the Python library tokenizers is not installed, and pip does not get it";
  const std::string script = PALIMPSEST_SOURCE_DIR "/tests/data/train_tokenizers.py";
  ASSERT_EQ(run_quietly(python + script + " '" + folder.path() + "/trained' 1000000 1500", log), 0) << read_file(log);
  EXPECT_GE(expect_public_ids(folder / "trained").size(), 13u);
}

std::string fixture(const std::string& kind) {
  return read_file(kFixtures + "/" + kind + "/tokenizer.json");
}

// The fixture with its first `from` replaced.
std::string changed(const std::string& kind, const std::string& from, const std::string& to) {
  std::string json = fixture(kind);
  const size_t at = json.find(from);
  CHECK(at != std::string::npos, from);
  return json.replace(at, from.size(), to);
}

std::unique_ptr<Tokenizer> parsed(const std::string& json) {
  return parse_tokenizer_json(json, std::nullopt, "t/tokenizer.json");
}

std::string error_of(const std::string& json, std::optional<std::string> config = {}) {
  return user_error_of([&] { parse_tokenizer_json(json, config, "t/tokenizer.json"); });
}

std::vector<std::string> difficult_texts() {
  std::vector<std::string> texts = {
      "",
      " ",
      "  two  spaces ",
      "nul \0 inside\0"s,
      "<s></s><|endoftext|><0x41>",
      "\xFF\xFE\x80\xC0\xAF\xED\xA0\x80 a \xF4\x90\x80\x80\xE2\x82",
      "\xE2\x96\x81 e\xCC\x81 \xEF\xAC\x81",
      std::string(150000, 'x'),
      std::string(150000, ' '),
      std::string(70000, '\n') + "end",
  };
  std::string bytes(3000, '\0');
  for (uint64_t round = 0; round < 6; ++round) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(random_bits(9, round, i));
    texts.push_back(bytes);
  }
  return texts;
}

TEST(PublicTokenizer, IsLosslessWhereItSaysSo) {
  int lossless = 0;
  for (const char* kind : {"gpt2", "llama3", "deepseek", "kimi", "starcoder", "tiktoken"}) {
    const auto tokenizer = load_tokenizer(model_path(kFixtures + "/" + kind));
    EXPECT_EQ(tokenizer->loss(), "") << kind;
    for (const std::string& text : difficult_texts()) {
      const std::vector<int32_t> ids = tokenizer->encode(text);
      EXPECT_TRUE(tokenizer->decode(ids) == text) << kind << ": " << text.substr(0, 40);
      for (const int32_t id : ids) ASSERT_TRUE(id != tokenizer->bos() && id != tokenizer->eos());
    }
    ++lossless;
  }
  EXPECT_EQ(lossless, 6);
}

TEST(PublicTokenizer, SaysWhatItLoses) {
  const auto loss = [](const char* kind) { return parsed(fixture(kind))->loss(); };
  EXPECT_NE(loss("qwen").find("normalizer NFC"), std::string::npos);
  EXPECT_NE(loss("unigram").find("normalizer NFKC changes text; its normalizer Lowercase"), std::string::npos);
  EXPECT_NE(loss("unigram").find("Metaspace"), std::string::npos);
  EXPECT_NE(loss("unigram").find("outside its vocabulary"), std::string::npos);
  EXPECT_EQ(loss("unigram_bytes").find("outside its vocabulary"), std::string::npos);
  EXPECT_NE(loss("roberta").find("puts a space"), std::string::npos);
  EXPECT_NE(loss("t5").find("WhitespaceSplit removes"), std::string::npos);
}

TEST(PublicTokenizer, GivesTextBackThroughItsDecoder) {
  for (const char* kind : {"llama2", "gemma", "unigram_bytes"})
    for (const std::string text : {"one two", "don't\tgo \xF0\x9F\xA6\x8B  on"}) {
      const auto tokenizer = parsed(fixture(kind));
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << kind;
    }
}

TEST(PublicTokenizer, WindowsEncodedOneByOneGiveTheWhole) {
  std::vector<std::string> texts = difficult_texts();
  const std::string text = read_file(kFixtures + "/text.txt");
  texts.push_back("");
  while (texts.back().size() < 200000) texts.back() += text;
  for (const char* kind : {"gpt2", "roberta", "llama2", "unigram_bytes", "tiktoken"}) {
    const auto tokenizer = load_tokenizer(model_path(kFixtures + "/" + kind));
    for (const std::string& whole : texts) {
      std::vector<int32_t> ids;
      for (std::string_view rest = whole; !rest.empty();) {
        const size_t length = encoding_window(rest.substr(0, kEncodingWindow + 1));
        tokenizer->encode(rest.substr(0, length), ids, {.continues = rest.size() < whole.size()});
        rest.remove_prefix(length);
      }
      EXPECT_TRUE(ids == tokenizer->encode(whole)) << kind;
    }
  }
}

TEST(PublicTokenizer, CutsWindowsWhereWordsBeginInAnyCase) {
  std::string text(3 * kEncodingWindow, 'x');
  const auto window_with = [&](size_t at, const std::string& piece) {
    std::string changed_text = text;
    changed_text.replace(at, piece.size(), piece);
    return encoding_window(changed_text);
  };
  const size_t at = kEncodingWindow - 1000;
  EXPECT_EQ(window_with(at, " "), at);
  EXPECT_EQ(window_with(at, "  "), at);
  EXPECT_EQ(window_with(at, "\n  "), at);           // no space that follows something
  EXPECT_EQ(window_with(at, ".\n\n y z"), at + 5);  // the last such space
  EXPECT_EQ(window_with(at, "\xE3\x80\x82\xE3\x80\x82"), at);
  EXPECT_EQ(window_with(at, ""), kEncodingWindow);
}

TEST(PublicTokenizer, EncodesFromSeveralThreads) {
  const auto tokenizer = parsed(fixture("llama3"));
  const std::string text = read_file(kFixtures + "/text.txt");
  const std::vector<int32_t> expected = tokenizer->encode(text);
  std::vector<std::thread> threads;
  threads.reserve(3);
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { EXPECT_EQ(tokenizer->encode(text), expected); });
  for (std::thread& thread : threads) thread.join();
}

TEST(PublicTokenizer, SpecialTokensAreTextUnlessAskedFor) {
  const auto tokenizer = parsed(fixture("llama3"));
  const std::string text = "a<|endoftext|>b";
  std::vector<int32_t> ids;
  tokenizer->encode(text, ids, {.special_tokens = true});
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 2), 1);  // the id of <|endoftext|> in the fixture
  EXPECT_EQ(tokenizer->decode(ids), "ab");
  ids = tokenizer->encode(text);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 2), 0);
  EXPECT_EQ(tokenizer->decode(ids), text);
}

TEST(PublicTokenizer, FindsTheMarksOfDocuments) {
  const std::string json = fixture("gpt2");
  const auto marks = [](const std::string& file, std::optional<std::string> config) {
    const auto tokenizer = parse_tokenizer_json(file, config, "t/tokenizer.json");
    return std::pair(tokenizer->bos(), tokenizer->eos());
  };
  using Marks = std::pair<int32_t, int32_t>;
  EXPECT_EQ(marks(json, std::nullopt), Marks(0, 1));
  EXPECT_EQ(marks(json, R"({"bos_token": null, "eos_token": "<|endoftext|>"})"), Marks(2, 2));
  EXPECT_EQ(marks(json, R"({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "</s>", "x": [1]})"), Marks(2, 1));
  EXPECT_EQ(marks(json, "{}"), Marks(0, 1));
  EXPECT_EQ(marks(changed("llama3", "\"SpecialToken\":{\"id\":\"<s>\"", "\"SpecialToken\":{\"id\":\"<|endoftext|>\""),
                  std::nullopt),
            Marks(2, 1));
  EXPECT_NE(
      error_of(json, R"({"bos_token": "<begin>"})").find("there is no token for the start of a document, '<begin>'"),
      std::string::npos);
  EXPECT_NE(error_of(json, R"({"bos_token": 3})").find("tokenizer_config.json.bos_token: expected a text"),
            std::string::npos);
  EXPECT_NE(error_of(json, "{").find("tokenizer_config.json: not JSON"), std::string::npos);
  const auto tiktoken = load_tokenizer(kFixtures + "/tiktoken/tiktoken.model");
  EXPECT_EQ(tiktoken->vocab_size() - tiktoken->bos(), 256);
  EXPECT_EQ(tiktoken->eos(), tiktoken->bos() + 1);
}

TEST(PublicTokenizer, RefusesByNameWhatItDoesNotKnow) {
  const struct {
    const char *kind, *from, *to, *message;
  } kCases[] = {
      {"gpt2", "\"version\":\"1.0\"", "\"version\":\"2.0\"", ".version: expected \"1.0\""},
      {"gpt2", "\"normalizer\":null", "\"normalizer\":{\"type\":\"BertNormalizer\"}",
       "the kind 'BertNormalizer' is not"},
      {"gpt2", "\"normalizer\":null", "\"normalizer\":null,\"extra\":1", "the field 'extra' is not supported"},
      {"gpt2", "\"truncation\":null", "\"truncation\":{}", ".truncation: is not supported"},
      {"gpt2", "{\"type\":\"ByteLevel\"", "{\"type\":\"UnicodeScripts\"", "the kind 'UnicodeScripts' is not supported"},
      {"gpt2", "\"use_regex\":true", "\"use_regex\":true,\"other\":1", "the field 'other' is not supported"},
      {"gpt2", "\"post_processor\":null", "\"post_processor\":{\"type\":\"Odd\"}", "the kind 'Odd' is not supported"},
      {"gpt2", "\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"CTC\"",
       "the kind 'CTC' is not supported"},
      {"gpt2", "\"model\":{\"type\":\"BPE\"", "\"model\":{\"type\":\"WordPiece\"", "the kind 'WordPiece' is not"},
      {"gpt2", "\"dropout\":null", "\"dropout\":0.1", ".model.dropout: is not supported"},
      {"gpt2", "\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"",
       "end_of_word_suffix: is not supported"},
      {"gpt2", "\"merges\":[[", "\"merges\":[[\"q!\",\"z\"],[", ".model.merges[0]: 'q!' is not in the vocabulary"},
      {"gpt2", "\"merges\":[[", "\"merges\":[\"a b c\",[", ".model.merges[0]: expected two pieces"},
      {"gpt2", "\"</s>\":1", "\"</s>\":0", "is both"},
      {"gpt2", "\"</s>\":1", "\"</s>\":9000000", "expected a whole number from 0 to"},
      {"gpt2", "\"id\":0", "\"id\":7", "has id 7, but the model gives it 0"},
      {"llama3", "\"Isolated\"", "\"Odd\"", "the behaviour 'Odd' is not supported"},
      {"llama3", "(?i:", "(?P<x>", "has '(?P'"},
      {"unigram", "\"unk_id\":2", "\"unk_id\":100000", "is outside the vocabulary"},
      {"unigram", "[\"<s>\",0.0]", "[\"<s>\"]", ".model.vocab[0]: expected a piece and its score"},
      {"unigram", "\"prepend_scheme\":\"always\"", "\"prepend_scheme\":\"odd\"", "expected always, first or never"},
      {"precompiled", "\"precompiled_charsmap\":\"", "\"precompiled_charsmap\":\"?", "is not base64"},
      {"precompiled", "\"precompiled_charsmap\":\"", "\"precompiled_charsmap\":\"////", "of them are a trie"},
  };
  for (const auto& test : kCases) {
    const std::string message = error_of(changed(test.kind, test.from, test.to));
    EXPECT_NE(message.find(test.message), std::string::npos) << message;
    EXPECT_TRUE(message.starts_with("t/tokenizer.json")) << message;
  }
  EXPECT_NE(error_of("{\"version\"").find("not JSON: "), std::string::npos);
  EXPECT_NE(error_of("[1]").find("expected an object"), std::string::npos);
  EXPECT_NE(error_of(std::string(1 << 16, '[')).find("not JSON: "), std::string::npos);
}

TEST(PublicTokenizer, RefusesDamagedTiktokenFiles) {
  const std::string good = read_file(kFixtures + "/tiktoken/tiktoken.model");
  const auto error = [](const std::string& ranks, std::optional<std::string> config = {}) {
    return user_error_of([&] { parse_tiktoken(ranks, config, "t/tiktoken.model"); });
  };
  EXPECT_NE(error(good + "AAAA\n").find("expected a token in base64"), std::string::npos);
  EXPECT_NE(error("A*A= 0\n").find("t/tiktoken.model:1: expected a token"), std::string::npos);
  EXPECT_NE(error("YQ== 5\n").find("rank 5, expected 0"), std::string::npos);
  EXPECT_NE(error("YQ== 0\nYQ== 1\n").find(":2: the same token as in line 1"), std::string::npos);
  EXPECT_NE(error("YQ== 0\n").find("no token for the byte 0"), std::string::npos);
  EXPECT_NE(error(good, R"({"bos_token": "[GONE]"})").find("[GONE] is not among"), std::string::npos);
  EXPECT_NE(error(good, R"({"added_tokens_decoder": {"3": {"content": "[BOS]"}}})").find("the id 3, expected"),
            std::string::npos);
  const TempDirectory folder;
  write_file(folder / "qwen.tiktoken", good);
  EXPECT_NE(user_error_of([&] { load_tokenizer(folder / "qwen.tiktoken"); }).find("only tiktoken.model"),
            std::string::npos);
}

TEST(PublicTokenizer, ADamagedFileNeverCrashes) {
  const std::string text = "kalo  mi\n 123 \xE6\xBC\xA2\xFF";
  int read = 0;
  for (const char* kind : {"llama3", "precompiled", "llama2"}) {
    const std::string json = fixture(kind);
    for (size_t position = 0; position < json.size(); position += 1 + position / 24) {
      std::string damaged = json;
      damaged[position] = static_cast<char>(damaged[position] ^ (1 << (position % 7)));
      for (const std::string& content : {damaged, json.substr(0, position)}) {
        try {
          const auto tokenizer = parsed(content);
          ++read;
          const std::vector<int32_t> ids = tokenizer->encode(text);
          EXPECT_TRUE(!tokenizer->loss().empty() || tokenizer->decode(ids) == text);
        } catch (const UserError& error) {
          EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
        }
      }
    }
  }
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace palimpsest
