// Which documents of a batch go to cuDNN's fused attention, and in which pieces.
//
// Documents of one length, a multiple of 128, are sequences as they lie. Others are copied into sequences of a power of
// two tokens, zero behind their ends, so that a batch of any documents needs few plans; short ones stay with the plain
// kernels. In a fixed order of sums the library keeps every dS of backward in memory, so it gets as many sequences and
// heads at once as stay within kScoreBytes.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/attention_cudnn.h"

namespace palimpsest::cuda {

struct FusedRule {
  int64_t shortest = 256;  // tokens of a document that is worth a sequence; at least 1
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

  struct Sequence {
    int64_t first_token, length;
  };
  // Sequences of one plan.
  struct Group {
    FusedShape shape;  // of a call
    std::vector<Sequence> sequences;
  };

 private:
  void run_slice(Stream& stream, const Group& group, int64_t first_sequence, int64_t first_kv_head,
                 std::byte* room) const;

  AttentionBackwardArgs args_;
  std::vector<bool> taken_;
  std::vector<Group> groups_;
  int64_t room_bytes_ = 0;
};

// For take_last_path(): who attended to which documents.
void note_attention_path(const Stream& stream, const std::vector<bool>& taken);

}  // namespace palimpsest::cuda
