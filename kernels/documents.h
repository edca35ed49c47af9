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

  // The same documents, which begin and end with states that lie in tensors of `num_states` rows: document i begins
  // with row entering[i] of an op's initial states and leaves its final one in row leaving[i]. -1: it begins with zero,
  // its final state is not wanted. Without this there is a row for every document, in their order.
  Documents with_states(int64_t num_states, std::vector<int64_t> entering, std::vector<int64_t> leaving) const;

  int64_t count() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t num_tokens() const { return offsets_.back(); }
  int64_t begin(int64_t document) const { return offsets_[document]; }
  int64_t end(int64_t document) const { return offsets_[document + 1]; }
  int64_t length(int64_t document) const { return end(document) - begin(document); }
  const std::vector<int64_t>& offsets() const { return offsets_; }  // cu_seqlens, [count + 1]

  // Rows of tensors of states, see with_states().
  int64_t num_states() const { return own_states_ ? num_states_ : count(); }
  int64_t entering(int64_t document) const { return own_states_ ? entering_[document] : document; }
  int64_t leaving(int64_t document) const { return own_states_ ? leaving_[document] : document; }

 private:
  std::vector<int64_t> offsets_;
  bool own_states_ = false;
  int64_t num_states_ = 0;
  std::vector<int64_t> entering_, leaving_;
};

}  // namespace palimpsest
