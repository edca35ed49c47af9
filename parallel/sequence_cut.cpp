#include "parallel/sequence_cut.h"

#include <algorithm>
#include <utility>

namespace palimpsest {

namespace {

// Fills seen_on and shown_to.
void find_seen_pieces(Crossings& crossings) {
  crossings.seen_on.resize(static_cast<size_t>(crossings.num_ranks));
  crossings.shown_to.resize(static_cast<size_t>(crossings.num_ranks));
  for (const Crossing& crossing : crossings.entering)
    for (const DocumentPiece& piece : crossing.others) {
      std::vector<SeenPiece>& seen = crossings.seen_on[piece.rank];
      const auto before =
          std::find_if(seen.begin(), seen.end(), [&](const SeenPiece& it) { return it.piece.first == piece.first; });
      if (before == seen.end()) {
        seen.push_back({piece, crossing.own.first, crossing.own.length});
        continue;
      }
      CHECK(before->first_query + before->num_queries == crossing.own.first, "the queries of a piece leave a gap");
      before->num_queries += crossing.own.length;
    }
  for (std::vector<SeenPiece>& seen : crossings.seen_on)
    std::sort(seen.begin(), seen.end(),
              [](const SeenPiece& a, const SeenPiece& b) { return a.piece.first < b.piece.first; });
  for (const Crossing& crossing : crossings.leaving)
    for (const DocumentPiece& piece : crossing.others) {
      std::vector<DocumentPiece>& shown = crossings.shown_to[piece.rank];
      if (shown.empty() || shown.back().first != crossing.own.first) shown.push_back(crossing.own);
    }
}

}  // namespace

SequenceCut::SequenceCut(int64_t num_rows, std::vector<int64_t> borders, SequenceLayout layout)
    : num_rows_(num_rows), borders_(std::move(borders)), layout_(layout) {
  const auto ranges = static_cast<int64_t>(borders_.size()) - 1;
  CHECK(ranges >= 1 && ranges % ranges_of_rank() == 0, ranges, " ranges are no number of ", ranges_of_rank(),
        " a rank");
  CHECK(borders_.front() == 0 && std::is_sorted(borders_.begin(), borders_.end()), "the borders of ranges decrease");
  num_ranks_ = ranges / ranges_of_rank();
}

SequenceCut SequenceCut::even(int64_t num_rows, int64_t row_length, int64_t num_ranks, SequenceLayout layout) {
  const int64_t ranges = num_ranks * (layout == SequenceLayout::kZigzag ? 2 : 1);
  std::vector<int64_t> borders = {0};
  for (int64_t range = 0; range < ranges; ++range)
    borders.push_back(borders.back() + row_length / ranges + (range < row_length % ranges ? 1 : 0));
  return SequenceCut(num_rows, std::move(borders), layout);
}

int64_t SequenceCut::owner(int64_t range) const {
  return range < num_ranks_ ? range : 2 * num_ranks_ - 1 - range;
}

int64_t SequenceCut::tokens_of_row(int64_t rank) const {
  int64_t tokens = length_of_range(rank);
  if (layout_ == SequenceLayout::kZigzag) tokens += length_of_range(2 * num_ranks_ - 1 - rank);
  return tokens;
}

int64_t SequenceCut::num_tokens(int64_t rank) const {
  return num_rows_ * tokens_of_row(rank);
}

int64_t SequenceCut::max_tokens() const {
  int64_t most = 0;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) most = std::max(most, num_tokens(rank));
  return most;
}

std::vector<int64_t> SequenceCut::tokens_of(int64_t rank) const {
  std::vector<int64_t> tokens;
  tokens.reserve(static_cast<size_t>(num_tokens(rank)));
  const auto ranges = static_cast<int64_t>(borders_.size()) - 1;
  for (int64_t row = 0; row < num_rows_; ++row)
    for (int64_t range = 0; range < ranges; ++range)
      if (owner(range) == rank)
        for (int64_t token = borders_[range]; token < borders_[range + 1]; ++token)
          tokens.push_back(row * borders_.back() + token);
  return tokens;
}

