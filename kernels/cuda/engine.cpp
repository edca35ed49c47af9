#include "kernels/cuda/engine.h"

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/check.h"

namespace palimpsest::cuda {

namespace {

cudaDataType_t data_type(int64_t dtype) {
  return static_cast<DType>(dtype) == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

}  // namespace

ProductPlan::ProductPlan(cublasLtHandle_t blas, const ProductKey& key, int64_t workspace_bytes) {
  const auto [m, n, k, lda, ldb, ldc, a_transposed, b_transposed, ab_type, c_type, a_align, b_align, c_align] =
      key.numbers;
  // CUBLAS_COMPUTE_32F multiplies f32 in f32 and sums bf16 products in f32.
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const auto set_transposed = [&](cublasLtMatmulDescAttributes_t which, int64_t transposed) {
    const cublasOperation_t operation = transposed != 0 ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(product_, which, &operation, sizeof(operation)));
  };
  set_transposed(CUBLASLT_MATMUL_DESC_TRANSA, a_transposed);
  set_transposed(CUBLASLT_MATMUL_DESC_TRANSB, b_transposed);
  const auto rows = [](int64_t plain, int64_t flipped, int64_t transposed) {
    return static_cast<uint64_t>(transposed != 0 ? flipped : plain);
  };
  CUBLAS_CHECK(
      cublasLtMatrixLayoutCreate(&a_, data_type(ab_type), rows(m, k, a_transposed), rows(k, m, a_transposed), lda));
  CUBLAS_CHECK(
      cublasLtMatrixLayoutCreate(&b_, data_type(ab_type), rows(k, n, b_transposed), rows(n, k, b_transposed), ldb));
  CUBLAS_CHECK(
      cublasLtMatrixLayoutCreate(&c_, data_type(c_type), static_cast<uint64_t>(m), static_cast<uint64_t>(n), ldc));

  cublasLtMatmulPreference_t preference = nullptr;
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof(value)));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_bytes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(a_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(b_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(c_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(c_align));
  cublasLtMatmulHeuristicResult_t result = {};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(blas, product_, a_, b_, c_, c_, preference, 1, &result, &count);
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  found_ = status == CUBLAS_STATUS_SUCCESS && count > 0;
  algorithm_ = result.algo;
}

ProductPlan::~ProductPlan() {
  cublasLtMatrixLayoutDestroy(c_);
  cublasLtMatrixLayoutDestroy(b_);
  cublasLtMatrixLayoutDestroy(a_);
  cublasLtMatmulDescDestroy(product_);
}

void ProductPlan::run(cublasLtHandle_t blas, const void* a, const void* b, void* c, float beta, void* workspace,
                      int64_t workspace_bytes, cudaStream_t queue) const {
  const float alpha = 1.0F;
  CUBLAS_CHECK(cublasLtMatmul(blas, product_, &alpha, a, a_, b, b_, &beta, c, c_, c, c_, &algorithm_, workspace,
                              static_cast<size_t>(workspace_bytes), queue));
}

Engine::Engine() {
  CUDA_CHECK(cudaStreamCreateWithFlags(&queue_, cudaStreamNonBlocking));
  CUBLAS_CHECK(cublasLtCreate(&blas_));
}

Engine::~Engine() {
  fused_attention_.reset();
  plans_.clear();
  if (blas_ != nullptr) cublasLtDestroy(blas_);
  if (queue_ != nullptr) {
    cudaStreamSynchronize(queue_);
    cudaStreamDestroy(queue_);
  }
}

const ProductPlan& Engine::plan(const ProductKey& key, int64_t workspace_bytes) {
  std::unique_ptr<ProductPlan>& plan = plans_[key];
  if (plan == nullptr) plan = std::make_unique<ProductPlan>(blas_, key, workspace_bytes);
  return *plan;
}

FusedAttention& Engine::fused_attention() {
  if (fused_attention_ == nullptr) fused_attention_ = std::make_unique<FusedAttention>(queue_);
  return *fused_attention_;
}

Engine* make_engine() {
  return std::make_unique<Engine>().release();
}

void destroy_engine(Engine* engine) noexcept {
  std::unique_ptr<Engine> owned(engine);
}

}  // namespace palimpsest::cuda
