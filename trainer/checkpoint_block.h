// What a checkpoint is made of: rectangular blocks of global tensors. A dataset of a rank's file is one block; loading
// puts any region of a tensor together from the blocks that overlap it. Which blocks a rank writes and reads follows
// from its registry alone: its part of the tensor group (Parameter::block) and its rows of that (Parameter::shard).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "model/parameters.h"

namespace palimpsest {

enum class CheckpointContent : uint8_t { kWeights, kWeightsAndOptimizer };

// A rectangular part of a tensor; start and shape have as many dimensions as the tensor.
struct Region {
  Shape start;
  Shape shape;
  bool operator==(const Region&) const = default;
};
Region whole_region(const Shape& shape);
std::vector<int64_t> extents_of(const Shape& shape);
std::optional<Region> overlap(const Region& a, const Region& b);

struct CheckpointBlock {
  std::string name;  // of the dataset: "model/<parameter>", "adam_m/<parameter>" or "adam_v/<parameter>"
  Shape global_shape;
  Shape start;    // of the block in the global tensor
  Tensor tensor;  // [block] f32, or f64 in f64 runs; contiguous

  Region region() const { return {start, tensor.shape()}; }
};

// What this rank writes, in declaration order: of every tensor the rows that it owns, so that all ranks together write
// each element once. kWeightsAndOptimizer needs a registry bound for training.
std::vector<CheckpointBlock> owned_blocks(const ParameterRegistry& registry, CheckpointContent content);

// What it reads: the rows of its shard, copies that other tensor ranks hold too among them. The rest of the values
// comes from the other ranks (ParameterHooks::values_changed), so that files are read once, not by every rank.
std::vector<CheckpointBlock> wanted_blocks(const ParameterRegistry& registry, CheckpointContent content);

// The file size that these blocks need, from above (bytes).
int64_t stored_bytes(const std::vector<CheckpointBlock>& blocks);

// Cuts a tensor of this shape into pieces of at most 4 MiB, even in size and each contiguous, in the order of memory.
void for_each_piece(const Shape& shape, DType dtype, const std::function<void(const Region&)>& body);
// Bytes of the first piece, which is the largest.
int64_t piece_bytes(const Shape& shape, DType dtype);

// Copies `values`, elements of `piece` row by row, to where they belong in `out`, which holds `wanted`. Converts
// between f32 and f64. Both regions are in global coordinates and the piece lies in the wanted region.
void copy_piece(const Region& piece, std::span<const std::byte> values, DType dtype, const Region& wanted,
                const Tensor& out);

}  // namespace palimpsest
