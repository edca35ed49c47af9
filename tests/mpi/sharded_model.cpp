#include "tests/mpi/sharded_model.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "kernels/random.h"

namespace palimpsest::mpi_test {

namespace {

float value_of(const CheckpointBlock& block, int64_t step, int64_t global_index) {
  const uint64_t bits =
      random_bits(static_cast<uint64_t>(step), hash_of(block.name), static_cast<uint64_t>(global_index));
  return static_cast<float>(static_cast<int64_t>(bits % 2000003) - 1000001) / 3e5F;
}

// `body` gets each element with its index in the whole tensor.
void for_each_element(const CheckpointBlock& block, const std::function<void(float&, int64_t global_index)>& body) {
  auto* values = block.tensor.data<float>();
  const Shape &global = block.global_shape, &shape = block.tensor.shape();
  for (int64_t i = 0; i < shape.numel(); ++i) {
    int64_t rest = i, index = 0, stride = 1;
    for (int dim = global.num_dims() - 1; dim >= 0; --dim) {
      index += (block.start[dim] + rest % shape[dim]) * stride;
      rest /= shape[dim];
      stride *= global[dim];
    }
    body(values[i], index);
  }
}

}  // namespace

std::vector<ParameterSpec> specs_of_every_cut() {
  return {{.name = "embed.weight", .shape = {53, 12}},
          {.name = "q_proj.weight", .shape = {20, 12}, .units = 4},
          {.name = "k_proj.weight", .shape = {10, 12}, .units = 2},  // copies where there are more ranks than heads
          {.name = "conv.weight", .shape = {12, 1, 4}, .units = 4},
          {.name = "A_log", .shape = {4}, .units = 4},
          {.name = "o_proj.weight", .shape = {9, 20}, .split = TensorSplit::kColumns, .units = 4},
          {.name = "down_proj.weight", .shape = {7, 13}, .split = TensorSplit::kColumns},
          {.name = "norm.weight", .shape = {12}, .split = TensorSplit::kPartialOverTokens},
          {.name = "f_a.weight", .shape = {5, 12}, .split = TensorSplit::kPartialOverHeads}};
}

ShardedModel::ShardedModel(const Mesh& mesh, int64_t zero)
    : registry_({.rank = mesh.tensor().rank(), .size = mesh.tensor().size()},
                {.rank = mesh.replica().rank(), .size = mesh.replica().size(), .zero = zero}) {
  for (const ParameterSpec& spec : specs_of_every_cut()) registry_.declare(spec);
  const char* const names[] = {"parameters", "gradients", "optimizer"};
  arenas_.reserve(6);
  for (const char* name : names) arenas_.push_back(Arena::planning(name, Device::kCpu));
  registry_.bind(DType::kF32, ParameterUse::kTraining, arenas_[0], arenas_[1], arenas_[2]);
  for (size_t i = 0; i < 3; ++i) arenas_.emplace_back(names[i], Device::kCpu, arenas_[i].peak());
  registry_.bind(DType::kF32, ParameterUse::kTraining, arenas_[3], arenas_[4], arenas_[5]);
  clear();
}

void ShardedModel::fill(int64_t step) {
  for (const CheckpointBlock& block : wanted())
    for_each_element(block, [&](float& value, int64_t index) { value = value_of(block, step, index); });
}

void ShardedModel::clear() {
  for (const CheckpointBlock& block : wanted())
    std::fill_n(block.tensor.data<float>(), block.tensor.numel(), std::numeric_limits<float>::quiet_NaN());
}

int64_t ShardedModel::num_wrong(const std::vector<CheckpointBlock>& blocks, int64_t step) {
  int64_t wrong = 0;
  for (const CheckpointBlock& block : blocks)
    for_each_element(block, [&](const float& value, int64_t index) { wrong += value != value_of(block, step, index); });
  return wrong;
}

CheckpointHeader header_of(int64_t step, const Mesh& mesh) {
  const MeshShape& shape = mesh.shape();
  CheckpointHeader header;
  header.state.step = step;
  header.state.sampler_position = step * 7;
  header.world = {shape.ranks(), shape.data, shape.sequence, shape.tensor, 1};
  header.config = "model: {hidden_size: 12}\n";
  header.program = "palimpsest test";
  return header;
}

int64_t bytes_of(const std::vector<CheckpointBlock>& blocks) {
  int64_t bytes = 0;
  for (const CheckpointBlock& block : blocks) bytes += block.tensor.bytes();
  return bytes;
}

}  // namespace palimpsest::mpi_test
