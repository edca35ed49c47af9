// Any bytes as a tokenizer file, up to the first 0xff, and as a text, after it: the file is refused with a UserError,
// or encodes the text to ids of its vocabulary, and decodes them to the same text where it says that it loses none. A
// file that begins with '{' is a tokenizer.json, any other a tiktoken.model.
//
// SentencePiece models are out of scope: that library reads them.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

#include "data/public_tokenizer.h"
#include "kernels/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace palimpsest;
  const uint8_t* border = std::find(data, data + size, uint8_t{0xff});
  const std::string_view file(reinterpret_cast<const char*>(data), border - data);
  const std::string_view text(reinterpret_cast<const char*>(border), data + size - border);
  try {
    const std::unique_ptr<Tokenizer> tokenizer = file.starts_with('{')
                                                     ? parse_tokenizer_json(file, std::nullopt, "fuzz/tokenizer.json")
                                                     : parse_tiktoken(file, std::nullopt, "fuzz/tiktoken.model");
    const std::vector<int32_t> ids = tokenizer->encode(text);
    for (const int32_t id : ids)
      if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
    if (tokenizer->loss().empty() && tokenizer->decode(ids) != text) std::abort();
    std::vector<int32_t> with_special;
    tokenizer->encode(text, with_special, {.continues = true, .special_tokens = true});
    tokenizer->decode(with_special);
  } catch (const UserError&) {
  }
  return 0;
}
