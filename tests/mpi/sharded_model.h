// Parameters cut in every way, on any layout, whose values say which element of which tensor they are.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/arena.h"
#include "model/parameters.h"
#include "parallel/mesh.h"
#include "trainer/checkpoint_block.h"
#include "trainer/checkpoint_manifest.h"

namespace palimpsest::mpi_test {

std::vector<ParameterSpec> specs_of_every_cut();

class ShardedModel {
 public:
  explicit ShardedModel(const Mesh& mesh, int64_t zero = 1);
  ParameterRegistry& registry() { return registry_; }
  std::vector<CheckpointBlock> owned() const {
    return owned_blocks(registry_, CheckpointContent::kWeightsAndOptimizer);
  }
  std::vector<CheckpointBlock> wanted() const {
    return wanted_blocks(registry_, CheckpointContent::kWeightsAndOptimizer);
  }
  void fill(int64_t step);  // the shards
  void clear();             // they become NaN
  // Elements of these blocks that are not those of `step`.
  static int64_t num_wrong(const std::vector<CheckpointBlock>& blocks, int64_t step);

 private:
  ParameterRegistry registry_;
  std::vector<Arena> arenas_;
};

CheckpointHeader header_of(int64_t step, const Mesh& mesh);
int64_t bytes_of(const std::vector<CheckpointBlock>& blocks);

}  // namespace palimpsest::mpi_test
