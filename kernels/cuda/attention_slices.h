// What the users of cuDNN's attention share: sizes of a problem, how much of it goes into a call, and the room of one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "kernels/attention.h"
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_sequences.h"

namespace palimpsest::cuda {

// In a fixed order of sums the library keeps every dS of backward in memory: so many bytes a call may have of it.
constexpr int64_t kScoreBytes = int64_t{2} << 30;
constexpr int64_t kSlackBytes = int64_t{4} << 20;  // what plans take beside the tensors counted here
constexpr int64_t kRoomAlignment = 256;            // bytes

inline int64_t align_room(int64_t bytes) {
  return (bytes + kRoomAlignment - 1) / kRoomAlignment * kRoomAlignment;
}

// Forward where args.dq is absent.
struct FusedSizes {
  explicit FusedSizes(const AttentionBackwardArgs& args)
      : N(args.q.dim(0)),
        H(args.q.dim(1)),
        HKV(args.k.dim(1)),
        K(args.q.dim(2)),
        V(args.v.dim(2)),
        is_backward(args.dq.defined()) {}

  int64_t group() const { return H / HKV; }
  int64_t row() const { return K + V; }                                                  // elements of a token and head
  int64_t copied(int64_t heads) const { return (is_backward ? 4 : 2) * heads * row(); }  // bytes of a token
  // Bytes of dS of queries and keys, for all heads that share a key head.
  int64_t scores(int64_t queries, int64_t keys) const { return is_backward ? 2 * group() * queries * keys : 0; }
  // Queries and keys of a call at most, a power of two, as the tokens of copied sequences are.
  int64_t longest_piece(int64_t most) const {
    if (!is_backward) return std::numeric_limits<int64_t>::max();
    while (most > kSequenceTile && scores(most, most) > kScoreBytes) most /= 2;
    return most;
  }
  // What a plan needs for at most these tokens and bytes of dS.
  int64_t workspace(int64_t queries, int64_t keys, int64_t score_bytes) const {
    if (!is_backward) return kSlackBytes;
    const int64_t of_query_heads = group() == 1 ? 0 : 2 * keys * H * row();  // dk and dv
    return score_bytes + align_room(4 * queries * H) + align_room(of_query_heads) + kSlackBytes;
  }

  int64_t N, H, HKV, K, V;
  bool is_backward;
};

inline int64_t largest_divisor(int64_t number, int64_t limit) {
  for (int64_t d = std::min(number, limit); d > 1; --d)
    if (number % d == 0) return d;
  return 1;
}

// Whether the library can take operands of this type and these sizes.
bool may_be_fused(const AttentionBackwardArgs& args);
// Whether all operands are rows of packs of 16 bytes.
bool all_start_on_packs(const AttentionBackwardArgs& args);
// These queries and keys alone; backward.
AttentionBackwardArgs rows_of(const AttentionBackwardArgs& args, int64_t first_query, int64_t num_queries,
                              int64_t first_key, int64_t num_keys);
// Elements from a token to the next, of operands as they lie and of copies.
void set_rows_in_place(FusedShape& shape, const AttentionBackwardArgs& args);
void set_rows_of_copies(FusedShape& shape);
// Tokens of a sequence that is copied, for as many in a document: a power of two, so that few plans are needed.
int64_t copied_length(int64_t length);

// Hands out parts of a block of scratch memory, within what was planned.
class Room {
 public:
  Room(std::byte* begin, int64_t bytes) : begin_(begin), bytes_(bytes) {}
  template <class T>
  T* take(int64_t count) {
    std::byte* at = begin_ + used_;
    used_ += align_room(count * static_cast<int64_t>(sizeof(T)));
    CHECK(used_ <= bytes_, "cuDNN's attention needs ", used_, " bytes, planned were ", bytes_);
    return reinterpret_cast<T*>(at);
  }

 private:
  std::byte* begin_;
  int64_t bytes_, used_ = 0;
};

}  // namespace palimpsest::cuda
