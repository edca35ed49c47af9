#include "data/tokenizer.h"

#include <utility>

#include "kernels/check.h"

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

class ByteTokenizer : public Tokenizer {
 public:
  ByteTokenizer() : Tokenizer("bytes", "0000000000000100", bytes_and_two_marks(), 256, 257) {}

 private:
  void encode_window(std::string_view text, std::vector<int32_t>& ids) const override {
    for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  }
};

}  // namespace

size_t encoding_window(std::string_view text) {
  if (text.size() <= kEncodingWindow) return text.size();
  for (size_t cut = kEncodingWindow; cut > kEncodingWindow / 2; --cut)
    if (is_white(text[cut]) && !is_white(text[cut - 1])) return cut;
  constexpr size_t kLongestCharacter = 4;
  for (size_t cut = kEncodingWindow; cut > kEncodingWindow - kLongestCharacter; --cut)
    if (!continues_character(text[cut])) return cut;
  return kEncodingWindow;
}

Tokenizer::Tokenizer(std::string name, std::string hash, std::vector<std::string> bytes_of, int32_t bos, int32_t eos)
    : name_(std::move(name)), hash_(std::move(hash)), bytes_of_(std::move(bytes_of)), bos_(bos), eos_(eos) {}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  while (!text.empty()) {
    const size_t length = encoding_window(text);
    encode_window(text.substr(0, length), ids);
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
  return text;
}

std::string_view Tokenizer::bytes_of(int32_t id) const {
  if (id < 0 || id >= vocab_size())
    throw_user_error("token id ", id, " is outside the vocabulary of ", vocab_size(), " ids of the tokenizer ", name_);
  return bytes_of_[id];
}

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name_or_path) {
  return name_or_path == "bytes" ? make_byte_tokenizer() : load_sentencepiece(name_or_path);
}

}  // namespace palimpsest
