#include "data/byte_level.h"

#include <array>
#include <cstdint>
#include <cstdio>

#include "data/utf8.h"

namespace palimpsest {

namespace {

// Printable characters of Latin-1 stand for themselves; the other bytes, in order, for U+0100, U+0101, ...
bool stands_for_itself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr char32_t kFirstSubstitute = 0x100;

}  // namespace

std::optional<std::string> bytes_of_byte_level(std::string_view piece) {
  static const std::string kSubstituted = [] {
    std::string bytes;
    for (int byte = 0; byte < 256; ++byte)
      if (!stands_for_itself(byte)) bytes += static_cast<char>(byte);
    return bytes;
  }();
  std::string bytes;
  for (; !piece.empty(); piece.remove_prefix(utf8_character_length(piece))) {
    const char32_t c = utf8_code_point(piece);
    if (c < kFirstSubstitute && stands_for_itself(static_cast<int>(c)))
      bytes += static_cast<char>(c);
    else if (c >= kFirstSubstitute && c - kFirstSubstitute < kSubstituted.size())
      bytes += kSubstituted[c - kFirstSubstitute];
    else
      return std::nullopt;
  }
  return bytes;
}

std::string fallback_piece(char byte) {
  char text[8];
  std::snprintf(text, sizeof(text), "<0x%02X>", static_cast<unsigned>(static_cast<uint8_t>(byte)));
  return text;
}

std::optional<char> byte_of_fallback_piece(std::string_view piece) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return std::nullopt;
  const size_t high = kDigits.find(piece[3]), low = kDigits.find(piece[4]);
  if (high == std::string_view::npos || low == std::string_view::npos) return std::nullopt;
  return static_cast<char>(16 * high + low);
}

std::optional<std::string> base64_decoded(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  const std::string_view digits = text.substr(0, text.size() - padding);
  static const std::array<int8_t, 256> kValues = [] {
    std::array<int8_t, 256> values;
    values.fill(-1);
    constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < kAlphabet.size(); ++i) values[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
    return values;
  }();
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t pending = 0;
  int bits = 0;
  for (const char c : digits) {
    const int8_t value = kValues[static_cast<uint8_t>(c)];
    if (value < 0) return std::nullopt;
    pending = pending << 6 | static_cast<uint32_t>(value);
    bits += 6;
    if (bits < 8) continue;
    bits -= 8;
    bytes += static_cast<char>(pending >> bits & 0xFF);
  }
  return bytes;
}

}  // namespace palimpsest
