// Softmax attention by cuDNN: which documents of a batch it serves, and in which pieces; and keys before the queries.
//
// Documents of one length, a multiple of 128, are sequences as they lie. Others are copied into sequences of a power of
// two tokens, so that a batch of any documents needs few plans; short ones stay with the plain kernels. In backward a
// document whose dS would take too much memory is cut into pieces, each of which sees itself and then, one by one,
// those before it.
#pragma once

#include <vector>

#include "kernels/cuda/attention_slices.h"

namespace palimpsest::cuda {

struct FusedRule {
  int64_t shortest = 256;         // tokens of a document that is worth a sequence; at least 1
  int64_t longest_piece = 32768;  // tokens in backward, a power of two; less where dS would be too large
};

// Attention over documents of the same queries and keys: forward, which writes o and lse, where args.dq is absent.
class FusedDocuments {
 public:
  // Asks for plans unless the stream is planning.
  FusedDocuments(Stream& stream, const AttentionBackwardArgs& args, const Documents& documents,
                 const FusedRule& rule = {});

  // By document; those are left to others.
  const std::vector<bool>& taken() const { return taken_; }
  // Takes the workspace of every batch of as many tokens whose documents are no longer than those of this one.
  void run(Stream& stream) const;

 private:
  struct Piece {
    int64_t document, first_token, length;
  };
  // Pieces of one plan.
  struct Group {
    FusedShape shape;  // of a call
    std::vector<Piece> pieces;
  };
  // A piece's queries and the keys of one before it.
  struct Pair {
    Piece queries, keys;
  };

  std::vector<Piece> cut(const Documents& documents, const FusedRule& rule);
  AttentionBackwardArgs args_of(const Pair& pair) const;
  void run_slice(Stream& stream, const Group& group, int64_t first_piece, int64_t first_kv_head, Room room) const;

  AttentionBackwardArgs args_;
  std::vector<bool> taken_;
  std::vector<Group> groups_;
  std::vector<Pair> pairs_;
  int64_t room_bytes_ = 0;
};

// The same as attention_prefix_forward and, where args.dq is there, attention_prefix_backward.
class FusedPrefix {
 public:
  FusedPrefix(Stream& stream, const AttentionBackwardArgs& args, const FusedRule& rule = {});

  // Queries and keys that it takes at most; without a limit where the library cannot serve.
  static int64_t longest_piece(const AttentionBackwardArgs& args, const FusedRule& rule = {});
  // Backward that must be copied has one plan for each power of two: asks for those of all shorter queries and keys
  // too, so that plans, which take a while, are made together.
  static void make_plans(Stream& stream, const AttentionBackwardArgs& args);
  bool is_served() const { return is_served_; }
  // Nothing where it is not served, but for workspace while planning.
  void run(Stream& stream) const;

 private:
  struct Lengths {
    int64_t queries, keys;
  };
  // Of the sequences that so many are copied into. Backward skips what is behind their ends, and its plans are
  // compiled, so it has as many queries as keys; forward skips keys alone.
  static Lengths copied(int64_t num_queries, int64_t num_keys, bool is_backward);
  bool take_plan(Stream& stream, const Lengths& lengths, bool ends_early);  // whether there is one
  void run_slice(Stream& stream, int64_t first_kv_head, Room room) const;

  AttentionBackwardArgs args_;
  FusedShape shape_;
  bool is_served_ = false;
  int64_t room_bytes_ = 0;
};

// For take_last_path(): who attended to which documents.
void note_attention_path(const Stream& stream, const std::vector<bool>& taken);

}  // namespace palimpsest::cuda
