#include "trainer/json_object.h"

#include <fmt/format.h>

#include <cmath>

namespace palimpsest {

namespace {

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      result += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      result += c;
    }
  }
  return result + "\"";
}

}  // namespace

JsonObject& JsonObject::add_value(std::string_view key, std::string_view value) {
  members_ += fmt::format("{}{}:{}", members_.empty() ? "" : ",", quoted(key), value);
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, double value) {
  return add_value(key, std::isfinite(value) ? fmt::format("{}", value) : "null");
}

JsonObject& JsonObject::add_real(std::string_view key, double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return add_value(key, text);
}

JsonObject& JsonObject::add(std::string_view key, int64_t value) {
  return add_value(key, fmt::format("{}", value));
}

JsonObject& JsonObject::add(std::string_view key, std::string_view text) {
  return add_value(key, quoted(text));
}

JsonObject& JsonObject::add(std::string_view key, const JsonObject& object) {
  return add_value(key, object.text());
}

JsonObject& JsonObject::add(std::string_view key, const std::vector<JsonObject>& objects) {
  std::string list;
  for (const JsonObject& object : objects) list += fmt::format("{}{}", list.empty() ? "" : ",", object.text());
  return add_value(key, fmt::format("[{}]", list));
}

JsonObject& JsonObject::add_flag(std::string_view key, bool value) {
  return add_value(key, value ? "true" : "false");
}

JsonObject& JsonObject::add_null(std::string_view key) {
  return add_value(key, "null");
}

JsonObject& JsonObject::add_list(std::string_view key, const std::vector<std::string>& values) {
  std::string list;
  for (const std::string& value : values) list += fmt::format("{}{}", list.empty() ? "" : ",", quoted(value));
  return add_value(key, fmt::format("[{}]", list));
}

JsonObject& JsonObject::add_list(std::string_view key, const std::vector<int64_t>& values) {
  std::string list;
  for (const int64_t value : values) list += fmt::format("{}{}", list.empty() ? "" : ",", value);
  return add_value(key, fmt::format("[{}]", list));
}

}  // namespace palimpsest