DocumentPiece SequenceCut::piece(int64_t row, int64_t range, int64_t begin, int64_t end) const {
  DocumentPiece piece{.rank = owner(range), .slot = row * ranges_of_rank(), .length = end - begin};
  piece.first = row * tokens_of_row(piece.rank) + begin - borders_[range];
  if (range >= num_ranks_) {  // the second range of a zig-zag
    piece.slot += 1;
    piece.first += length_of_range(piece.rank);
  }
  return piece;
}

std::vector<DocumentPiece> SequenceCut::pieces_of(int64_t first, int64_t last) const {
  const int64_t row_length = borders_.back(), row = first / row_length;
  const int64_t begin = first - row * row_length, end = last - row * row_length;
  CHECK(end <= row_length, "the document of the tokens ", first, " to ", last, " goes beyond its row");
  std::vector<DocumentPiece> pieces;
  auto range = std::upper_bound(borders_.begin(), borders_.end(), begin) - borders_.begin() - 1;
  for (int64_t from = begin; from < end; ++range) {
    const int64_t to = std::min(end, borders_[range + 1]);
    if (from < to) pieces.push_back(piece(row, range, from, to));
    from = to;
  }
  return pieces;
}

SequenceCut::Part SequenceCut::part_of(int64_t rank, const Documents& whole) const {
  CHECK(whole.num_tokens() == num_rows_ * borders_.back(), "documents of ", whole.num_tokens(), " tokens, rows of ",
        num_rows_ * borders_.back());
  // The rank's pieces of all documents, and, of a document that is cut, all others.
  struct Local {
    DocumentPiece own;
    size_t document = 0;  // in `cut_documents`
    size_t index = 0;     // among its pieces
  };
  std::vector<Local> locals;
  std::vector<std::vector<DocumentPiece>> cut_documents = {{}};  // the first stands for those that are not cut
  for (int64_t document = 0; document < whole.count(); ++document) {
    if (whole.length(document) == 0) continue;
    const std::vector<DocumentPiece> pieces = pieces_of(whole.begin(document), whole.end(document));
    if (pieces.size() > 1) cut_documents.push_back(pieces);
    for (size_t i = 0; i < pieces.size(); ++i)
      if (pieces[i].rank == rank) locals.push_back({pieces[i], pieces.size() > 1 ? cut_documents.size() - 1 : 0, i});
  }
  std::sort(locals.begin(), locals.end(), [](const Local& a, const Local& b) { return a.own.first < b.own.first; });

  Crossings crossings{.num_ranks = num_ranks_, .num_slots = num_rows_ * ranges_of_rank()};
  std::vector<int64_t> offsets = {0}, entering, leaving;
  for (const auto& [own, cut_document, index] : locals) {
    const auto document = static_cast<int64_t>(offsets.size()) - 1;
    const std::vector<DocumentPiece>& pieces = cut_documents[cut_document];
    CHECK(own.first == offsets.back(), "the pieces of rank ", rank, " leave a gap");
    offsets.push_back(own.first + own.length);
    const auto here = static_cast<int64_t>(index);
    const bool began_earlier = index > 0, goes_on = index + 1 < pieces.size();
    entering.push_back(began_earlier ? own.slot : -1);
    leaving.push_back(goes_on ? own.slot : -1);
    if (began_earlier) crossings.entering.push_back({document, own, {pieces.begin(), pieces.begin() + here}});
    if (goes_on) crossings.leaving.push_back({document, own, {pieces.begin() + here + 1, pieces.end()}});
  }
  find_seen_pieces(crossings);
  return {Documents(std::move(offsets)).with_states(crossings.num_slots, std::move(entering), std::move(leaving)),
          std::move(crossings)};
}

}  // namespace palimpsest
