#include "trainer/config_fields.h"

#include <fmt/format.h>

#include <charconv>
#include <utility>

#include "trainer/yaml_tree.h"

namespace palimpsest {

namespace {

// The shortest decimal that reads back to the same number. Always with a point, since YAML 1.1 readers take 1e-08 for
// text.
std::string number_text(double value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  std::string text(buffer, result.ptr);
  const size_t exponent = text.find('e');
  if (text.find('.') == std::string::npos) text.insert(exponent == std::string::npos ? text.size() : exponent, ".0");
  return text;
}

struct Described {
  std::string type, value;
};

Described describe(int64_t value) {
  return {"integer", fmt::format("{}", value)};
}
Described describe(double value) {
  return {"number", number_text(value)};
}
Described describe(bool value) {
  return {"true | false", value ? "true" : "false"};
}
Described describe(const std::string& value) {
  return {"text", yaml_scalar(value)};
}
Described describe(const std::array<double, 2>& value) {
  return {"[number, number]", fmt::format("[{}, {}]", number_text(value[0]), number_text(value[1]))};
}
Described describe(const std::array<int64_t, 2>& value) {
  return {"[integer, integer]", fmt::format("[{}, {}]", value[0], value[1])};
}
Described describe(const std::vector<std::string>& value) {
  std::string text;
  for (const std::string& item : value) text += (text.empty() ? "" : ", ") + yaml_scalar(item);
  return {"list of text", "[" + text + "]"};
}
Described describe(const std::vector<int64_t>& value) {
  std::string text;
  for (const int64_t item : value) text += fmt::format("{}{}", text.empty() ? "" : ", ", item);
  return {"list of integers", "[" + text + "]"};
}
Described describe(const std::vector<DataSource>& value) {
  const std::string type = "path | list of {path, weight} | null";
  if (value.empty()) return {type, "null"};
  if (value.size() == 1 && value[0].weight == 1.0) return {type, yaml_scalar(value[0].path)};
  std::string text;
  for (const DataSource& source : value) {
    text += fmt::format("{}{{path: {}, weight: {}}}", text.empty() ? "" : ", ", yaml_scalar(source.path),
                        number_text(source.weight));
  }
  return {type, "[" + text + "]"};
}
Described describe(const std::vector<NamedPath>& value) {
  const std::string type = "path | {name: path, ...} | null";
  if (value.empty()) return {type, "null"};
  if (value.size() == 1 && value[0].name == kBareEvalName) return {type, yaml_scalar(value[0].path)};
  std::string text;
  for (const NamedPath& set : value) {
    text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", yaml_scalar(set.name), yaml_scalar(set.path));
  }
  return {type, "{" + text + "}"};
}
template <NamedEnum E>
Described describe(E value) {
  std::string type;
  for (const char* name : EnumNames<E>::values) type += (type.empty() ? "" : " | ") + std::string(name);
  return {type, EnumNames<E>::values[static_cast<size_t>(value)]};
}
template <class T>
Described describe(const std::optional<T>& value) {
  Described described = describe(value.value_or(T{}));
  described.type += " | null";
  if (!value) described.value = "null";
  return described;
}

struct Lister {
  std::string prefix;
  std::vector<ConfigField>& fields;

  template <class T>
  void operator()(const char* name, T& field, const char* help) {
    if constexpr (Section<T>) {
      fields.push_back({prefix + name, "", "", help, true});
      Lister inner{prefix + name + ".", fields};
      field.visit(inner);
    } else {
      Described described = describe(field);
      fields.push_back({prefix + name, std::move(described.type), std::move(described.value), help, false});
    }
  }
};

}  // namespace

std::vector<ConfigField> list_fields(const Config& config) {
  std::vector<ConfigField> fields;
  Lister lister{"", fields};
  Config copy = config;  // visit() hands out the fields to be changed
  copy.visit(lister);
  return fields;
}

}  // namespace palimpsest
