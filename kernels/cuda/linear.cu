// Matrix products: cuBLASLt, or a plain kernel where the library has none (odd strides, tiny shapes).
//
// The library is column-major, so a row-major product C = A B is asked of it as C^T = B^T A^T. Adding to a C in bf16,
// it rounds the product first; adding to f32, nothing.
#include "kernels/linear.h"

#include <algorithm>

#include <bit>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace palimpsest::cuda {

namespace {

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;  // what NVIDIA recommends on Hopper

enum class Side : uint8_t { kPlain, kTransposed };

// A row-major operand of C [M, N] = op(A) op(B).
struct Operand {
  const Tensor& matrix;
  Side side;
};

constexpr int kTile = 16;

// One thread an element; tiles of both operands pass through shared memory.
template <class T, class Out>
__global__ void plain_product_kernel(int64_t M, int64_t N, int64_t K, Rows<T> a, bool a_transposed, Rows<T> b,
                                     bool b_transposed, Rows<Out> c, bool accumulate) {
  __shared__ float a_tile[kTile][kTile + 1], b_tile[kTile][kTile + 1];
  const int x = static_cast<int>(threadIdx.x) % kTile, y = static_cast<int>(threadIdx.x) / kTile;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kTile + y,
                column = static_cast<int64_t>(blockIdx.x) * kTile + x;
  float sum = 0.0F;
  for (int64_t first = 0; first < K; first += kTile) {
    const int64_t a_k = first + x, b_k = first + y;
    a_tile[y][x] = row < M && a_k < K ? to_f32(a_transposed ? a[a_k][row] : a[row][a_k]) : 0.0F;
    b_tile[y][x] = column < N && b_k < K ? to_f32(b_transposed ? b[column][b_k] : b[b_k][column]) : 0.0F;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += a_tile[y][k] * b_tile[k][x];
    __syncthreads();
  }
  if (row >= M || column >= N) return;
  Out* to = c[row] + column;
  *to = from_f32<Out>(accumulate ? to_f32(*to) + sum : sum);
}

void plain_product(const Stream& stream, const Tensor& c, int64_t K, const Operand& a, const Operand& b, Write write) {
  with_float(a.matrix.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto out) {
      using Out = decltype(out);
      launch(stream, plain_product_kernel<T, Out>,
             {.grid_x = ceil_div(c.dim(1), kTile), .grid_y = ceil_div(c.dim(0), kTile), .threads = kTile * kTile},
             c.dim(0), c.dim(1), K, Rows<T>(a.matrix), a.side == Side::kTransposed, Rows<T>(b.matrix),
             b.side == Side::kTransposed, Rows<Out>(c), write == Write::kAccumulate);
    };
    if (c.dtype() == DType::kF32)
      run(float{});
    else
      run(zero);
  });
}

// The largest power of two up to 256 that divides the address.
int64_t alignment_of(const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.raw());
  return address == 0 ? 256 : std::min<int64_t>(256, int64_t{1} << std::countr_zero(address));
}

// Compares what the library proposes, where there is scratch memory for a result that is then forgotten.
void choose(const Stream& stream, ProductPlan& plan, ProductRun run, const Tensor& c) {
  const Arena::Scope scope(stream.scratch());
  const int64_t free = stream.scratch().capacity() - stream.scratch().used() - Arena::kAlignment;
  const Shape all = {c.dim(0), std::max(c.row_stride(), c.dim(1))};
  if (all.numel() * size_of(c.dtype()) > free) return;
  run.d = stream.scratch().allocate(c.dtype(), all).raw();
  plan.choose(run, stream.engine().room());
}

// C [M, N] = op(A) [M, K] op(B) [K, N], or += ...
void product(const Stream& stream, const Tensor& c, int64_t K, const Operand& a, const Operand& b, Write write) {
  const Arena::Scope scope(stream.scratch());
  const Tensor workspace = stream.scratch().allocate(DType::kU8, {kWorkspaceBytes});
  if (stream.is_planning() || c.numel() == 0) return;
  // The library wants strides of at least a row, which a matrix of one row need not have.
  const auto stride = [](const Tensor& tensor) { return std::max(tensor.row_stride(), tensor.dim(1)); };
  const ProductKey key = {{c.dim(1), c.dim(0), K, stride(b.matrix), stride(a.matrix), stride(c),
                           b.side == Side::kTransposed ? 1 : 0, a.side == Side::kTransposed ? 1 : 0,
                           static_cast<int64_t>(a.matrix.dtype()), static_cast<int64_t>(c.dtype()),
                           alignment_of(b.matrix), alignment_of(a.matrix), alignment_of(c)}};
  if (K > 0) {
    ProductPlan& plan = stream.engine().plan(key, kWorkspaceBytes);
    if (plan.found()) {
      note_path(stream, "cuBLASLt");
      ProductRun run = {.blas = stream.engine().blas(),
                        .a = b.matrix.raw(),
                        .b = a.matrix.raw(),
                        .c = c.raw(),
                        .d = c.raw(),
                        .beta = write == Write::kAccumulate ? 1.0F : 0.0F,
                        .workspace = workspace.raw(),
                        .workspace_bytes = kWorkspaceBytes,
                        .queue = queue_of(stream)};
      if (plan.has_choice()) choose(stream, plan, run, c);
      plan.run(run);
      return;
    }
  }
  CHECK(ceil_div(c.dim(0), kTile) <= 65535, "no product of ", a.matrix.str(), " and ", b.matrix.str());
  note_path(stream, "plain");
  plain_product(stream, c, K, a, b, write);
}

}  // namespace

void linear_forward(Stream& stream, Tensor y, const Tensor& x, const Tensor& w, Write write) {
  const Arena::Scope scope(stream.scratch());
  const Tensor weight = rounded_weight(stream, w, x.dtype());
  product(stream, y, x.dim(1), {x, Side::kPlain}, {weight, Side::kTransposed}, write);
}

void linear_backward_input(Stream& stream, Tensor dx, const Tensor& dy, const Tensor& w, Write write) {
  const Arena::Scope scope(stream.scratch());
  const Tensor weight = rounded_weight(stream, w, dy.dtype());
  product(stream, dx, dy.dim(1), {dy, Side::kPlain}, {weight, Side::kPlain}, write);
}

void linear_backward_weight(Stream& stream, Tensor dw, const Tensor& dy, const Tensor& x) {
  product(stream, dw, dy.dim(0), {dy, Side::kTransposed}, {x, Side::kPlain}, Write::kAccumulate);
}

}  // namespace palimpsest::cuda
