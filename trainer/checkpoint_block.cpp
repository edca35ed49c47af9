#include "trainer/checkpoint_block.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/check.h"
#include "trainer/replica.h"

namespace palimpsest {

namespace {

constexpr int64_t kMaxPieceBytes = int64_t{4} << 20;

Shape with_extent(const Shape& shape, int dim, int64_t extent) {
  Shape result;
  for (int i = 0; i < shape.num_dims(); ++i) result.push_back(i == dim ? extent : shape[i]);
  return result;
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

void cut(const Region& region, int64_t element_size, const std::function<void(const Region&)>& body) {
  const int64_t bytes = region.shape.numel() * element_size;
  int dim = 0;
  while (dim < region.shape.num_dims() && region.shape[dim] == 1) ++dim;
  if (bytes <= kMaxPieceBytes || dim == region.shape.num_dims()) return body(region);
  const int64_t extent = region.shape[dim];
  const int64_t most = std::max<int64_t>(1, kMaxPieceBytes / (bytes / extent));
  const int64_t step = ceil_div(extent, ceil_div(extent, most));
  for (int64_t done = 0; done < extent; done += step)
    cut({with_extent(region.start, dim, region.start[dim] + done),
         with_extent(region.shape, dim, std::min(step, extent - done))},
        element_size, body);
}

// The shard's rows of the parameter's tensors; nothing where it has none.
void add_blocks(std::vector<CheckpointBlock>& blocks, const Parameter& parameter, CheckpointContent content) {
  const Shape& start = parameter.block.start;
  const auto add = [&](const char* part, const Tensor& tensor) {
    CHECK(tensor.defined(), part, " of ", parameter.spec.name, " is not bound");
    if (tensor.numel() > 0)
      blocks.push_back({std::string(part) + "/" + parameter.spec.name, parameter.spec.shape,
                        with_extent(start, 0, start[0] + parameter.shard.begin), tensor});
  };
  add("model", parameter.value_shard);
  if (content == CheckpointContent::kWeights) return;
  add("adam_m", parameter.adam_m);
  add("adam_v", parameter.adam_v);
}

template <class From, class To>
void copy_elements(const Region& piece, const From* values, const Region& wanted, const Tensor& out) {
  const int last = piece.shape.num_dims() - 1;
  const int64_t run = piece.shape[last];  // contiguous in both
  Shape strides = wanted.shape;           // elements from one index of a dimension to the next
  int64_t stride = 1;
  for (int i = last; i >= 0; --i) {
    strides = with_extent(strides, i, i == 0 ? out.row_stride() : stride);
    stride *= wanted.shape[i];
  }
  To* base = out.data<To>();
  const int64_t num_runs = piece.shape.numel() / run;
  for (int64_t n = 0; n < num_runs; ++n, values += run) {
    int64_t offset = (piece.start[last] - wanted.start[last]) * strides[last];
    int64_t rest = n;
    for (int i = last - 1; i >= 0; --i) {
      offset += (piece.start[i] - wanted.start[i] + rest % piece.shape[i]) * strides[i];
      rest /= piece.shape[i];
    }
    std::transform(values, values + run, base + offset, [](From value) { return static_cast<To>(value); });
  }
}

}  // namespace

Region whole_region(const Shape& shape) {
  Region region;
  region.shape = shape;
  for (int i = 0; i < shape.num_dims(); ++i) region.start.push_back(0);
  return region;
}

std::vector<int64_t> extents_of(const Shape& shape) {
  std::vector<int64_t> extents(shape.num_dims());
  for (int i = 0; i < shape.num_dims(); ++i) extents[i] = shape[i];
  return extents;
}

std::optional<Region> overlap(const Region& a, const Region& b) {
  Region both;
  for (int i = 0; i < a.shape.num_dims(); ++i) {
    const int64_t start = std::max(a.start[i], b.start[i]);
    const int64_t end = std::min(a.start[i] + a.shape[i], b.start[i] + b.shape[i]);
    if (start >= end) return std::nullopt;
    both.start.push_back(start);
    both.shape.push_back(end - start);
  }
  return both;
}

std::vector<CheckpointBlock> owned_blocks(const ParameterRegistry& registry, CheckpointContent content) {
  std::vector<CheckpointBlock> blocks;
  for (const Parameter& parameter : registry.parameters())
    if (counts_in_sums(registry.tensor_share(), parameter)) add_blocks(blocks, parameter, content);
  return blocks;
}

std::vector<CheckpointBlock> wanted_blocks(const ParameterRegistry& registry, CheckpointContent content) {
  std::vector<CheckpointBlock> blocks;
  for (const Parameter& parameter : registry.parameters()) add_blocks(blocks, parameter, content);
  return blocks;
}

int64_t stored_bytes(const std::vector<CheckpointBlock>& blocks) {
  // Object headers, attributes and chunk indices take about 2 KiB a dataset; the manifest about 400 bytes a dataset
  // beside the config. Every chunk is stored whole.
  constexpr int64_t kPerDataset = 4096, kPerFile = 256 << 10, kPerChunk = 64;
  int64_t total = kPerFile;
  for (const CheckpointBlock& block : blocks) {
    const int64_t chunk = piece_bytes(block.tensor.shape(), block.tensor.dtype());
    int64_t num_chunks = 0;
    for_each_piece(block.tensor.shape(), block.tensor.dtype(), [&](const Region&) { ++num_chunks; });
    total += kPerDataset + static_cast<int64_t>(block.name.size()) * 2 + num_chunks * (chunk + kPerChunk);
  }
  return total;
}

void for_each_piece(const Shape& shape, DType dtype, const std::function<void(const Region&)>& body) {
  if (shape.numel() > 0) cut(whole_region(shape), size_of(dtype), body);
}

int64_t piece_bytes(const Shape& shape, DType dtype) {
  int64_t bytes = 0;
  for_each_piece(shape, dtype,
                 [&](const Region& piece) { bytes = std::max(bytes, piece.shape.numel() * size_of(dtype)); });
  return bytes;
}

void copy_piece(const Region& piece, std::span<const std::byte> values, DType dtype, const Region& wanted,
                const Tensor& out) {
  CHECK(static_cast<int64_t>(values.size()) == piece.shape.numel() * size_of(dtype), "piece ", piece.shape.str());
  CHECK(out.shape() == wanted.shape, "region ", wanted.shape.str(), " into ", out.str());
  const auto from = [&](auto zero) {
    using From = decltype(zero);
    const auto* elements = reinterpret_cast<const From*>(values.data());
    if (out.dtype() == DType::kF64) return copy_elements<From, double>(piece, elements, wanted, out);
    copy_elements<From, float>(piece, elements, wanted, out);
  };
  if (dtype == DType::kF64) return from(double{});
  from(float{});
}

}  // namespace palimpsest
