// YAML tree -> Config. The reader visits the structs, so it knows no field by name.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

#include "trainer/config_fields.h"
#include "trainer/yaml_tree.h"

namespace palimpsest {

namespace {

// ---- suggestions ----

// Edits (insert, delete, replace, swap of neighbours) from a to b.
int64_t edit_distance(std::string_view a, std::string_view b) {
  constexpr size_t kLongest = 64;
  a = a.substr(0, kLongest);
  b = b.substr(0, kLongest);
  std::vector<int64_t> before(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) now[j] = std::min(now[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, now);
  }
  return last[b.size()];
}

// What other trainers call a field.
struct OtherName {
  std::string_view name, key;
};
constexpr OtherName kOtherNames[] = {
    {"learning_rate", "optimizer.lr"},
    {"max_grad_norm", "optimizer.grad_clip"},
    {"max_steps", "train.steps"},
    {"batch_size", "train.sequences_per_step"},
    {"global_batch_size", "train.sequences_per_step"},
    {"micro_batch_size", "train.micro_batch"},
    {"gradient_checkpointing", "train.activation_checkpointing"},
    {"max_seq_len", "data.sequence_length"},
    {"context_length", "data.sequence_length"},
    {"d_model", "model.hidden_size"},
    {"n_layers", "model.num_layers"},
    {"num_hidden_layers", "model.num_layers"},
    {"d_ff", "model.mlp.intermediate_size"},
    {"dtype", "precision"},
    {"output_dir", "run.dir"},
    {"save_every", "checkpoint.every"},
};

std::string join(std::string_view section, std::string_view name) {
  return section.empty() ? std::string(name) : fmt::format("{}.{}", section, name);
}

struct KeyParts {
  std::string_view section, name;
};
KeyParts split(std::string_view key) {
  const size_t dot = key.rfind('.');
  if (dot == std::string_view::npos) return {"", key};
  return {key.substr(0, dot), key.substr(dot + 1)};
}

// The known key nearest to `name` written in `section`. The right name in another section comes before a near one here.
std::string nearest_key(std::string_view section, std::string_view name, const std::vector<std::string>& siblings) {
  std::string best;
  int64_t best_score = INT64_MAX;
  const auto consider = [&](std::string key, int64_t score) {
    if (score >= best_score) return;
    best_score = score;
    best = std::move(key);
  };
  for (const std::string& sibling : siblings) consider(join(section, sibling), 2 * edit_distance(name, sibling));
  for (const ConfigField& field : list_fields(Config())) {
    const int64_t distance = edit_distance(name, split(field.key).name);
    consider(field.key, distance == 0 ? 1 : 2 * distance + 2);
  }
  for (const OtherName& other : kOtherNames) consider(std::string(other.key), 2 * edit_distance(name, other.name) + 1);
  return best;
}

// ---- values ----

std::string describe(const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::Kind::kNull:
      return "null";
    case YamlNode::Kind::kList:
      return "a list";
    case YamlNode::Kind::kMap:
      return "a map";
    case YamlNode::Kind::kScalar:
      break;
  }
  return quote(node.text);
}

template <class T>
bool parse_number(std::string_view text, T& value) {
  if (text.starts_with('+')) {
    text.remove_prefix(1);
    if (text.starts_with('-')) return false;
  }
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Reads the nodes of one source into fields, and notes where each came from.
class Reader {
 public:
  Reader(const YamlSource& source, std::map<std::string, std::string>& origins) : source_(source), origins_(origins) {}

  template <class T>
  void read(const YamlNode& node, const std::string& key, T& field) {
    if (!key.empty()) origins_[key] = source_.at(node.line, node.column);
    if constexpr (Section<T>) {
      read_section(node, key, field);
    } else {
      assign(node, key, field);
    }
  }

 private:
  [[noreturn]] void refuse(const YamlNode& node, const std::string& key, std::string_view wanted) const {
    throw_user_error(source_.at(node.line, node.column), ": ", key, " is ", describe(node), ", must be ", wanted);
  }

  // One visit of a struct's fields: takes each from the map, and remembers the names for the message on the others.
  struct SectionVisitor {
    Reader& reader;
    const YamlNode& node;
    const std::string& key;
    std::vector<std::string> names;

    template <class T>
    void operator()(const char* name, T& field, const char*) {
      names.emplace_back(name);
      for (size_t i = 0; i < node.children.size(); i += 2) {
        if (node.children[i].text == name) reader.read(node.children[i + 1], join(key, name), field);
      }
    }
  };

  template <Section T>
  void read_section(const YamlNode& node, const std::string& key, T& section) {
    if (node.kind == YamlNode::Kind::kNull) return;  // a heading with every line under it left out
    if (node.kind != YamlNode::Kind::kMap) {
      refuse(node, key.empty() ? "the config" : key, "a map of fields (key: value)");
    }
    SectionVisitor visitor{*this, node, key, {}};
    section.visit(visitor);
    for (size_t i = 0; i < node.children.size(); i += 2) {
      const YamlNode& name = node.children[i];
      if (std::find(visitor.names.begin(), visitor.names.end(), name.text) != visitor.names.end()) continue;
      throw_user_error(source_.at(name.line, name.column), ": unknown key ", quote(join(key, name.text)),
                       ", the nearest is ", nearest_key(key, name.text, visitor.names));
    }
  }

  bool is_plain(const YamlNode& node) const { return node.kind == YamlNode::Kind::kScalar && !node.quoted; }

  void assign(const YamlNode& node, const std::string& key, int64_t& field) const {
    // 1e9 is welcome where it is a whole number.
    constexpr double kLargestExact = 9007199254740992.0;  // 2^53
    double number = 0;
    if (is_plain(node) && parse_number(node.text, field)) return;
    if (!is_plain(node) || !parse_number(node.text, number) || !(std::abs(number) <= kLargestExact) ||
        number != std::floor(number)) {
      refuse(node, key, "a whole number");
    }
    field = static_cast<int64_t>(number);
  }
  void assign(const YamlNode& node, const std::string& key, double& field) const {
    if (!is_plain(node) || !parse_number(node.text, field) || !std::isfinite(field)) refuse(node, key, "a number");
  }
  void assign(const YamlNode& node, const std::string& key, bool& field) const {
    if (!is_plain(node) || (node.text != "true" && node.text != "false")) refuse(node, key, "true or false");
    field = node.text == "true";
  }
  void assign(const YamlNode& node, const std::string& key, std::string& field) const {
    if (node.kind != YamlNode::Kind::kScalar || node.text.find('\0') != std::string::npos) refuse(node, key, "text");
    field = node.text;
  }
  template <NamedEnum E>
  void assign(const YamlNode& node, const std::string& key, E& field) const {
    std::string names;
    size_t index = 0;
    for (const char* name : EnumNames<E>::values) {
      if (node.kind == YamlNode::Kind::kScalar && node.text == name) {
        field = static_cast<E>(index);
        return;
      }
      ++index;
      names += (names.empty() ? "" : ", ") + std::string(name);
    }
    refuse(node, key, "one of " + names);
  }
  template <class T>
  void assign(const YamlNode& node, const std::string& key, std::optional<T>& field) const {
    if (node.kind == YamlNode::Kind::kNull) {
      field.reset();
    } else {
      assign(node, key, field.emplace());
    }
  }
  template <class T>
  void assign(const YamlNode& node, const std::string& key, std::array<T, 2>& field) const {
    if (node.kind != YamlNode::Kind::kList) refuse(node, key, "a list of two numbers");
    if (node.children.size() != 2)
      throw_user_error(source_.at(node.line, node.column), ": ", key, " has ", node.children.size(),
                       " entries, must be a list of two numbers");
    for (size_t i = 0; i < 2; ++i) assign(node.children[i], fmt::format("{}[{}]", key, i), field[i]);
  }
  template <class T>
  void assign_list(const YamlNode& node, const std::string& key, std::vector<T>& field, const char* wanted) const {
    if (node.kind != YamlNode::Kind::kList) refuse(node, key, wanted);
    field.clear();
    for (const YamlNode& item : node.children) {
      const std::string item_key = fmt::format("{}[{}]", key, field.size());
      assign(item, item_key, field.emplace_back());
    }
  }
  void assign(const YamlNode& node, const std::string& key, std::vector<std::string>& field) const {
    assign_list(node, key, field, "a list, such as [a, b]");
  }
  void assign(const YamlNode& node, const std::string& key, std::vector<int64_t>& field) const {
    assign_list(node, key, field, "a list, such as [0, 1]");
  }
  void assign(const YamlNode& node, const std::string& key, std::vector<DataSource>& field) {
    field.clear();
    if (node.kind == YamlNode::Kind::kNull) return;
    if (node.kind == YamlNode::Kind::kMap) refuse(node, key, "a path, or a list of {path, weight}");
    if (node.kind == YamlNode::Kind::kScalar) {
      assign(node, key, field.emplace_back().path);
      return;
    }
    for (const YamlNode& item : node.children) {
      const std::string item_key = fmt::format("{}[{}]", key, field.size());
      if (item.kind == YamlNode::Kind::kScalar) {
        assign(item, item_key, field.emplace_back().path);
      } else {
        read(item, item_key, field.emplace_back());
      }
    }
  }
  void assign(const YamlNode& node, const std::string& key, std::vector<NamedPath>& field) {
    field.clear();
    if (node.kind == YamlNode::Kind::kNull) return;
    if (node.kind == YamlNode::Kind::kList) refuse(node, key, "a path, or a map of name: path");
    if (node.kind == YamlNode::Kind::kScalar) {
      field.push_back({std::string(kBareEvalName), ""});
      assign(node, key, field.back().path);
      return;
    }
    for (size_t i = 0; i < node.children.size(); i += 2) {
      field.push_back({node.children[i].text, ""});
      read(node.children[i + 1], join(key, quote(field.back().name)), field.back().path);
    }
  }

  const YamlSource& source_;
  std::map<std::string, std::string>& origins_;
};

// ---- overrides ----

// "a.b=value" as the tree {a: {b: value}}.
YamlNode parse_override(const std::string& text, const YamlSource& source) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) throw_user_error(source.name, ": must have the form key=value");
  YamlNode node = parse_yaml(std::string_view(text).substr(equals + 1), source);
  if (node.kind == YamlNode::Kind::kNull && text.find_first_not_of(' ', equals + 1) == text.npos) {
    throw_user_error(source.name, ": has no value; null stands for none");
  }
  std::string_view key = std::string_view(text).substr(0, equals);
  const bool names_a_field = !key.empty() && !key.starts_with('.') && !key.ends_with('.') &&
                             key.find("..") == key.npos && std::count(key.begin(), key.end(), '.') < kMaxYamlDepth;
  if (!names_a_field) throw_user_error(source.name, ": the key must name a field, such as train.steps");
  while (!key.empty()) {
    const KeyParts parts = split(key);
    YamlNode name;
    name.kind = YamlNode::Kind::kScalar;
    name.text = parts.name;
    YamlNode map;
    map.kind = YamlNode::Kind::kMap;
    map.children = {std::move(name), std::move(node)};
    node = std::move(map);
    key = parts.section;
  }
  return node;
}

