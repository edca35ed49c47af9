// UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace palimpsest {

// The length of the valid UTF-8 character at the start of the text, or 0 when there is none: no overlong forms, no
// surrogates, nothing above U+10FFFF.
size_t utf8_character_length(std::string_view text);

// How many bytes at the start of the text are valid UTF-8 characters.
size_t utf8_valid_length(std::string_view text);

// The code point of the character at the start of a text that is valid and not empty.
char32_t utf8_code_point(std::string_view text);

// ---- what Unicode says about characters -----------------------------------------------------------------------------
bool is_white_space(char32_t c);     // the property White_Space
bool is_word_character(char32_t c);  // Alphabetic, marks, decimal digits, connectors and joiners (UTS 18)

void append_utf8(char32_t c, std::string& text);

}  // namespace palimpsest
