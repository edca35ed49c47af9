#include "kernels/cuda/attention_fused.h"

#include <algorithm>
#include <map>

#include "kernels/cuda/engine.h"

namespace palimpsest::cuda {

namespace {

constexpr int64_t kCopiedTokens = 32768;  // of sequences that are copied at a time, unless one is longer

// All of these grow with S, so that the room of the longest sequence suffices for every other.
int64_t score_budget(const FusedSizes& sizes, int64_t S) {
  return sizes.is_backward ? std::min(kScoreBytes, 2 * std::max(sizes.N, S) * S * sizes.H) : 0;
}
int64_t copied_tokens(const FusedSizes& sizes, int64_t S) {
  return std::max(S, std::min(kCopiedTokens, sizes.N));
}
int64_t workspace_bytes(const FusedSizes& sizes, int64_t S) {
  const int64_t tokens = std::max(sizes.N, copied_tokens(sizes, S));
  return sizes.workspace(tokens, tokens, score_budget(sizes, S));
}
int64_t room_bytes(const FusedSizes& sizes, int64_t S) {
  const int64_t tokens = copied_tokens(sizes, S);
  return workspace_bytes(sizes, S) + align_room(4 * std::max(sizes.N, tokens) * sizes.H) +
         align_room(4 * kMaxSequences) + tokens * sizes.copied(sizes.H + sizes.HKV) + 16 * kRoomAlignment;
}

// Sequences and heads of a call into shape.
void choose_slice(FusedShape& shape, const FusedSizes& sizes, int64_t num_sequences) {
  const int64_t S = shape.S, scores = sizes.scores(S, S);
  const int64_t kv_heads = scores == 0 ? kMaxSequences * sizes.HKV : score_budget(sizes, S) / scores;  // of sequences
  shape.HKV = kv_heads >= sizes.HKV ? sizes.HKV : largest_divisor(sizes.HKV, kv_heads);
  shape.H = shape.HKV * sizes.group();
  const int64_t most = std::clamp<int64_t>(kv_heads / sizes.HKV, 1, kMaxSequences);
  // As many as the tokens of a batch can fill, whatever those of this one are: plans are the same in every step.
  shape.B = shape.ends_early ? std::min({most, std::max<int64_t>(1, sizes.N / S), copied_tokens(sizes, S) / S})
                             : largest_divisor(num_sequences, most);
}

}  // namespace

std::vector<FusedDocuments::Piece> FusedDocuments::cut(const Documents& documents, const FusedRule& rule) {
  const FusedSizes sizes(args_);
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < documents.count(); ++i) {
    const int64_t length = documents.length(i);
    if (length < rule.shortest) continue;
    const int64_t step = std::min(length, sizes.longest_piece(rule.longest_piece));
    const size_t first_of_document = pieces.size();
    for (int64_t first = 0; first < length; first += step) {
      const Piece piece = {i, documents.begin(i) + first, std::min(step, length - first)};
      for (size_t before = first_of_document; before < pieces.size(); ++before)
        pairs_.push_back({.queries = piece, .keys = pieces[before]});
      pieces.push_back(piece);
    }
  }
  return pieces;
}

AttentionBackwardArgs FusedDocuments::args_of(const Pair& pair) const {
  return rows_of(args_, pair.queries.first_token, pair.queries.length, pair.keys.first_token, pair.keys.length);
}

FusedDocuments::FusedDocuments(Stream& stream, const AttentionBackwardArgs& args, const Documents& documents,
                               const FusedRule& rule)
    : args_(args), taken_(static_cast<size_t>(documents.count()), false) {
  const FusedSizes sizes(args);
  if (!may_be_fused(args)) return;
  std::vector<Piece> pieces = cut(documents, rule);
  if (pieces.empty()) return;
  const auto by_length = [](const Piece& a, const Piece& b) { return a.length < b.length; };
  const auto [shortest, longest] = std::minmax_element(pieces.begin(), pieces.end(), by_length);
  const int64_t most = copied_length(longest->length);
  room_bytes_ = room_bytes(sizes, most);
  if (stream.is_planning()) return;

  int64_t num_tokens = 0;
  for (const Piece& piece : pieces) num_tokens += piece.length;
  FusedShape shape = {
      .is_backward = sizes.is_backward, .K = sizes.K, .V = sizes.V, .scale = static_cast<float>(args.scale)};
  std::map<int64_t, std::vector<Piece>> pieces_of;  // by tokens of their sequences
  if (shortest->length == longest->length && longest->length % kSequenceTile == 0 && num_tokens == sizes.N &&
      all_start_on_packs(args)) {
    pieces_of[longest->length] = pieces;
    set_rows_in_place(shape, args);
  } else {
    shape.ends_early = true;
    // With every size up to the longest, so that plans are made together, and not when a document comes that needs one.
    for (int64_t S = copied_length(std::min(rule.shortest, shortest->length)); S <= most; S *= 2)
      pieces_of.try_emplace(S);
    for (const Piece& piece : pieces) pieces_of[copied_length(piece.length)].push_back(piece);
  }
  for (const Piece& piece : pieces) taken_[static_cast<size_t>(piece.document)] = true;
  const auto leave = [&](const Piece& piece) { taken_[static_cast<size_t>(piece.document)] = false; };
  for (auto& [S, members] : pieces_of) {
    shape.S = shape.S_keys = S;
    if (sizes.scores(S, S) <= kScoreBytes) {
      choose_slice(shape, sizes, static_cast<int64_t>(members.size()));
      if (shape.ends_early) set_rows_of_copies(shape);
      if (stream.engine().fused_attention().serves(shape, workspace_bytes(sizes, S))) {
        if (!members.empty()) groups_.push_back({.shape = shape, .pieces = std::move(members)});
        continue;
      }
    }
    for (const Piece& piece : members) leave(piece);
  }
  for (const Pair& pair : pairs_)
    if (!FusedPrefix(stream, args_of(pair), {.shortest = 1}).is_served()) leave(pair.queries);
  // Pieces of a document that is left after all.
  const auto is_left = [&](const Piece& piece) { return !taken_[static_cast<size_t>(piece.document)]; };
  for (Group& group : groups_) std::erase_if(group.pieces, is_left);
  std::erase_if(pairs_, [&](const Pair& pair) { return is_left(pair.queries); });
}

