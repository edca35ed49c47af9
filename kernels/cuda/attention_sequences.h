// Rows of tokens to and from sequences of equal length, as cuDNN's attention takes them.
#pragma once

#include <cstdint>

#include "kernels/linear.h"

namespace palimpsest::cuda {

constexpr int kMaxSequences = 128;  // of a call

struct SequenceCopy {
  // Some heads of an operand.
  struct Piece {
    BF16* rows = nullptr;       // of token 0, at the first of these heads
    int64_t stride = 0;         // elements from a token to the next
    BF16* sequences = nullptr;  // [B, S, columns]
    int columns = 0;
  };
  static constexpr int kMaxPieces = 5;

  Piece pieces[kMaxPieces];
  int num_pieces = 0;
  // The log-sum-exp of heads first_head and on: [N, num_heads] and [B, heads, S]. Null: not copied.
  float* lse = nullptr;
  float* sequence_lse = nullptr;
  int num_heads = 0, first_head = 0, heads = 0;
  int64_t B = 0, S = 0;
  int32_t* lengths = nullptr;  // [B], becomes what `length` says; null: not wanted
  int64_t first_token[kMaxSequences] = {};
  int32_t length[kMaxSequences] = {};
  bool wide = false;  // all pieces can be moved in packs of 16 bytes

  // Some heads of a tensor [N, heads, size] and their place in sequences, which it returns.
  BF16* add(const Tensor& tensor, int64_t first_head_of_piece, int64_t num_heads_of_piece, BF16* to);
};

constexpr int64_t kSequenceTile = 128;  // S is a multiple of it
// Whether heads of this tensor can be moved in packs of 16 bytes.
bool starts_on_packs(const Tensor& tensor);

// Behind the end of a sequence are zeros, as far as a kernel may read.
void copy_to_sequences(const Stream& stream, const SequenceCopy& copy);
void copy_from_sequences(const Stream& stream, const SequenceCopy& copy, Write write);
// The output of attention to some keys, the one piece of `copy`, and its lse into those of others.
void merge_sequences(const Stream& stream, const SequenceCopy& copy);

}  // namespace palimpsest::cuda
