// A hash map from 64-bit keys to small values that is filled first and then only read: open addressing, no deletion.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace palimpsest {

template <class Value>
class FlatMap {
 public:
  // The value of the key, made when it is new. The key may not have all bits set.
  Value& operator[](uint64_t key) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[position(key)];
    if (slot.key == kFree) {
      slot.key = key;
      ++size_;
    }
    return slot.value;
  }
  const Value* find(uint64_t key) const {  // null when there is none
    const Slot& slot = slots_[position(key)];
    return slot.key == key ? &slot.value : nullptr;
  }

 private:
  static constexpr uint64_t kFree = ~uint64_t{0};
  struct Slot {
    uint64_t key = kFree;
    Value value = {};
  };

  // Where the key is, or belongs.
  size_t position(uint64_t key) const {
    uint64_t hash = key * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
    size_t at = hash & (slots_.size() - 1);
    while (slots_[at].key != key && slots_[at].key != kFree) at = (at + 1) & (slots_.size() - 1);
    return at;
  }
  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.key != kFree) slots_[position(slot.key)] = slot;
  }

  std::vector<Slot> slots_ = std::vector<Slot>(16);  // a power of two
  size_t size_ = 0;
};

}  // namespace palimpsest
