// What a public tokenizer file says, read and checked: between the readers of the two formats and the tokenizer itself.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/added_tokens.h"
#include "data/normalizer.h"
#include "data/pre_tokenizer.h"
#include "data/tokenizer.h"
#include "data/word_model.h"

namespace palimpsest {

struct PublicTokenizerParts {
  TokenizerTable table;
  std::vector<AddedToken> raw_tokens;         // searched for before normalization
  std::vector<AddedToken> normalized_tokens;  // and after it
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  std::unique_ptr<WordModel> model;
};

std::unique_ptr<Tokenizer> make_public_tokenizer(PublicTokenizerParts parts);

// bos_token and eos_token of a tokenizer_config.json, and its added_tokens_decoder (special ones alone).
struct TokenizerConfig {
  std::string bos, eos;  // empty: not named
  std::vector<std::pair<int32_t, std::string>> special;
};
TokenizerConfig parse_tokenizer_config(std::string_view json, const std::string& path);

// GPT-2's cut of text into words, and the one that the public tokenizer of Kimi Linear cuts by, in Oniguruma's syntax.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline constexpr std::string_view kKimiPattern =
    R"([\p{Han}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

}  // namespace palimpsest
