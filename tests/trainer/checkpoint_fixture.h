// A small set of parameters of odd shapes with values that depend on a seed, for tests of checkpoints.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/arena.h"
#include "kernels/random.h"
#include "model/parameters.h"
#include "tests/support/files.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/checkpoint_writer.h"

namespace palimpsest {

class SmallModel {
 public:
  using Specs = std::vector<std::pair<std::string, Shape>>;
  static Specs specs() {
    return {{"model.embed_tokens.weight", {67, 12}},
            {"model.layers.0.self_attn.A_log", {3}},
            {"model.layers.0.self_attn.q_conv1d.weight", {7, 1, 4}},
            {"model.layers.0.mlp.gate_proj.weight", {11, 12}},
            {"model.norm.weight", {12}}};
  }
  static Specs specs_with_large_tensors() {  // more than one piece each
    Specs all = specs();
    all.push_back({"model.layers.0.mlp.down_proj.weight", {523, 2053}});  // pieces of whole rows
    all.push_back({"lm_head.weight", {2, 1050001}});                      // pieces of a row
    return all;
  }

  explicit SmallModel(const Specs& specs = SmallModel::specs(), DType dtype = DType::kF32,
                      ParameterUse use = ParameterUse::kTraining) {
    for (const auto& [name, shape] : specs) registry_.declare({name, shape});
    Arena values = Arena::planning("parameters", Device::kCpu), grads = Arena::planning("gradients", Device::kCpu),
          moments = Arena::planning("optimizer", Device::kCpu);
    registry_.bind(dtype, use, values, grads, moments);
    arenas_.reserve(3);
    arenas_.emplace_back("parameters", Device::kCpu, values.peak());
    arenas_.emplace_back("gradients", Device::kCpu, grads.peak());
    arenas_.emplace_back("optimizer", Device::kCpu, moments.peak());
    registry_.bind(dtype, use, arenas_[0], arenas_[1], arenas_[2]);
    fill(0);
  }

  ParameterRegistry& registry() { return registry_; }

  std::vector<CheckpointBlock> blocks() const {
    const bool trains = registry_.parameters().front().adam_m.defined();
    return owned_blocks(registry_, trains ? CheckpointContent::kWeightsAndOptimizer : CheckpointContent::kWeights);
  }

  // Values of training step `step`: all different, of either sign, some tiny, and A_log = 0.001.
  void fill(uint64_t step) {
    for (const CheckpointBlock& block : blocks()) {
      const uint64_t stream = hash_of(block.name);
      const int64_t count = block.tensor.numel();
      const auto values = [&](auto* out) {
        for (int64_t i = 0; i < count; ++i) {
          const uint64_t bits = random_bits(step, stream, static_cast<uint64_t>(i));
          out[i] = static_cast<std::remove_pointer_t<decltype(out)>>(static_cast<double>(bits % 2000003) - 1000001.0) /
                   (bits % 7 == 0 ? 1e30F : 3e5F);
        }
        if (block.name == "model/model.layers.0.self_attn.A_log") out[0] = 0.001F;
      };
      if (block.tensor.dtype() == DType::kF64)
        values(block.tensor.data<double>());
      else
        values(block.tensor.data<float>());
    }
  }

  // Every byte of every tensor.
  std::string bytes() const {
    std::string all;
    for (const CheckpointBlock& block : blocks())
      all.append(static_cast<const char*>(block.tensor.raw()), static_cast<size_t>(block.tensor.bytes()));
    return all;
  }

 private:
  ParameterRegistry registry_;
  std::vector<Arena> arenas_;
};

// A background writer of a model with the memory that it plans.
struct BackgroundSetup {
  std::vector<CheckpointBlock> live;
  Arena arena;
  CheckpointWriter writer;

  static Arena planned(const std::vector<CheckpointBlock>& blocks) {
    Arena planning = Arena::planning("checkpoint", Device::kCpu);
    allocate_snapshot(blocks, planning);
    return Arena("checkpoint", Device::kCpu, planning.peak());
  }
  BackgroundSetup(const SmallModel& model, SavePolicy policy)
      : live(model.blocks()), arena(planned(live)), writer(std::move(policy), live, allocate_snapshot(live, arena)) {}
};

inline CheckpointHeader header_of(int64_t step) {
  CheckpointHeader header;
  header.state.step = step;
  header.state.applied_steps = step * 2 / 3;
  header.state.skipped_steps = 3;
  header.state.skipped_in_a_row = 1;
  header.state.tokens = step * 8191;
  header.state.sampler_position = step * 7;
  header.state.seed = 1234567890123456789;
  header.state.eval_losses = {{"books", 1.0 / 3.0 + static_cast<double>(step)}, {"code", 2.718281828459045}};
  header.config = "run: {dir: \"r\\u00fcns\"}\nmodel:\n  hidden_size: 12\n";
  header.program = "palimpsest test";
  return header;
}

// Puts the values of `step` into a fresh model of the same kind: what a checkpoint of that step must hold.
inline std::string bytes_of_step(int64_t step, const SmallModel::Specs& specs = SmallModel::specs()) {
  SmallModel model(specs);
  model.fill(static_cast<uint64_t>(step));
  return model.bytes();
}

// What stands in a folder of checkpoints, beside its lock.
inline std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names = list_directory(directory);
  std::erase(names, "lock");
  return names;
}

// Loads the newest checkpoint and returns its step (-1: none); fails the test unless it is exact.
inline int64_t load_newest_exactly(const std::string& directory) {
  SmallModel loaded;
  CheckpointHeader header;
  const NewestCheckpoint newest = use_newest_checkpoint(directory, [&](CheckpointReader& reader) {
    reader.load(loaded.registry(), CheckpointContent::kWeightsAndOptimizer);
    header = reader.manifest().header;
  });
  if (!newest.path) return -1;
  const int64_t step = header.state.step;
  EXPECT_EQ(header.state, header_of(step).state);
  EXPECT_EQ(header.config, header_of(step).config);
  EXPECT_TRUE(loaded.bytes() == bytes_of_step(step)) << *newest.path << " holds other values";
  return step;
}

// Saves `step` of a fresh model, blocking.
inline void save_step(const std::string& directory, int64_t step) {
  SmallModel model;
  model.fill(static_cast<uint64_t>(step));
  create_directories(directory);
  EXPECT_TRUE(write_checkpoint(directory + "/" + checkpoint_name(step), header_of(step), model.blocks()).empty());
}

}  // namespace palimpsest
