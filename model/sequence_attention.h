// What attention layers exchange over the sequence axis: rows of keys and values, or of what they are made from. Every
// sequence rank makes the same calls, whatever its documents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "model/layer.h"

namespace palimpsest {

// Tokens of an earlier range that are attended to at once: on a GPU many, since o is rounded to bf16 after each block.
inline int64_t prefix_block(Device device) {
  return device == Device::kCuda ? 4096 : 256;
}

// Rows of all sequence ranks: `parts`, each [N, c] of the rank's tokens, lie side by side as columns of [S *
// max_tokens, sum of c], in scratch memory; rank r's rows begin at r * max_tokens.
Tensor gather_rows(Context& context, const Sequence& sequence, std::initializer_list<Tensor> parts);
// Room for the gradient of what gather_rows gave, zero.
Tensor allocate_row_gradients(Context& context, const Tensor& gathered);
// The adjoint of gather_rows: the sum over the ranks, [N, sum of c] of this rank's tokens, in scratch memory.
Tensor scatter_row_gradients(Context& context, const Sequence& sequence, const Tensor& d_gathered);

// Calls visit(first, length, row, count) for blocks of keys that are earlier than all queries that see them: the
// queries are the rank's tokens [first, first + length), the keys the gathered rows [row, row + count).
template <class Visit>
void for_each_prefix_block(const Context& context, const Sequence& sequence, Visit visit) {
  const int64_t block = prefix_block(context.stream.device());
  for (const Crossing& crossing : sequence.crossings.entering)
    for (const DocumentPiece& piece : crossing.others)
      for (int64_t begin = 0; begin < piece.length; begin += block)
        visit(crossing.own.first, crossing.own.length, piece.rank * sequence.crossings.max_tokens + piece.first + begin,
              std::min(block, piece.length - begin));
}

}  // namespace palimpsest
