#include "kernels/cuda/documents.cuh"

#include <algorithm>
#include <vector>

namespace palimpsest::cuda {

namespace {

constexpr int kNumbers = 480;  // of one launch: 4 KiB of arguments are allowed everywhere

struct Numbers {
  int64_t values[kNumbers];
};

__global__ void store_numbers_kernel(int64_t* to, const __grid_constant__ Numbers numbers, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) to[i] = numbers.values[i];
}

// Whether document i has row i of states.
bool has_states_in_order(const Documents& documents) {
  for (int64_t i = 0; i < documents.count(); ++i)
    if (documents.entering(i) != i || documents.leaving(i) != i) return false;
  return true;
}

}  // namespace

const int64_t* upload_numbers(const Stream& stream, const std::vector<int64_t>& numbers) {
  const auto count = static_cast<int64_t>(numbers.size());
  auto* to = stream.scratch().allocate(DType::kI64, {count}).data<int64_t>();
  for (int64_t first = 0; first < count; first += kNumbers) {
    const int64_t n = std::min<int64_t>(kNumbers, count - first);
    Numbers piece = {};
    std::copy_n(numbers.begin() + first, n, piece.values);
    launch(stream, store_numbers_kernel, {.threads = 128}, to + first, piece, n);
  }
  return to;
}

DocumentList upload(const Stream& stream, const Documents& documents) {
  DocumentList list = {upload_numbers(stream, documents.offsets()), documents.count()};
  if (has_states_in_order(documents)) return list;
  std::vector<int64_t> entering, leaving;
  for (int64_t i = 0; i < documents.count(); ++i) {
    entering.push_back(documents.entering(i));
    leaving.push_back(documents.leaving(i));
  }
  list.entering_rows = upload_numbers(stream, entering);
  list.leaving_rows = upload_numbers(stream, leaving);
  return list;
}

}  // namespace palimpsest::cuda
