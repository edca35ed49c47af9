// UTF-8.
#pragma once

#include <cstddef>
#include <string_view>

namespace palimpsest {

// The length of the valid UTF-8 character at the start of the text, or 0 when there is none: no overlong forms, no
// surrogates, nothing above U+10FFFF.
size_t utf8_character_length(std::string_view text);

}  // namespace palimpsest
