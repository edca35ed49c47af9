// How the rows of a batch are cut over the sequence ranks. Every row is cut at the same borders into ranges, one a rank
// (contiguous: rank r has range r) or two (zig-zag: ranges r and 2S-1-r of 2S, so that causal attention costs every
// rank the same). Documents may cross borders. The documents of whole rows are known to every rank, so each knows what
// all others hold, and nothing but values is ever exchanged.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/documents.h"

namespace palimpsest {

enum class SequenceLayout : uint8_t { kContiguous, kZigzag };

// The part of a document that lies in one range: a run of the local tokens of the rank that owns the range.
struct DocumentPiece {
  int64_t rank = 0;
  int64_t slot = 0;   // of the range among its rank's: row * ranges of a rank in a row + 0 or 1
  int64_t first = 0;  // among the rank's tokens
  int64_t length = 0;
};

// One end of a local document at which the document it is part of goes on elsewhere.
struct Crossing {
  int64_t document = 0;  // local
  DocumentPiece own;
  std::vector<DocumentPiece> others;  // the pieces on that side, in the order of the tokens
};

// A piece on another rank with the queries that see all of it: tokens of this rank. They are one run, since a document
// that enters both ranges of a zig-zag fills the first.
struct SeenPiece {
  DocumentPiece piece;
  int64_t first_query = 0;
  int64_t num_queries = 0;
};

// What lies beyond the borders of one rank's ranges. At most the first document of a range has begun earlier, and at
// most the last goes on, so a range's slot is the row of both in tensors of states.
struct Crossings {
  int64_t num_ranks = 1;
  int64_t num_slots = 0;           // of every rank; 0: the rows are not cut
  std::vector<Crossing> entering;  // documents that began in an earlier range, with their earlier pieces
  std::vector<Crossing> leaving;   // documents that go on in a later range, with their later pieces

  bool cut() const { return num_ranks > 1; }
  int64_t slot_of_all(const DocumentPiece& piece) const { return piece.rank * num_slots + piece.slot; }
  // For every rank: its pieces that this rank's tokens see, and this rank's that its tokens see; each once, in the
  // order of the tokens of whose they are. What one rank sees of another is what the other shows it.
  std::vector<std::vector<SeenPiece>> seen_on;
  std::vector<std::vector<DocumentPiece>> shown_to;
};

class SequenceCut {
 public:
  // borders 0 = b[0] <= .. <= b[ranges] = row length; ranges may be empty. Zig-zag needs an even number of them.
  SequenceCut(int64_t num_rows, std::vector<int64_t> borders, SequenceLayout layout);
  // Ranges of equal length, the first ones a token longer where the length does not divide.
  static SequenceCut even(int64_t num_rows, int64_t row_length, int64_t num_ranks, SequenceLayout layout);

  int64_t num_ranks() const { return num_ranks_; }
  int64_t num_tokens(int64_t rank) const;
  int64_t max_tokens() const;
  // The places of a rank's tokens among those of the batch, ascending.
  std::vector<int64_t> tokens_of(int64_t rank) const;

  // One rank's part of documents over the whole batch, of which every row starts one. The local documents' states lie
  // in the slots of their ranges (Documents::entering() and leaving()).
  struct Part {
    Documents documents;
    Crossings crossings;
  };
  Part part_of(int64_t rank, const Documents& whole) const;

 private:
  int64_t owner(int64_t range) const;
  int64_t ranges_of_rank() const { return layout_ == SequenceLayout::kZigzag ? 2 : 1; }
  int64_t length_of_range(int64_t range) const { return borders_[range + 1] - borders_[range]; }
  int64_t tokens_of_row(int64_t rank) const;
  // The pieces of the document of the tokens [first, last) of the batch, in order.
  std::vector<DocumentPiece> pieces_of(int64_t first, int64_t last) const;
  // The tokens [begin, end) of a row, which lie in `range`.
  DocumentPiece piece(int64_t row, int64_t range, int64_t begin, int64_t end) const;

  int64_t num_rows_;
  std::vector<int64_t> borders_;
  SequenceLayout layout_;
  int64_t num_ranks_;
};

}  // namespace palimpsest
