// Documents: how a flat list of N tokens splits into documents. Every op over time takes one: a batch [B, T] is always
// passed as N = B*T tokens, and a row border is a document border like any other.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/check.h"

namespace palimpsest {

class Documents {
 public:
  // offsets = 0 = o[0] <= o[1] <= ... <= o[num] = N; document i owns the tokens o[i] .. o[i+1]-1. Empty documents are
  // legal and own no token. Throws an Error when the offsets do not start at 0 or decrease.
  explicit Documents(std::vector<int64_t> offsets);

  // One document of N tokens.
  static Documents single(int64_t num_tokens) { return Documents({0, num_tokens}); }
  // B rows of T tokens, each one document.
  static Documents rows(int64_t num_rows, int64_t row_length);

  int64_t count() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t num_tokens() const { return offsets_.back(); }
  int64_t begin(int64_t document) const { return offsets_[document]; }
  int64_t end(int64_t document) const { return offsets_[document + 1]; }
  int64_t length(int64_t document) const { return end(document) - begin(document); }
  const std::vector<int64_t>& offsets() const { return offsets_; }  // cu_seqlens, [count + 1]

 private:
  std::vector<int64_t> offsets_;
};

}  // namespace palimpsest
