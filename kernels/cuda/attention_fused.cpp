#include "kernels/cuda/attention_fused.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "kernels/cuda/attention_sequences.h"
#include "kernels/cuda/engine.h"

namespace palimpsest::cuda {

namespace {

constexpr int64_t kScoreBytes = int64_t{2} << 30;  // of dS, what a call may have at most
constexpr int64_t kCopiedTokens = 32768;           // of sequences that are copied at a time, unless one is longer
constexpr int64_t kSlackBytes = int64_t{4} << 20;  // what plans take beside the tensors counted here
constexpr int64_t kAlignment = 256;                // bytes
constexpr int64_t kPack = 8;                       // head sizes are multiples of it

struct Sizes {
  int64_t N, H, HKV, K, V;
  bool is_backward;

  int64_t group() const { return H / HKV; }
};

Sizes sizes_of(const AttentionBackwardArgs& args) {
  return {args.q.dim(0), args.q.dim(1), args.k.dim(1), args.q.dim(2), args.v.dim(2), args.dq.defined()};
}

int64_t align(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t score_bytes(int64_t S) {  // of a sequence and head
  return 2 * S * S;
}
// Beyond it the heads that share a key head of one sequence have more dS than may be.
int64_t longest_sequence(const Sizes& sizes) {
  if (!sizes.is_backward) return std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(std::sqrt(static_cast<double>(kScoreBytes) / static_cast<double>(2 * sizes.group())));
}

// All of these grow with S, so that the room of the longest document suffices for every other.
int64_t score_budget(const Sizes& sizes, int64_t S) {
  return std::max(sizes.group() * score_bytes(S), std::min(kScoreBytes, 2 * std::max(sizes.N, S) * S * sizes.H));
}
int64_t copied_tokens(const Sizes& sizes, int64_t S) {
  return std::max(S, std::min(kCopiedTokens, sizes.N));
}
int64_t copied_elements(const Sizes& sizes) {                            // of a token
  const int64_t operands = (sizes.H + sizes.HKV) * (sizes.K + sizes.V);  // q, o; k, v
  return sizes.is_backward ? 2 * operands : operands;                    // and their gradients
}
int64_t workspace_bytes(const Sizes& sizes, int64_t S) {
  if (!sizes.is_backward) return kSlackBytes;
  const int64_t tokens = std::max(sizes.N, copied_tokens(sizes, S));
  const int64_t of_query_heads = sizes.group() == 1 ? 0 : 2 * tokens * sizes.H * (sizes.K + sizes.V);  // dk and dv
  return score_budget(sizes, S) + align(4 * tokens * sizes.H) + align(of_query_heads) + kSlackBytes;
}
int64_t room_bytes(const Sizes& sizes, int64_t S) {
  const int64_t tokens = copied_tokens(sizes, S);
  return workspace_bytes(sizes, S) + align(4 * std::max(sizes.N, tokens) * sizes.H) + align(4 * kMaxSequences) +
         2 * tokens * copied_elements(sizes) + 16 * kAlignment;
}

int64_t largest_divisor(int64_t number, int64_t limit) {
  for (int64_t d = std::min(number, limit); d > 1; --d)
    if (number % d == 0) return d;
  return 1;
}

// Sequences and heads of a call into shape.
void choose_slice(FusedShape& shape, const Sizes& sizes, int64_t num_sequences) {
  const int64_t S = shape.S;
  const int64_t heads =
      sizes.is_backward ? score_budget(sizes, S) / score_bytes(S) : kMaxSequences * sizes.H;  // of sequences together
  shape.HKV = heads >= sizes.H ? sizes.HKV : largest_divisor(sizes.HKV, heads / sizes.group());
  shape.H = shape.HKV * sizes.group();
  const int64_t most = std::clamp<int64_t>(heads / sizes.H, 1, kMaxSequences);
  // As many as the tokens of a batch can fill, whatever those of this one are: plans are the same in every step.
  shape.B = shape.ends_early ? std::min({most, std::max<int64_t>(1, sizes.N / S), copied_tokens(sizes, S) / S})
                             : largest_divisor(num_sequences, most);
}

void set_rows_of_copies(FusedShape& shape) {
  shape.q_row = shape.H * shape.K;
  shape.k_row = shape.HKV * shape.K;
  shape.v_row = shape.HKV * shape.V;
  shape.o_row = shape.H * shape.V;
  if (!shape.is_backward) return;
  shape.d_o_row = shape.o_row;
  shape.dq_row = shape.q_row;
  shape.dk_row = shape.k_row;
  shape.dv_row = shape.v_row;
}

template <class Body>
void for_each_operand(const AttentionBackwardArgs& args, Body body) {
  for (const Tensor* tensor : {&args.q, &args.k, &args.v, &args.o, &args.d_o, &args.dq, &args.dk, &args.dv})
    if (tensor->defined()) body(*tensor);
}

bool all_start_on_packs(const AttentionBackwardArgs& args) {
  bool all = true;
  for_each_operand(args, [&](const Tensor& tensor) { all = all && starts_on_packs(tensor); });
  return all;
}

int64_t row_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.row_stride() : 0;
}

}  // namespace

FusedDocuments::FusedDocuments(Stream& stream, const AttentionBackwardArgs& args, const Documents& documents,
                               const FusedRule& rule)
    : args_(args), taken_(static_cast<size_t>(documents.count()), false) {
  const Sizes sizes = sizes_of(args);
  if (!FusedAttention::is_built_in() || args.q.dtype() != DType::kBF16 || sizes.K % kPack != 0 || sizes.V % kPack != 0)
    return;
  const auto padded = [](int64_t length) {
    return std::max(kSequenceTile, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(length))));
  };
  int64_t shortest = sizes.N, longest = 0;
  for (int64_t i = 0; i < documents.count(); ++i) {
    shortest = std::min(shortest, documents.length(i));
    longest = std::max(longest, documents.length(i));
  }
  if (longest < rule.shortest) return;
  const int64_t longest_served = longest_sequence(sizes);
  room_bytes_ = room_bytes(sizes, std::min(padded(longest), longest_served));
  if (stream.is_planning()) return;

  FusedShape shape = {.is_backward = sizes.is_backward,
                      .S = longest,
                      .K = sizes.K,
                      .V = sizes.V,
                      .scale = static_cast<float>(args.scale),
                      .q_row = row_of(args.q),
                      .k_row = row_of(args.k),
                      .v_row = row_of(args.v),
                      .o_row = row_of(args.o),
                      .d_o_row = row_of(args.d_o),
                      .dq_row = row_of(args.dq),
                      .dk_row = row_of(args.dk),
                      .dv_row = row_of(args.dv)};
  std::map<int64_t, std::vector<int64_t>> documents_of;  // by tokens of their sequences
  if (shortest == longest && longest % kSequenceTile == 0 && all_start_on_packs(args)) {
    std::vector<int64_t>& all = documents_of[longest];
    all.resize(static_cast<size_t>(documents.count()));
    std::iota(all.begin(), all.end(), 0);
  } else {
    shape.ends_early = true;
    // With every size up to the longest, so that plans are made together, and not when a document comes that needs one.
    for (int64_t S = padded(rule.shortest); S <= padded(longest); S *= 2) documents_of.try_emplace(S);
    for (int64_t i = 0; i < documents.count(); ++i)
      if (documents.length(i) >= rule.shortest) documents_of[padded(documents.length(i))].push_back(i);
  }
  for (const auto& [S, chosen] : documents_of) {
    if (S > longest_served) continue;
    shape.S = S;
    choose_slice(shape, sizes, static_cast<int64_t>(chosen.size()));
    if (shape.ends_early) set_rows_of_copies(shape);
    if (!stream.engine().fused_attention().serves(shape, workspace_bytes(sizes, S)) || chosen.empty()) continue;
    Group group = {.shape = shape, .sequences = {}};
    for (const int64_t i : chosen) {
      taken_[static_cast<size_t>(i)] = true;
      group.sequences.push_back({documents.begin(i), documents.length(i)});
    }
    groups_.push_back(std::move(group));
  }
}

