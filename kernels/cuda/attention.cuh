// What the kernels of attention share: blocks of queries or keys, counted from a document's start.
#pragma once

#include <vector>

#include "kernels/cuda/documents.cuh"
#include "kernels/cuda/tile.cuh"

namespace palimpsest::cuda {

constexpr int kAttentionThreads = 256;
constexpr int kBlock = 64;  // rows of a resident block
constexpr int kMaxHeadSize = 256;
constexpr int kMaxUnits = kMaxHeadSize / 64;  // of a [kBlock, head size] result that a warp owns

// Blocks of kBlock rows of every document.
struct BlockList {
  DocumentList documents;
  const int64_t* first_block = nullptr;  // [documents + 1]
  int64_t num_blocks = 0;

  // The document of a block; first: the block's first row in it.
  __device__ int64_t find(int64_t block, int64_t* first) const {
    int64_t low = 0, high = documents.count - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_block[middle] <= block)
        low = middle;
      else
        high = middle - 1;
    }
    *first = (block - first_block[low]) * kBlock;
    return low;
  }
};

inline BlockList make_blocks(const Stream& stream, const Documents& documents) {
  std::vector<int64_t> first_block = {0};
  for (int64_t document = 0; document < documents.count(); ++document)
    first_block.push_back(first_block.back() + ceil_div(documents.length(document), kBlock));
  return {upload(stream, documents), upload_numbers(stream, first_block), first_block.back()};
}

// One head of a [tokens, heads, size] tensor.
template <class T>
struct HeadRows {
  Rows<T> rows;
  int64_t size = 0;
  bool packed = false;

  HeadRows() = default;
  explicit HeadRows(const Tensor& tensor)
      : rows(tensor), size(tensor.dim(2)), packed(packed_rows(rows, tensor.dim(2))) {}
  __device__ T* at(int64_t token, int64_t head) const { return rows[token] + head * size; }
  // Rows of a head into shared memory, zero past n and beyond the size.
  __device__ void load(T* to, int ld, int num_rows, int columns, int64_t token, int64_t head, int64_t n) const {
    load_tile(to, ld, num_rows, columns, at(token, head), rows.stride, n, size, packed);
  }
};

inline int padded_size(int64_t size) {
  return static_cast<int>(ceil_div(size, kUnitColumns)) * kUnitColumns;
}

inline void check_head_sizes(const Tensor& q, const Tensor& v) {
  CHECK(q.dim(2) <= kMaxHeadSize && v.dim(2) <= kMaxHeadSize, "attention on cuda: heads of ", q.dim(2), " and ",
        v.dim(2), "; at most ", kMaxHeadSize, " are supported");
}

}  // namespace palimpsest::cuda
