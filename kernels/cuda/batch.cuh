// Flat arrays that one launch goes through, each with blocks of its own.
#pragma once

#include <cstdint>

namespace palimpsest::cuda {

constexpr int kMostArrays = 48, kBatchThreads = 256;

// `arrays` are pointers to those of one index.

template <class Arrays>
struct Batch {
  int count = 0;
  int first_block[kMostArrays + 1] = {};
  int64_t n[kMostArrays] = {};
  Arrays arrays[kMostArrays] = {};

  int blocks() const { return first_block[count]; }
  void add(int64_t length, int64_t its_blocks, const Arrays& its_arrays) {
    n[count] = length;
    arrays[count] = its_arrays;
    first_block[count + 1] = first_block[count] + static_cast<int>(its_blocks);
    ++count;
  }
  // Which array this block works on.
  __device__ int index() const {
    int i = 0;
    while (static_cast<int>(blockIdx.x) >= first_block[i + 1]) ++i;
    return i;
  }
  // Of array i: the first element of this thread, and those from one of its packs to the next.
  template <int kPack>
  __device__ int64_t begin(int i) const {
    return (static_cast<int64_t>(static_cast<int>(blockIdx.x) - first_block[i]) * kBatchThreads + threadIdx.x) * kPack;
  }
  template <int kPack>
  __device__ int64_t step(int i) const {
    return static_cast<int64_t>(first_block[i + 1] - first_block[i]) * kBatchThreads * kPack;
  }
};

}  // namespace palimpsest::cuda
