// YAML text as a small tree with positions. Only yaml_tree.cpp knows the YAML library; its text may be hostile.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace palimpsest {

// Where a text comes from, for messages.
struct YamlSource {
  std::string name;                            // a file's path, or "override 'a=b'"
  bool has_positions = true;                   // whether "line:column" says anything to the reader of a message
  std::string at(int line, int column) const;  // "name:line:column", or the name alone
};

struct YamlNode {
  enum class Kind : uint8_t { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  bool quoted = false;             // a scalar in quotes or a block: text, whatever it looks like
  std::string text;                // of a scalar
  int line = 1, column = 1;        // of its first character, counted from 1
  std::vector<YamlNode> children;  // items of a list; key, value, key, value ... of a map
};

// The one document of the text; null when it is empty. Every key of a map is a scalar and stands once. Throws a
// UserError of one line, which begins with the position, on text that is not UTF-8, is longer than kMaxYamlBytes or
// nested deeper than kMaxYamlDepth, on malformed YAML, and on anchors, aliases and tags, which configs have no use for.
YamlNode parse_yaml(std::string_view text, const YamlSource& source);
constexpr size_t kMaxYamlBytes = 256 * 1024;
constexpr int kMaxYamlDepth = 32;

// The text between single quotes, fit for one line of a message: control characters escaped, long text shortened.
std::string quote(std::string_view text);

// The scalar that a YAML reader reads back as this text; quoted where it would be read as something else.
std::string yaml_scalar(std::string_view text);

}  // namespace palimpsest
