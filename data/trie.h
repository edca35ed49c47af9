// A set of byte strings with an id each, searched by exact text or for all members that a text begins with.
#pragma once

#include <cstdint>
#include <string_view>

#include "data/flat_map.h"

namespace palimpsest {

class Trie {
 public:
  static constexpr int32_t kNone = -1;

  // A later id takes the place of an earlier one; the empty text is no member.
  void add(std::string_view text, int32_t id) {
    Node* node = nullptr;
    uint32_t at = kRoot;
    for (const char c : text) {
      node = &children_[key(at, c)];
      if (node->index == kRoot) node->index = ++last_node_;
      at = node->index;
    }
    if (node != nullptr) node->id = id;
  }

  // Its id, or kNone.
  int32_t find(std::string_view text) const {
    const Node* node = nullptr;
    uint32_t at = kRoot;
    for (const char c : text) {
      node = children_.find(key(at, c));
      if (node == nullptr) return kNone;
      at = node->index;
    }
    return node == nullptr ? kNone : node->id;
  }

  // Calls visit(length, id) for each member that the text begins with, the shortest first.
  template <class Visit>
  void for_each_prefix(std::string_view text, Visit&& visit) const {
    uint32_t at = kRoot;
    for (size_t i = 0; i < text.size(); ++i) {
      const Node* node = children_.find(key(at, text[i]));
      if (node == nullptr) return;
      if (node->id != kNone) visit(i + 1, node->id);
      at = node->index;
    }
  }

 private:
  static constexpr uint32_t kRoot = 0;
  struct Node {
    uint32_t index = kRoot;  // the root: not made yet
    int32_t id = kNone;
  };
  static uint64_t key(uint32_t parent, char c) { return uint64_t{parent} << 8 | static_cast<uint8_t>(c); }

  FlatMap<Node> children_;
  uint32_t last_node_ = kRoot;
};

}  // namespace palimpsest
