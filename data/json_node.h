// A value of a JSON file and where it stands in it, so that every complaint names file and place.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "kernels/check.h"

namespace palimpsest {

// Fit for a message of one line: no control characters, not too long.
std::string printable(std::string_view text);

// Valid as long as its document. Functions that ask for a value throw when it is of another type.
class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string where);

  const std::string& where() const { return where_; }  // "dir/tokenizer.json.model.merges[3]"
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... fault) const {  // where: fault
    throw_user_error(where_, ": ", fault...);
  }
  void allow(std::initializer_list<std::string_view> names) const;  // throws unless all fields are among these

  bool is_null() const;
  bool is_object() const;
  bool is_array() const;
  bool is_empty() const;  // null, "" or 0

  JsonNode operator[](const char* name) const;  // of an object; null when it has no such field
  void for_each_field(const std::function<void(const std::string& name, const JsonNode& value)>& visit) const;
  size_t size() const;  // of a list
  JsonNode at(size_t index) const;

  const std::string& text() const;
  double number() const;
  int32_t number_up_to(int32_t most) const;  // whole, from 0
  bool flag(const char* name, bool otherwise) const;

 private:
  const nlohmann::json* value_;
  std::string where_;
};

class JsonDocument {
 public:
  JsonDocument(std::string_view text, const std::string& path);  // throws when it is not JSON
  ~JsonDocument();
  JsonDocument(const JsonDocument&) = delete;
  JsonDocument& operator=(const JsonDocument&) = delete;
  const JsonNode& root() const { return root_; }

 private:
  std::unique_ptr<const nlohmann::json> json_;
  JsonNode root_;
};

}  // namespace palimpsest
