#include "kernels/cuda/attention_fused.h"
#include "kernels/cuda/engine.h"

namespace palimpsest::cuda {

namespace {

int64_t score_budget(const FusedSizes& sizes, int64_t S, int64_t S_keys) {
  return std::min(kScoreBytes, sizes.HKV * sizes.scores(S, S_keys));
}
int64_t workspace_bytes(const FusedSizes& sizes, int64_t S, int64_t S_keys) {
  return sizes.workspace(S, S_keys, score_budget(sizes, S, S_keys));
}

}  // namespace

int64_t FusedPrefix::longest_piece(const AttentionBackwardArgs& args, const FusedRule& rule) {
  return may_be_fused(args) ? FusedSizes(args).longest_piece(rule.longest_piece) : std::numeric_limits<int64_t>::max();
}

FusedPrefix::Lengths FusedPrefix::copied(int64_t num_queries, int64_t num_keys, bool is_backward) {
  const Lengths lengths = {copied_length(num_queries), copied_length(num_keys)};
  if (!is_backward) return lengths;
  const int64_t longer = std::max(lengths.queries, lengths.keys);
  return {longer, longer};
}

FusedPrefix::FusedPrefix(Stream& stream, const AttentionBackwardArgs& args, const FusedRule& rule) : args_(args) {
  const FusedSizes sizes(args);
  const int64_t num_keys = args.k.dim(0);
  if (!may_be_fused(args) || std::min(sizes.N, num_keys) < rule.shortest) return;
  // Of the largest shape, copied or not, with as many tokens: fewer need less.
  const auto [S, S_keys] = copied(sizes.N, num_keys, sizes.is_backward);
  room_bytes_ = workspace_bytes(sizes, S, S_keys) + align_room(4 * S * sizes.H) + S * sizes.copied(sizes.H) +
                S_keys * sizes.copied(sizes.HKV) + 16 * kRoomAlignment;
  if (stream.is_planning()) return;
  const bool ends_early = sizes.N % kSequenceTile != 0 || num_keys % kSequenceTile != 0 || !all_start_on_packs(args);
  is_served_ = take_plan(stream, ends_early ? Lengths{S, S_keys} : Lengths{sizes.N, num_keys}, ends_early);
}

bool FusedPrefix::take_plan(Stream& stream, const Lengths& lengths, bool ends_early) {
  const FusedSizes sizes(args_);
  shape_ = {.is_backward = sizes.is_backward,
            .is_causal = false,
            .ends_early = ends_early,
            .B = 1,
            .S = lengths.queries,
            .S_keys = lengths.keys,
            .K = sizes.K,
            .V = sizes.V,
            .scale = static_cast<float>(args_.scale)};
  const int64_t scores = sizes.scores(shape_.S, shape_.S_keys);
  if (scores > kScoreBytes) return false;
  shape_.HKV = scores == 0 ? sizes.HKV : largest_divisor(sizes.HKV, kScoreBytes / scores);
  shape_.H = shape_.HKV * sizes.group();
  set_rows_of_copies(shape_);
  if (!ends_early) {  // but for results, which are merged and added
    FusedShape in_place;
    set_rows_in_place(in_place, args_);
    shape_.q_row = in_place.q_row;
    shape_.k_row = in_place.k_row;
    shape_.v_row = in_place.v_row;
    shape_.d_o_row = in_place.d_o_row;
    if (sizes.is_backward) shape_.o_row = in_place.o_row;
  }
  return stream.engine().fused_attention().serves(shape_, workspace_bytes(sizes, shape_.S, shape_.S_keys));
}

void FusedPrefix::make_plans(Stream& stream, const AttentionBackwardArgs& args) {
  const FusedRule rule;
  FusedPrefix longest(stream, args, rule);
  if (stream.is_planning() || !longest.is_served_ || !longest.shape_.ends_early) return;
  const int64_t most = longest.shape_.S;
  for (int64_t S = copied_length(rule.shortest); S < most; S *= 2) longest.take_plan(stream, {S, S}, true);
}

void FusedPrefix::run(Stream& stream) const {
  if (room_bytes_ == 0) return;
  const Arena::Scope scope(stream.scratch());
  auto* room = static_cast<std::byte*>(stream.scratch().allocate(DType::kU8, {room_bytes_}).raw());
  if (!is_served_) return;
  for (int64_t head = 0; head < args_.k.dim(1); head += shape_.HKV) run_slice(stream, head, Room(room, room_bytes_));
}

void FusedPrefix::run_slice(Stream& stream, int64_t first_kv_head, Room room) const {
  const FusedShape& s = shape_;
  const FusedSizes sizes(args_);
  const int64_t first_head = first_kv_head * sizes.group();
  const bool wide = all_start_on_packs(args_);
  FusedOperands operands = {.lse = room.take<float>(s.H * s.S)};
  SequenceCopy queries = {.sequence_lse = operands.lse,
                          .num_heads = static_cast<int>(sizes.H),
                          .first_head = static_cast<int>(first_head),
                          .heads = static_cast<int>(s.H),
                          .B = 1,
                          .S = s.S,
                          .wide = wide};
  queries.length[0] = static_cast<int32_t>(sizes.N);
  SequenceCopy keys = {.B = 1, .S = s.S_keys, .wide = wide};
  keys.length[0] = static_cast<int32_t>(args_.k.dim(0));
  SequenceCopy query_results = queries, key_results = keys;
  const auto result = [&](SequenceCopy& copy, const Tensor& tensor, int64_t head, int64_t heads) -> void* {
    return tensor.defined() ? copy.add(tensor, head, heads, room.take<BF16>(copy.S * heads * tensor.dim(2))) : nullptr;
  };
  const auto operand = [&](SequenceCopy& copy, const Tensor& tensor, int64_t head, int64_t heads) -> void* {
    if (s.ends_early || !tensor.defined()) return result(copy, tensor, head, heads);
    return tensor.data<BF16>() + head * tensor.dim(2);
  };
  operands.q = operand(queries, args_.q, first_head, s.H);
  operands.k = operand(keys, args_.k, first_kv_head, s.HKV);
  operands.v = operand(keys, args_.v, first_kv_head, s.HKV);
  operands.o =
      s.is_backward ? operand(queries, args_.o, first_head, s.H) : result(query_results, args_.o, first_head, s.H);
  operands.d_o = operand(queries, args_.d_o, first_head, s.H);
  operands.dq = result(query_results, args_.dq, first_head, s.H);
  operands.dk = result(key_results, args_.dk, first_kv_head, s.HKV);
  operands.dv = result(key_results, args_.dv, first_kv_head, s.HKV);
  if (s.ends_early) {
    queries.lengths = operands.query_lengths = room.take<int32_t>(1);
    keys.lengths = operands.key_lengths = room.take<int32_t>(1);
  }
  auto* workspace = room.take<std::byte>(workspace_bytes(sizes, s.S, s.S_keys));

  if (s.is_backward) queries.lse = args_.lse.data<float>();
  if (s.ends_early || s.is_backward) copy_to_sequences(stream, queries);
  if (s.ends_early) copy_to_sequences(stream, keys);
  stream.engine().fused_attention().run(s, operands, workspace);
  if (s.is_backward) {
    copy_from_sequences(stream, query_results, Write::kAccumulate);
    copy_from_sequences(stream, key_results, Write::kAccumulate);
  } else {
    query_results.lse = args_.lse.data<float>();
    merge_sequences(stream, query_results);
  }
}

}  // namespace palimpsest::cuda