void FusedDocuments::run(Stream& stream) const {
  if (room_bytes_ == 0) return;
  {
    const Arena::Scope scope(stream.scratch());
    auto* room = static_cast<std::byte*>(stream.scratch().allocate(DType::kU8, {room_bytes_}).raw());
    for (const Group& group : groups_)
      for (size_t first = 0; first < group.pieces.size(); first += static_cast<size_t>(group.shape.B))
        for (int64_t head = 0; head < args_.k.dim(1); head += group.shape.HKV)
          run_slice(stream, group, static_cast<int64_t>(first), head, Room(room, room_bytes_));
  }
  for (const Pair& pair : pairs_) FusedPrefix(stream, args_of(pair), {.shortest = 1}).run(stream);
}

void FusedDocuments::run_slice(Stream& stream, const Group& group, int64_t first_piece, int64_t first_kv_head,
                               Room room) const {
  const FusedShape& s = group.shape;
  const FusedSizes sizes(args_);
  const int64_t first_head = first_kv_head * sizes.group();
  FusedOperands operands = {.lse = room.take<float>(s.B * s.H * s.S)};
  SequenceCopy before = {.sequence_lse = operands.lse,
                         .num_heads = static_cast<int>(sizes.H),
                         .first_head = static_cast<int>(first_head),
                         .heads = static_cast<int>(s.H),
                         .B = s.B,
                         .S = s.S};
  for (int64_t b = 0; b < s.B; ++b) {
    const auto at = static_cast<size_t>(first_piece + b);
    const Piece piece = at < group.pieces.size() ? group.pieces[at] : Piece{0, 0, 0};
    before.first_token[b] = piece.first_token;
    before.length[b] = static_cast<int32_t>(piece.length);
  }
  SequenceCopy after = before;
  // Where an operand lies for the library: in its rows, or in a copy that is made before or taken from after.
  const auto place = [&](SequenceCopy& copy, const Tensor& tensor, int64_t head, int64_t heads) -> void* {
    if (!tensor.defined()) return nullptr;
    if (!s.ends_early) return tensor.data<BF16>() + before.first_token[0] * tensor.row_stride() + head * tensor.dim(2);
    return copy.add(tensor, head, heads, room.take<BF16>(s.B * s.S * heads * tensor.dim(2)));
  };
  operands.q = place(before, args_.q, first_head, s.H);
  operands.k = place(before, args_.k, first_kv_head, s.HKV);
  operands.v = place(before, args_.v, first_kv_head, s.HKV);
  operands.o = place(s.is_backward ? before : after, args_.o, first_head, s.H);
  operands.d_o = place(before, args_.d_o, first_head, s.H);
  operands.dq = place(after, args_.dq, first_head, s.H);
  operands.dk = place(after, args_.dk, first_kv_head, s.HKV);
  operands.dv = place(after, args_.dv, first_kv_head, s.HKV);
  (s.is_backward ? before : after).lse = args_.lse.data<float>();
  if (s.ends_early) before.lengths = operands.query_lengths = operands.key_lengths = room.take<int32_t>(s.B);
  auto* workspace = room.take<std::byte>(workspace_bytes(sizes, s.S));

  before.wide = after.wide = all_start_on_packs(args_);
  if (s.ends_early || s.is_backward) copy_to_sequences(stream, before);
  stream.engine().fused_attention().run(s, operands, workspace);
  if (s.ends_early || !s.is_backward) copy_from_sequences(stream, after, Write::kOverwrite);
}

void note_attention_path(const Stream& stream, const std::vector<bool>& taken) {
  const auto fused = static_cast<size_t>(std::count(taken.begin(), taken.end(), true));
  note_path(stream, fused == 0 ? "plain" : fused == taken.size() ? "cuDNN" : "cuDNN and plain");
}

}  // namespace palimpsest::cuda
