#include "data/json_node.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace palimpsest {

namespace {

using Json = nlohmann::json;

std::unique_ptr<const Json> parse(std::string_view text, const std::string& path) {
  try {
    return std::make_unique<const Json>(Json::parse(text));
  } catch (const Json::exception& error) {
    std::string cause = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 5: ..."
    if (const size_t begin = cause.find("] "); begin != std::string::npos) cause = cause.substr(begin + 2);
    throw_user_error(path, ": not JSON: ", printable(cause));
  }
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr size_t kLongest = 120;
  std::string out(text.substr(0, kLongest));
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return c < ' ' || c == 127; }, '?');
  return text.size() > kLongest ? out + "..." : out;
}

JsonNode::JsonNode(const Json& value, std::string where) : value_(&value), where_(std::move(where)) {}

void JsonNode::allow(std::initializer_list<std::string_view> names) const {
  for_each_field([&](const std::string& name, const JsonNode&) {
    if (std::find(names.begin(), names.end(), name) == names.end())
      refuse("the field '", printable(name), "' is not supported");
  });
}

bool JsonNode::is_null() const {
  return value_->is_null();
}
bool JsonNode::is_object() const {
  return value_->is_object();
}
bool JsonNode::is_array() const {
  return value_->is_array();
}
bool JsonNode::is_empty() const {
  return value_->is_null() || *value_ == "" || *value_ == 0.0;
}

JsonNode JsonNode::operator[](const char* name) const {
  static const Json kNull;
  if (!value_->is_object()) refuse("expected an object");
  const auto found = value_->find(name);
  return {found == value_->end() ? kNull : *found, where_ + "." + name};
}

void JsonNode::for_each_field(const std::function<void(const std::string& name, const JsonNode& value)>& visit) const {
  if (!value_->is_object()) refuse("expected an object");
  for (const auto& field : value_->items())
    visit(field.key(), {field.value(), where_ + "['" + printable(field.key()) + "']"});
}

size_t JsonNode::size() const {
  if (!value_->is_array()) refuse("expected a list");
  return value_->size();
}

JsonNode JsonNode::at(size_t index) const {
  return {(*value_)[index], where_ + "[" + std::to_string(index) + "]"};
}

const std::string& JsonNode::text() const {
  if (!value_->is_string()) refuse("expected a text");
  return value_->get_ref<const std::string&>();
}

double JsonNode::number() const {
  if (!value_->is_number()) refuse("expected a number");
  return value_->get<double>();
}

int32_t JsonNode::number_up_to(int32_t most) const {
  const bool good = value_->is_number_unsigned() && value_->get<uint64_t>() <= static_cast<uint64_t>(most);
  if (!good) refuse("expected a whole number from 0 to ", most);
  return value_->get<int32_t>();
}

bool JsonNode::flag(const char* name, bool otherwise) const {
  const JsonNode node = (*this)[name];
  if (node.is_null()) return otherwise;
  if (!node.value_->is_boolean()) node.refuse("expected true or false");
  return node.value_->get<bool>();
}

JsonDocument::JsonDocument(std::string_view text, const std::string& path)
    : json_(parse(text, path)), root_(*json_, path) {}
JsonDocument::~JsonDocument() = default;

}  // namespace palimpsest
