#include "data/tokenizer.h"

#include <cstdio>
#include <utility>

#include "data/input_file.h"
#include "data/public_tokenizer.h"
#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

bool is_white(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}
bool continues_character(char c) {
  return (static_cast<uint8_t>(c) & 0xC0) == 0x80;
}

std::vector<std::string> bytes_and_two_marks() {
  std::vector<std::string> bytes_of(258);
  for (int byte = 0; byte < 256; ++byte) bytes_of[byte] = std::string(1, static_cast<char>(byte));
  return bytes_of;
}

// Enough of a file to tell its kind.
std::string read_start(const std::string& path) {
  std::string start(4096, '\0');
  start.resize(InputFile(path).read(start));
  return start;
}

class ByteTokenizer : public Tokenizer {
 public:
  ByteTokenizer()
      : Tokenizer(
            {.name = "bytes", .hash = "0000000000000100", .bytes_of = bytes_and_two_marks(), .bos = 256, .eos = 257}) {}

 private:
  void encode_window(std::string_view text, const EncodeOptions&, std::vector<int32_t>& ids) const override {
    for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  }
};

}  // namespace

size_t encoding_window(std::string_view text) {
  if (text.size() <= kEncodingWindow) return text.size();
  const auto last_cut = [&](const auto& good) {
    size_t cut = kEncodingWindow;
    while (cut > kEncodingWindow / 2 && !good(cut)) --cut;
    return cut > kEncodingWindow / 2 ? cut : 0;
  };
  const auto after_white = [&](size_t cut) { return is_white(text[cut - 1]); };
  const auto ideographic_mark = [&](size_t cut) {  // U+3001, U+3002, U+FF0C
    const std::string_view mark = text.substr(cut, 3);
    return mark == "\xE3\x80\x81" || mark == "\xE3\x80\x82" || mark == "\xEF\xBC\x8C";
  };
  if (const size_t cut = last_cut([&](size_t i) { return text[i] == ' ' && !after_white(i); })) return cut;
  if (const size_t cut = last_cut([&](size_t i) { return is_white(text[i]) && !after_white(i); })) return cut;
  if (const size_t cut = last_cut([&](size_t i) { return ideographic_mark(i) && !ideographic_mark(i - 3); }))
    return cut;
  constexpr size_t kLongestCharacter = 4;
  for (size_t cut = kEncodingWindow; cut > kEncodingWindow - kLongestCharacter; --cut)
    if (!continues_character(text[cut])) return cut;
  return kEncodingWindow;
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& ids, EncodeOptions options) const {
  for (; !text.empty(); options.continues = true) {
    const size_t length = encoding_window(text);
    encode_window(text.substr(0, length), options, ids);
    text.remove_prefix(length);
  }
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encode(text, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += bytes_of(id);
  if (table_.adds_leading_space && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::string_view Tokenizer::bytes_of(int32_t id) const {
  if (id < 0 || id >= vocab_size())
    throw_user_error("token id ", id, " is outside the vocabulary of ", vocab_size(), " ids of the tokenizer ", name());
  return table_.bytes_of[id];
}

std::string tokenizer_hash_of(std::string_view content) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash_of(content)));
  return text;
}

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name_or_path) {
  if (name_or_path == "bytes") return make_byte_tokenizer();
  const std::string start = read_start(name_or_path);
  if (start.starts_with('{')) return load_tokenizer_json(name_or_path);
  if (looks_like_tiktoken(start)) return load_tiktoken(name_or_path);
  return load_sentencepiece(name_or_path);
}

}  // namespace palimpsest
