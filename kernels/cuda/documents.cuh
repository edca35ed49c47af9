// The documents of a batch as kernels see them.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/documents.h"

namespace palimpsest::cuda {

struct DocumentList {
  const int64_t* offsets = nullptr;  // [count + 1], on the GPU
  int64_t count = 0;
  // [count] rows of states, -1: none; null where document i has row i.
  const int64_t* entering_rows = nullptr;
  const int64_t* leaving_rows = nullptr;

  __device__ int64_t entering(int64_t document) const {
    return entering_rows == nullptr ? document : entering_rows[document];
  }
  __device__ int64_t leaving(int64_t document) const {
    return leaving_rows == nullptr ? document : leaving_rows[document];
  }
  __device__ int64_t begin(int64_t document) const { return offsets[document]; }
  __device__ int64_t end(int64_t document) const { return offsets[document + 1]; }
  __device__ int64_t length(int64_t document) const { return end(document) - begin(document); }
  // The document that owns a token: the last that begins at or before it.
  __device__ int64_t owner_of(int64_t token) const {
    int64_t low = 0, high = count - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (offsets[middle] <= token)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }
};

// Copies host numbers into scratch memory as arguments of kernels: no host memory has to outlive the call, and the
// queue is not waited for.
const int64_t* upload_numbers(const Stream& stream, const std::vector<int64_t>& numbers);

// The offsets, and the rows of states where they are not those of the documents, in scratch memory.
DocumentList upload(const Stream& stream, const Documents& documents);

}  // namespace palimpsest::cuda
