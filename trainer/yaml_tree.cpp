#include "trainer/yaml_tree.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <istream>
#include <sstream>
#include <utility>

#include "kernels/check.h"

namespace palimpsest {

namespace {

// Length in bytes of the UTF-8 character at text[i], 0 when there is none: no overlong forms, surrogates or values
// above U+10FFFF.
size_t utf8_length(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) -> unsigned { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0; };
  const auto tail = [&](size_t k) { return (byte(k) & 0xC0u) == 0x80u; };
  const unsigned first = byte(i);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return tail(i + 1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    const unsigned low = first == 0xE0 ? 0xA0 : 0x80;
    const unsigned high = first == 0xED ? 0x9F : 0xBF;
    return byte(i + 1) >= low && byte(i + 1) <= high && tail(i + 2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const unsigned low = first == 0xF0 ? 0x90 : 0x80;
    const unsigned high = first == 0xF4 ? 0x8F : 0xBF;
    return byte(i + 1) >= low && byte(i + 1) <= high && tail(i + 2) && tail(i + 3) ? 4 : 0;
  }
  return 0;
}

bool is_control(char c) {
  return static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
}

void check_characters(std::string_view text, const YamlSource& source) {
  int line = 1, column = 1;
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    if (length == 0) throw_user_error(source.at(line, column), ": not UTF-8 text");
    const char c = text[i];
    if (is_control(c) && c != '\n' && c != '\r' && c != '\t') {
      throw_user_error(source.at(line, column), ": control character ", fmt::format("0x{:02x}", c),
                       ", a config holds text alone");
    }
    if (c == '\n') {
      ++line;
      column = 1;
    } else {
      ++column;
    }
    i += length;
  }
}

// Builds the tree from the parser's events. The library's own node type is not used: it drops positions of keys, lets
// duplicate keys pass and expands aliases.
class TreeBuilder final : public YAML::EventHandler {
 public:
  explicit TreeBuilder(const YamlSource& source) : source_(source) {}
  YamlNode take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    check_plain(mark, "", anchor);
    add(make(YamlNode::Kind::kNull, mark));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { refuse_anchor(mark); }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    check_plain(mark, tag, anchor);
    YamlNode node = make(YamlNode::Kind::kScalar, mark);
    node.quoted = tag == "!";
    node.text = value;
    add(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(YamlNode::Kind::kList, mark, tag, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(YamlNode::Kind::kMap, mark, tag, anchor);
  }
  void OnMapEnd() override {
    check_keys(open_.back());
    close();
  }

 private:
  static YamlNode make(YamlNode::Kind kind, const YAML::Mark& mark) {
    YamlNode node;
    node.kind = kind;
    node.line = std::max(mark.line, 0) + 1;
    node.column = std::max(mark.column, 0) + 1;
    return node;
  }
  std::string at(const YAML::Mark& mark) const { return source_.at(mark.line + 1, mark.column + 1); }
  [[noreturn]] void refuse_anchor(const YAML::Mark& mark) const {
    throw_user_error(at(mark), ": anchors (&name) and aliases (*name) are not used in configs; write the value out");
  }
  // The library gives the tag "?" to plain scalars and "!" to quoted ones.
  void check_plain(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) const {
    if (anchor != 0) refuse_anchor(mark);
    if (!tag.empty() && tag != "?" && tag != "!") {
      throw_user_error(at(mark), ": tags (!name) are not used in configs; write the value alone");
    }
  }
  void open(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    check_plain(mark, tag, anchor);
    if (static_cast<int>(open_.size()) == kMaxYamlDepth) {
      throw_user_error(at(mark), ": nested more than ", kMaxYamlDepth, " deep, which no config is");
    }
    open_.push_back(make(kind, mark));
  }
  void close() {
    YamlNode node = std::move(open_.back());
    open_.pop_back();
    add(std::move(node));
  }
  void add(YamlNode node) {
    if (open_.empty()) {
      root_ = std::move(node);
    } else {
      open_.back().children.push_back(std::move(node));
    }
  }
  void check_keys(const YamlNode& map) const {
    std::vector<const YamlNode*> keys;
    for (size_t i = 0; i < map.children.size(); i += 2) {
      const YamlNode& key = map.children[i];
      if (key.kind != YamlNode::Kind::kScalar) {
        throw_user_error(source_.at(key.line, key.column), ": a key must be a name");
      }
      keys.push_back(&key);
    }
    std::stable_sort(keys.begin(), keys.end(), [](const YamlNode* a, const YamlNode* b) { return a->text < b->text; });
    for (size_t i = 1; i < keys.size(); ++i) {
      const YamlNode& key = *keys[i];
      if (key.text != keys[i - 1]->text) continue;
      throw_user_error(source_.at(key.line, key.column), ": duplicate key ", quote(key.text), ", first given at line ",
                       keys[i - 1]->line);
    }
  }

  const YamlSource& source_;
  YamlNode root_;
  std::vector<YamlNode> open_;  // lists and maps that have begun, outermost first
};

// Whether some YAML reader takes the plain text for null, a truth value or a number.
bool looks_like_another_type(std::string_view text) {
  static constexpr std::string_view kWords[] = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"};
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  if (std::find(std::begin(kWords), std::end(kWords), lower) != std::end(kWords)) return true;
  const char first = text.front();
  if (first == '.') return text.size() > 1 && text[1] != '/' && text[1] != '.';
  return first == '-' || (first >= '0' && first <= '9');
}

}  // namespace

std::string YamlSource::at(int line, int column) const {
  return has_positions ? fmt::format("{}:{}:{}", name, line, column) : name;
}

YamlNode parse_yaml(std::string_view text, const YamlSource& source) {
  if (text.size() > kMaxYamlBytes) {
    throw_user_error(source.name, ": longer than ", kMaxYamlBytes / 1024, " KiB, which no config is");
  }
  check_characters(text, source);
  std::istringstream stream{std::string(text)};
  TreeBuilder builder(source);
  try {
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) return {};
    YamlNode root = builder.take();
    if (parser.HandleNextDocument(builder)) {
      const YamlNode second = builder.take();
      throw_user_error(source.at(second.line, second.column), ": a second document begins; a config is one");
    }
    return root;
  } catch (const YAML::Exception& error) {
    throw_user_error(source.at(std::max(error.mark.line, 0) + 1, std::max(error.mark.column, 0) + 1),
                     ": malformed YAML: ", error.msg);
  }
}

std::string quote(std::string_view text) {
  constexpr size_t kLongest = 80;
  std::string result = "'";
  for (size_t i = 0; i < text.size();) {
    if (result.size() > kLongest) {
      result += "...";
      break;
    }
    const size_t length = utf8_length(text, i);
    if (length == 0 || is_control(text[i])) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
      ++i;
    } else {
      result += text.substr(i, length);
      i += length;
    }
  }
  return result + "'";
}

std::string yaml_scalar(std::string_view text) {
  const auto is_safe = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '/' || c == '-';
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), is_safe) && !looks_like_another_type(text)) {
    return std::string(text);
  }
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (is_control(c)) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      result += c;
    }
  }
  return result + "\"";
}

}  // namespace palimpsest
