// What a stream on a GPU owns: the queue that kernels go into, and cuBLASLt with the plans of the products that it has
// run.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <array>
#include <map>
#include <memory>
#include <vector>

#include "kernels/stream.h"

namespace palimpsest::cuda {

// A matrix product as cuBLASLt sees it, column-major: C [m, n] = alpha * op(A) op(B) + beta * C.
struct ProductKey {
  // m, n, k, lda, ldb, ldc, transposition of A and B, their type, the type of C, alignments of A, B, C in bytes
  std::array<int64_t, 13> numbers;
  bool operator<(const ProductKey& other) const { return numbers < other.numbers; }
};

// Where a product's operands lie, and what it needs to run: D = alpha * op(A) op(B) + beta * C.
struct ProductRun {
  cublasLtHandle_t blas;
  const void *a, *b, *c;
  void* d;  // laid out as C, which it may be
  float beta;
  void* workspace;
  int64_t workspace_bytes;
  cudaStream_t queue;
};

// The descriptors of a product and the algorithm that runs it: the library's first proposal, until choose() has
// compared it with the others.
class ProductPlan {
 public:
  ProductPlan(cublasLtHandle_t blas, const ProductKey& key, int64_t workspace_bytes);
  ~ProductPlan();
  ProductPlan(const ProductPlan&) = delete;
  ProductPlan& operator=(const ProductPlan&) = delete;

  bool found() const { return found_; }  // false: the library cannot do this product
  void run(const ProductRun& run) const { run_with(algorithm_, run); }

  // Large products have a choice. Every proposal computes this product, and of those that give the same bits as the
  // first the fastest is kept: what comes out does not depend on what was measured. `room` is a number on the GPU.
  bool has_choice() const { return !others_.empty(); }
  void choose(const ProductRun& run, uint64_t* room);

 private:
  void run_with(const cublasLtMatmulAlgo_t& algorithm, const ProductRun& run) const;
  uint64_t bits_of(const cublasLtMatmulAlgo_t& algorithm, const ProductRun& run, uint64_t* room) const;
  float time_of(const cublasLtMatmulAlgo_t& algorithm, const ProductRun& run) const;  // ms

  int64_t rows_ = 0, row_bytes_ = 0, stride_bytes_ = 0;  // of C as it lies in memory
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_ = {};
  std::vector<cublasLtMatmulAlgo_t> others_;  // to be tried
  bool found_ = false;
};

class FusedAttention;

class Engine {
 public:
  Engine();
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  cudaStream_t queue() const { return queue_; }
  cublasLtHandle_t blas() const { return blas_; }
  ProductPlan& plan(const ProductKey& key, int64_t workspace_bytes);
  uint64_t* room() const { return room_; }
  FusedAttention& fused_attention();  // see kernels/cuda/attention_cudnn.h; made when first asked for

  // Ops that have more than one kind of kernel leave the name of the one that ran here, see take_last_path().
  void note_path(const char* path) { path_ = path; }
  const char* path() const { return path_; }

 private:
  cudaStream_t queue_ = nullptr;
  cublasLtHandle_t blas_ = nullptr;
  const char* path_ = "";
  std::map<ProductKey, std::unique_ptr<ProductPlan>> plans_;
  std::unique_ptr<FusedAttention> fused_attention_;
  uint64_t* room_ = nullptr;  // one number on the GPU
};

// A number made of the bits of rows in memory, in `room` on the GPU; 0 for zeros. Defined in fingerprint.cu.
void fingerprint(cudaStream_t queue, uint64_t* room, const void* data, int64_t rows, int64_t row_bytes,
                 int64_t stride_bytes);

inline void note_path(const Stream& stream, const char* path) {
  if (!stream.is_planning()) stream.engine().note_path(path);
}

inline cudaStream_t queue_of(const Stream& stream) {
  return stream.engine().queue();
}

}  // namespace palimpsest::cuda