// A message of validate() begins with the key it is about: puts before it where that key, or the section it is missing
// in, came from.
std::string locate(const std::string& message, const std::map<std::string, std::string>& origins,
                   const std::string& name) {
  std::string_view key = std::string_view(message).substr(0, message.find_first_of(" :,"));
  while (!key.empty()) {
    const auto found = origins.find(std::string(key));
    if (found != origins.end()) return found->second + ": " + message;
    const size_t end = key.find_last_of(".[");
    key = key.substr(0, end == std::string_view::npos ? 0 : end);
  }
  return name + ": " + message;
}

std::string read_file(const std::string& path) {
  const auto fail = [&] { throw_user_error(path, ": the config cannot be read: ", std::strerror(errno)); };
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) fail();
  // One byte more than allowed is enough for parse_yaml to refuse a file of any length.
  std::string text(kMaxYamlBytes + 1, '\0');
  const size_t size = std::fread(text.data(), 1, text.size(), file.get());
  if (std::ferror(file.get()) != 0) fail();
  text.resize(size);
  return text;
}

}  // namespace

Config parse_config(std::string_view text, const std::string& name, const std::vector<std::string>& overrides) {
  Config config;
  std::map<std::string, std::string> origins;
  const YamlSource file{name, true};
  Reader(file, origins).read(parse_yaml(text, file), "", config);
  for (const std::string& override_text : overrides) {
    const YamlSource source{"override " + quote(override_text), false};
    Reader(source, origins).read(parse_override(override_text, source), "", config);
  }
  if (config.run.dir == "auto") config.run.dir = "runs/" + std::filesystem::path(name).stem().string();
  try {
    validate(config);
  } catch (const UserError& error) {
    throw UserError(locate(error.what(), origins, name));
  }
  return config;
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  return parse_config(read_file(path), path, overrides);
}

}  // namespace palimpsest
