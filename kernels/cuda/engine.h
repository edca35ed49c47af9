// What a stream on a GPU owns: the queue that kernels go into, and cuBLASLt with the plans of the products that it has
// run.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <array>
#include <map>
#include <memory>

#include "kernels/stream.h"

namespace palimpsest::cuda {

// A matrix product as cuBLASLt sees it, column-major: C [m, n] = alpha * op(A) op(B) + beta * C.
struct ProductKey {
  // m, n, k, lda, ldb, ldc, transposition of A and B, their type, the type of C, alignments of A, B, C in bytes
  std::array<int64_t, 13> numbers;
  bool operator<(const ProductKey& other) const { return numbers < other.numbers; }
};

// The descriptors of a product and the algorithm that the library proposes for it.
class ProductPlan {
 public:
  ProductPlan(cublasLtHandle_t blas, const ProductKey& key, int64_t workspace_bytes);
  ~ProductPlan();
  ProductPlan(const ProductPlan&) = delete;
  ProductPlan& operator=(const ProductPlan&) = delete;

  bool found() const { return found_; }  // false: the library cannot do this product
  void run(cublasLtHandle_t blas, const void* a, const void* b, void* c, float beta, void* workspace,
           int64_t workspace_bytes, cudaStream_t queue) const;

 private:
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_ = {};
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
  const ProductPlan& plan(const ProductKey& key, int64_t workspace_bytes);
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
};

inline void note_path(const Stream& stream, const char* path) {
  if (!stream.is_planning()) stream.engine().note_path(path);
}

inline cudaStream_t queue_of(const Stream& stream) {
  return stream.engine().queue();
}

}  // namespace palimpsest::cuda
