// Arena: one block of memory handed out as a stack. A run owns one arena for each region of memory (parameters,
// gradients, optimizer, activations, scratch), sized before step 1.
//
// The size comes from a rehearsal: a *planning* arena owns nothing and only counts, with addresses that nobody may
// read. The same model code runs once on planning arenas (ops check their shapes and stop there, see stream.h); the
// peak is then what the real arena needs, to the byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/tensor.h"

namespace palimpsest {

class Arena {
 public:
  static constexpr int64_t kAlignment = 256;  // bytes

  static Arena planning(std::string name, Device device);          // counts; reading its tensors is a fault
  Arena(std::string name, Device device, int64_t capacity_bytes);  // owns capacity_bytes, uninitialised
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&&) = delete;
  Arena(const Arena&) = delete;

  // Next tensor of the stack, aligned to 256 bytes, uninitialised. Throws an Error that names the region, the
  // requested and the free bytes when it is full.
  Tensor allocate(DType dtype, Shape shape);

  int64_t mark() const { return used_; }  // position of the stack, for release()
  void release(int64_t mark);             // gives back everything allocated since mark
  int64_t used() const { return used_; }  // bytes
  int64_t peak() const { return peak_; }  // bytes, the highest use so far
  int64_t capacity() const { return capacity_; }
  bool is_planning() const { return planning_; }
  const std::string& name() const { return name_; }

  // Gives back at the end of a C++ scope what was allocated in it.
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
    ~Scope() { arena_.used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    int64_t mark_;
  };

 private:
  Arena(std::string name, Device device);

  std::string name_;
  Device device_;
  std::byte* base_ = nullptr;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
  int64_t peak_ = 0;
  bool planning_ = false;
};

}  // namespace palimpsest
