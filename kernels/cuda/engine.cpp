#include "kernels/cuda/engine.h"

#include <algorithm>

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
  // Small products are not worth a choice.
  constexpr double kLargeProduct = 1e9;
  constexpr int kMostProposals = 8;
  const bool is_large = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) > kLargeProduct;
  std::array<cublasLtMatmulHeuristicResult_t, kMostProposals> results = {};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(blas, product_, a_, b_, c_, c_, preference,
                                                               is_large ? kMostProposals : 1, results.data(), &count);
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  found_ = status == CUBLAS_STATUS_SUCCESS && count > 0;
  algorithm_ = results[0].algo;
  for (int i = 1; i < count; ++i) others_.push_back(results[static_cast<size_t>(i)].algo);
  const int64_t element = size_of(static_cast<DType>(c_type));
  rows_ = n;
  row_bytes_ = m * element;
  stride_bytes_ = ldc * element;
}

ProductPlan::~ProductPlan() {
  cublasLtMatrixLayoutDestroy(c_);
  cublasLtMatrixLayoutDestroy(b_);
  cublasLtMatrixLayoutDestroy(a_);
  cublasLtMatmulDescDestroy(product_);
}

void ProductPlan::run_with(const cublasLtMatmulAlgo_t& algorithm, const ProductRun& run) const {
  const float alpha = 1.0F;
  CUBLAS_CHECK(cublasLtMatmul(run.blas, product_, &alpha, run.a, a_, run.b, b_, &run.beta, run.c, c_, run.d, c_,
                              &algorithm, run.workspace, static_cast<size_t>(run.workspace_bytes), run.queue));
}

uint64_t ProductPlan::bits_of(const cublasLtMatmulAlgo_t& algorithm, const ProductRun& run, uint64_t* room) const {
  run_with(algorithm, run);
  fingerprint(run.queue, room, run.d, rows_, row_bytes_, stride_bytes_);
  uint64_t bits = 0;
  CUDA_CHECK(cudaMemcpyAsync(&bits, room, sizeof(bits), cudaMemcpyDeviceToHost, run.queue));
  CUDA_CHECK(cudaStreamSynchronize(run.queue));
  return bits;
}

float ProductPlan::time_of(const cublasLtMatmulAlgo_t& algorithm, const ProductRun& run) const {
  constexpr int kTries = 5;
  std::array<float, kTries> times = {};
  cudaEvent_t begin = nullptr, end = nullptr;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  for (float& time : times) {
    CUDA_CHECK(cudaEventRecord(begin, run.queue));
    run_with(algorithm, run);
    CUDA_CHECK(cudaEventRecord(end, run.queue));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&time, begin, end));
  }
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + kTries / 2, times.end());
  return times[kTries / 2];
}

void ProductPlan::choose(const ProductRun& run, uint64_t* room) {
  constexpr float kWorthwhile = 0.98F;
  const uint64_t expected = bits_of(algorithm_, run, room);
  if (expected == 0) return;  // zeros tell nothing
  float best = kWorthwhile * time_of(algorithm_, run);
  for (const cublasLtMatmulAlgo_t& other : others_) {
    if (bits_of(other, run, room) != expected) continue;
    const float time = time_of(other, run);
    if (time >= best) continue;
    best = time;
    algorithm_ = other;
  }
  others_.clear();
}

Engine::Engine() {
  CUDA_CHECK(cudaStreamCreateWithFlags(&queue_, cudaStreamNonBlocking));
  CUBLAS_CHECK(cublasLtCreate(&blas_));
  CUDA_CHECK(cudaMalloc(&room_, sizeof(*room_)));
}

Engine::~Engine() {
  fused_attention_.reset();
  plans_.clear();
  cudaFree(room_);
  if (blas_ != nullptr) cublasLtDestroy(blas_);
  if (queue_ != nullptr) {
    cudaStreamSynchronize(queue_);
    cudaStreamDestroy(queue_);
  }
}

ProductPlan& Engine::plan(const ProductKey& key, int64_t workspace_bytes) {
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
