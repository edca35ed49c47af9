// Tokenizers of public models: tokenizer.json, and tiktoken.model as Kimi Linear ships it.
//
// Text goes through the file's own steps: added tokens are cut out, what lies between is normalized, cut into words by
// the pre-tokenizer, and each word becomes ids by the model. Special tokens in a text are text, unless the caller asks
// for them (the public library's encode_special_tokens). The post-processor adds nothing here: documents get bos and
// eos from the shards, prompts bos from `generate`. Any other part of a file that is not known is refused by name.
//
// bos and eos are those of tokenizer_config.json beside the file; without it those that the post-processor puts around
// a text, then special tokens of a usual name. A model with one of the two uses it for both.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace palimpsest {

// Reads PATH and tokenizer_config.json beside it. Damage and parts that are not supported throw one line.
std::unique_ptr<Tokenizer> load_tokenizer_json(const std::string& path);
std::unique_ptr<Tokenizer> load_tiktoken(const std::string& path);

// The same from the contents of the files; `path` names them in messages.
std::unique_ptr<Tokenizer> parse_tokenizer_json(std::string_view json, std::optional<std::string_view> config,
                                                const std::string& path);
std::unique_ptr<Tokenizer> parse_tiktoken(std::string_view ranks, std::optional<std::string_view> config,
                                          const std::string& path);

// Whether a file holds lines of base64 and a rank, as tiktoken's do.
bool looks_like_tiktoken(std::string_view content);

}  // namespace palimpsest
