#include "model/sequence_attention.h"

#include <algorithm>
#include <utility>

#include "kernels/elementwise.h"

namespace palimpsest {

namespace {

int64_t rows_of(const std::vector<SeenPiece>& pieces) {
  int64_t rows = 0;
  for (const SeenPiece& seen : pieces) rows += seen.piece.length;
  return rows;
}

int64_t rows_of(const std::vector<DocumentPiece>& pieces) {
  int64_t rows = 0;
  for (const DocumentPiece& piece : pieces) rows += piece.length;
  return rows;
}

}  // namespace

PassedRows::PassedRows(Context& context, const Sequence& sequence, std::vector<Tensor> parts, Gradients gradients)
    : context_(context),
      crossings_(sequence.crossings),
      parts_(std::move(parts)),
      block_(EarlierRows::most_of(context.stream.device())) {
  Stream& stream = context_.stream;
  const int64_t num_ranks = crossings_.num_ranks, num_buffers = std::min<int64_t>(num_ranks - 1, 2);
  int64_t width = 0, most_sent = 0, most_received = 0;
  for (const Tensor& part : parts_) width += part.dim(1);
  for (int64_t round = 1; round < num_ranks; ++round) {
    const auto [to, from] = peers_of(round);
    most_sent = std::max(most_sent, rows_of(crossings_.shown_to[to]));
    most_received = std::max(most_received, rows_of(crossings_.seen_on[from]));
  }
  const auto allocate = [&](int64_t rows) { return stream.scratch().allocate(parts_.front().dtype(), {rows, width}); };
  const int64_t own = rows_of(crossings_.seen_on[context_.mesh.sequence().rank()]);
  if (own > 0) own_block_ = allocate(std::min(own, block_));
  sent_ = allocate(most_sent);
  for (int64_t i = 0; i < num_buffers; ++i) received_[i] = allocate(most_received);
  if (gradients == Gradients::kYes) {
    d_own_ = allocate(parts_.front().dim(0));
    fill_zero(stream, d_own_);
    for (int64_t i = 0; i < num_buffers; ++i) d_received_[i] = allocate(most_received);
    d_sent_ = allocate(most_sent);
  }
  start_round(1);
}

PassedRows::Peers PassedRows::peers_of(int64_t round) const {
  const int64_t rank = context_.mesh.sequence().rank(), size = crossings_.num_ranks;
  return {.to = (rank + round) % size, .from = (rank - round + size) % size};
}

void PassedRows::take_own(const Tensor& rows, int64_t first) const {
  int64_t column = 0;
  for (const Tensor& part : parts_) {
    copy(context_.stream, rows.columns(column, part.dim(1)), part.rows(first, rows.dim(0)));
    column += part.dim(1);
  }
}

void PassedRows::start_round(int64_t round) {
  const auto [to, from] = peers_of(round);
  int64_t rows = 0;
  for (const DocumentPiece& piece : crossings_.shown_to[to]) {
    take_own(sent_.rows(rows, piece.length), piece.first);
    rows += piece.length;
  }
  const int64_t incoming = rows_of(crossings_.seen_on[from]);
  round_ = context_.mesh.sequence().start_send_receive(context_.stream, sent_.rows(0, rows), rows > 0 ? to : -1,
                                                       received_[(round - 1) % 2].rows(0, incoming),
                                                       incoming > 0 ? from : -1);
}

template <class Rows>
void PassedRows::visit_all(int64_t other, const Visit& visit, Rows&& rows_of_block) {
  int64_t row = 0;
  for (const auto& [piece, first, length] : crossings_.seen_on[other]) {
    for (int64_t begin = 0; begin < piece.length; begin += block_) {
      const int64_t count = std::min(block_, piece.length - begin);
      const auto [rows, d_rows] = rows_of_block(row + begin, piece.first + begin, count);
      visit({.first = first, .length = length, .rows = rows, .d_rows = d_rows});
      advance();
    }
    row += piece.length;
  }
}

void PassedRows::for_each_block(const Visit& visit) {
  using Pair = std::pair<Tensor, Tensor>;
  const bool has_gradients = d_own_.defined();
  // A later range of a zig-zag sees this rank's own earlier one.
  visit_all(context_.mesh.sequence().rank(), visit, [&](int64_t, int64_t first, int64_t count) {
    take_own(own_block_.rows(0, count), first);
    return Pair(own_block_.rows(0, count), has_gradients ? d_own_.rows(first, count) : Tensor());
  });
  for (int64_t round = 1; round < crossings_.num_ranks; ++round) {
    round_->wait();
    if (round + 1 < crossings_.num_ranks) start_round(round + 1);
    const Tensor &received = received_[(round - 1) % 2], &d_received = d_received_[(round - 1) % 2];
    if (has_gradients) fill_zero(context_.stream, d_received);
    visit_all(peers_of(round).from, visit, [&](int64_t row, int64_t, int64_t count) {
      return Pair(received.rows(row, count), has_gradients ? d_received.rows(row, count) : Tensor());
    });
    if (has_gradients) start_return(round);
  }
  finish_return();
}

void PassedRows::start_return(int64_t round) {
  finish_return();
  const auto [to, from] = peers_of(round);
  const int64_t outgoing = rows_of(crossings_.seen_on[from]), incoming = rows_of(crossings_.shown_to[to]);
  return_ = context_.mesh.sequence().start_send_receive(context_.stream, d_received_[(round - 1) % 2].rows(0, outgoing),
                                                        outgoing > 0 ? from : -1, d_sent_.rows(0, incoming),
                                                        incoming > 0 ? to : -1);
  returning_ = round;
}

void PassedRows::finish_return() {
  if (!return_) return;
  return_->wait();
  return_.reset();
  int64_t row = 0;
  for (const DocumentPiece& piece : crossings_.shown_to[peers_of(returning_).to]) {
    const Tensor sum = d_own_.rows(piece.first, piece.length);
    add(context_.stream, sum, sum, d_sent_.rows(row, piece.length));
    row += piece.length;
  }
}

// MPI moves data only inside its own calls.
void PassedRows::advance() {
  if (round_) round_->advance();
  if (return_) return_->advance();
}

}  // namespace palimpsest
