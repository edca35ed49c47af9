// How public tokenizer files spell bytes.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace palimpsest {

// GPT-2's alphabet: a printable character for each byte. The bytes that a piece spells, or nothing when one of its
// characters is not of the alphabet.
std::optional<std::string> bytes_of_byte_level(std::string_view piece);

// SentencePiece's byte pieces: <0x00> to <0xFF>.
std::string fallback_piece(char byte);
std::optional<char> byte_of_fallback_piece(std::string_view piece);

// Standard base64 with padding; nothing when the text is not.
std::optional<std::string> base64_decoded(std::string_view text);

}  // namespace palimpsest
