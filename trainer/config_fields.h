// The fields of a Config as a flat list of texts, in the order of the structs' visit().
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "trainer/config.h"

namespace palimpsest {

struct ConfigField {
  std::string key;    // "model.kda.head_dim"
  std::string type;   // "integer or null"; empty for a section
  std::string value;  // as YAML; empty for a section
  std::string help;
  bool is_section = false;
};

// Every section, followed by its fields.
std::vector<ConfigField> list_fields(const Config& config);

// A struct that lists fields of its own.
struct AnyVisitor {
  template <class T>
  void operator()(const char*, T&, const char*) {}
};
template <class T>
concept Section = requires(T section, AnyVisitor visitor) {
  section.visit(visitor);
};

template <class T>
concept NamedEnum = std::is_enum_v<T> && requires {
  EnumNames<T>::values;
};

}  // namespace palimpsest
