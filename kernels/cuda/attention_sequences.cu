#include "kernels/cuda/attention_sequences.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kCopyTokens = 16;     // of a block
constexpr int64_t kZeroTile = 256;  // no tile of keys or queries is larger

enum class Way : uint8_t { kToSequences, kFromSequences, kAddedFromSequences };

// Grid: tokens of a sequence, sequences.
template <int kPack, Way kWay>
__global__ void copy_sequences_kernel(const __grid_constant__ SequenceCopy p) {
  constexpr bool kToSequences = kWay == Way::kToSequences;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int64_t b = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * kCopyTokens, length = p.length[b];
  const int64_t token = p.first_token[b];
  if (p.lengths != nullptr && blockIdx.x == 0 && thread == 0) p.lengths[b] = static_cast<int32_t>(length);
  const int64_t end = kToSequences ? min(p.S, ceil_div(length, kZeroTile) * kZeroTile) : length;
  if (first >= end) return;
  for (int n = 0; n < p.num_pieces; ++n) {
    const SequenceCopy::Piece& piece = p.pieces[n];
    const int packs = piece.columns / kPack;
    for (int i = thread; i < kCopyTokens * packs; i += threads) {
      const int64_t t = first + i / packs, c = i % packs * kPack;
      auto* inside = reinterpret_cast<bf16*>(piece.sequences + (b * p.S + t) * piece.columns + c);
      auto* outside = reinterpret_cast<bf16*>(piece.rows + (token + t) * piece.stride + c);
      float x[kPack] = {};
      if constexpr (kToSequences) {
        if (t < length) load(outside, x);
        store(inside, x);
      } else if (t < length) {
        load(inside, x);
        if constexpr (kWay == Way::kAddedFromSequences) {
          float sum[kPack];
          load(outside, sum);
#pragma unroll
          for (int e = 0; e < kPack; ++e) x[e] += sum[e];
        }
        store(outside, x);
      }
    }
  }
  if (p.lse == nullptr) return;
  for (int i = thread; i < kCopyTokens * p.heads; i += threads) {
    const int64_t t = first + i % kCopyTokens, h = i / kCopyTokens;
    float& inside = p.sequence_lse[(b * p.heads + h) * p.S + t];
    float& outside = p.lse[(token + t) * p.num_heads + p.first_head + h];
    if (kToSequences)
      inside = t < length ? outside : 0.0F;
    else if (t < length)
      outside = inside;
  }
}

// A warp a token and head of one sequence.
template <int kPack>
__global__ void merge_sequences_kernel(const __grid_constant__ SequenceCopy p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp, t = i / p.heads,
                h = i % p.heads;
  if (t >= p.length[0]) return;
  const SequenceCopy::Piece& piece = p.pieces[0];
  const int size = piece.columns / p.heads;
  auto* o = reinterpret_cast<bf16*>(piece.rows + t * piece.stride + h * size);
  const auto* added = reinterpret_cast<const bf16*>(piece.sequences + t * piece.columns + h * size);
  float& lse = p.lse[t * p.num_heads + p.first_head + h];
  const float old = lse, more = p.sequence_lse[h * p.S + t], highest = fmaxf(old, more);
  const float both = highest + logf(expf(old - highest) + expf(more - highest));
  const float keep = expf(old - both), add = expf(more - both);
  for (int c = lane * kPack; c < size; c += kWarp * kPack) {
    float sum[kPack], more_of[kPack];
    load<kPack>(o + c, sum);
    load<kPack>(added + c, more_of);
#pragma unroll
    for (int e = 0; e < kPack; ++e) sum[e] = keep * sum[e] + add * more_of[e];
    store<kPack>(o + c, sum);
  }
  __syncwarp();  // all have read it
  if (lane == 0) lse = both;
}

constexpr int kWidePack = 8;  // elements in 16 bytes

template <Way kWay>
void copy_one_way(const Stream& stream, const SequenceCopy& copy) {
  static_assert(kSequenceTile % kCopyTokens == 0);
  const LaunchShape shape = {.grid_x = copy.S / kCopyTokens, .grid_y = copy.B};
  if (copy.wide)
    launch(stream, copy_sequences_kernel<kWidePack, kWay>, shape, copy);
  else
    launch(stream, copy_sequences_kernel<1, kWay>, shape, copy);
}

}  // namespace

BF16* SequenceCopy::add(const Tensor& tensor, int64_t first_head_of_piece, int64_t num_heads_of_piece, BF16* to) {
  const int64_t size = tensor.dim(2);
  pieces[num_pieces++] = {tensor.data<BF16>() + first_head_of_piece * size, tensor.row_stride(), to,
                          static_cast<int>(num_heads_of_piece * size)};
  return to;
}

bool starts_on_packs(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.raw()) % (kWidePack * sizeof(BF16)) == 0 &&
         tensor.row_stride() % kWidePack == 0 && tensor.dim(-1) % kWidePack == 0;
}

void copy_to_sequences(const Stream& stream, const SequenceCopy& copy) {
  copy_one_way<Way::kToSequences>(stream, copy);
}

void copy_from_sequences(const Stream& stream, const SequenceCopy& copy, Write write) {
  if (write == Write::kAccumulate)
    copy_one_way<Way::kAddedFromSequences>(stream, copy);
  else
    copy_one_way<Way::kFromSequences>(stream, copy);
}

void merge_sequences(const Stream& stream, const SequenceCopy& copy) {
  constexpr int kThreads = 256;
  const LaunchShape shape = {.grid_x = ceil_div(int64_t{copy.length[0]} * copy.heads, kThreads / kWarp),
                             .threads = kThreads};
  if (copy.wide)
    launch(stream, merge_sequences_kernel<kWidePack>, shape, copy);
  else
    launch(stream, merge_sequences_kernel<1>, shape, copy);
}

}  // namespace palimpsest::cuda