void FusedDocuments::run(Stream& stream) const {
  if (room_bytes_ == 0) return;
  const Arena::Scope scope(stream.scratch());
  auto* room = static_cast<std::byte*>(stream.scratch().allocate(DType::kU8, {room_bytes_}).raw());
  for (const Group& group : groups_)
    for (size_t first = 0; first < group.sequences.size(); first += static_cast<size_t>(group.shape.B))
      for (int64_t head = 0; head < args_.k.dim(1); head += group.shape.HKV)
        run_slice(stream, group, static_cast<int64_t>(first), head, room);
}

void FusedDocuments::run_slice(Stream& stream, const Group& group, int64_t first_sequence, int64_t first_kv_head,
                               std::byte* room) const {
  const FusedShape& s = group.shape;
  const Sizes sizes = sizes_of(args_);
  const int64_t first_head = first_kv_head * sizes.group();
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    std::byte* at = room + used;
    used += align(bytes);
    CHECK(used <= room_bytes_, "sequences of attention need ", used, " bytes, planned were ", room_bytes_);
    return at;
  };
  FusedOperands operands = {.lse = reinterpret_cast<float*>(take(s.B * s.H * s.S * 4))};
  SequenceCopy before = {.sequence_lse = operands.lse,
                         .num_heads = static_cast<int>(sizes.H),
                         .first_head = static_cast<int>(first_head),
                         .heads = static_cast<int>(s.H),
                         .B = s.B,
                         .S = s.S};
  for (int64_t b = 0; b < s.B; ++b) {
    const auto at = static_cast<size_t>(first_sequence + b);
    const Sequence sequence = at < group.sequences.size() ? group.sequences[at] : Sequence{0, 0};
    before.first_token[b] = sequence.first_token;
    before.length[b] = static_cast<int32_t>(sequence.length);
  }
  SequenceCopy after = before;
  // Where an operand lies for the library: in its rows, or in a copy that `problem` makes or takes from.
  const auto place = [&](SequenceCopy& problem, const Tensor& tensor, int64_t head, int64_t heads) -> void* {
    if (!tensor.defined()) return nullptr;
    const int64_t size = tensor.dim(2);
    BF16* rows = tensor.data<BF16>() + head * size;
    if (!s.ends_early)
      return rows + group.sequences[static_cast<size_t>(first_sequence)].first_token * tensor.row_stride();
    auto* copy = reinterpret_cast<BF16*>(take(s.B * s.S * heads * size * 2));
    problem.pieces[problem.num_pieces++] = {rows, tensor.row_stride(), copy, static_cast<int>(heads * size)};
    return copy;
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
  if (s.ends_early) before.lengths = operands.lengths = reinterpret_cast<int32_t*>(take(s.B * 4));
  auto* workspace = take(workspace_bytes(sizes, s.S));

  const bool wide = all_start_on_packs(args_);
  if (s.ends_early || s.is_backward) copy_to_sequences(stream, before, wide);
  stream.engine().fused_attention().run(s, operands, workspace);
  if (s.ends_early || !s.is_backward) copy_from_sequences(stream, after, wide);
}

void note_attention_path(const Stream& stream, const std::vector<bool>& taken) {
  const auto fused = static_cast<size_t>(std::count(taken.begin(), taken.end(), true));
  note_path(stream, fused == 0 ? "plain" : fused == taken.size() ? "cuDNN" : "cuDNN and plain");
}

}  // namespace palimpsest::cuda
