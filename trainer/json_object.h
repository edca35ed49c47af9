// A JSON object, for the reports of commands and for configs of public models: {"tokens":366,"perplexity":12.5}.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace palimpsest {

class JsonObject {
 public:
  // Numbers read back to the same bits; one that is not finite becomes null.
  JsonObject& add(std::string_view key, double value);
  JsonObject& add(std::string_view key, int64_t value);
  // With a point or an exponent always: readers with types take 1 for an integer.
  JsonObject& add_real(std::string_view key, double value);
  JsonObject& add(std::string_view key, std::string_view text);
  JsonObject& add(std::string_view key, const JsonObject& object);
  JsonObject& add(std::string_view key, const std::vector<JsonObject>& objects);
  JsonObject& add_flag(std::string_view key, bool value);
  JsonObject& add_null(std::string_view key);
  JsonObject& add_list(std::string_view key, const std::vector<std::string>& values);
  JsonObject& add_list(std::string_view key, const std::vector<int64_t>& values);
  std::string text() const { return "{" + members_ + "}"; }

 private:
  JsonObject& add_value(std::string_view key, std::string_view value);
  std::string members_;
};

}  // namespace palimpsest
