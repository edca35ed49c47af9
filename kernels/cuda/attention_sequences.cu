#include "kernels/cuda/attention_sequences.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int kCopyTokens = 16;     // of a block
constexpr int64_t kZeroTile = 256;  // no tile of keys or queries is larger

template <int kPack>
struct alignas(kPack * sizeof(BF16)) Elements {
  unsigned short bits[kPack];
};

// Grid: tokens of a sequence, sequences.
template <int kPack, bool kToSequences>
__global__ void copy_sequences_kernel(const __grid_constant__ SequenceCopy p) {
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
      auto* inside = reinterpret_cast<Elements<kPack>*>(piece.sequences + (b * p.S + t) * piece.columns + c);
      auto* outside = reinterpret_cast<Elements<kPack>*>(piece.rows + (token + t) * piece.stride + c);
      if (kToSequences)
        *inside = t < length ? *outside : Elements<kPack>{};
      else if (t < length)
        *outside = *inside;
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

constexpr int kWidePack = 8;  // elements in 16 bytes

template <bool kToSequences>
void copy_either_way(const Stream& stream, const SequenceCopy& copy, bool wide) {
  static_assert(kSequenceTile % kCopyTokens == 0);
  const LaunchShape shape = {.grid_x = copy.S / kCopyTokens, .grid_y = copy.B};
  if (wide)
    launch(stream, copy_sequences_kernel<kWidePack, kToSequences>, shape, copy);
  else
    launch(stream, copy_sequences_kernel<1, kToSequences>, shape, copy);
}

}  // namespace

bool starts_on_packs(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.raw()) % (kWidePack * sizeof(BF16)) == 0 &&
         tensor.row_stride() % kWidePack == 0 && tensor.dim(-1) % kWidePack == 0;
}

void copy_to_sequences(const Stream& stream, const SequenceCopy& copy, bool wide) {
  copy_either_way<true>(stream, copy, wide);
}

void copy_from_sequences(const Stream& stream, const SequenceCopy& copy, bool wide) {
  copy_either_way<false>(stream, copy, wide);
}

}  // namespace palimpsest::cuda
