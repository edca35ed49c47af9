// Reading a checkpoint folder, whatever ranks and layout wrote it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "data/hdf5_file.h"
#include "kernels/tensor.h"
#include "model/parameters.h"
#include "trainer/checkpoint_block.h"
#include "trainer/checkpoint_manifest.h"

namespace palimpsest {

class CheckpointReader {
 public:
  // Reads and checks the manifest, and that its files are there with the right sizes. Throws CheckpointDamage.
  explicit CheckpointReader(std::string folder);

  const std::string& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }

  // Fills the rows of the registry's shards: values, and moments with kWeightsAndOptimizer. Where there are more ranks,
  // ParameterHooks::values_changed is to follow. A registry of other parameters is a
  // UserError that lists what is missing, extra or of another shape. Weights alone are converted between f32 and f64;
  // optimizer state asks for the same. On CheckpointDamage some of the registry may have been overwritten.
  // `progress` is told the bytes of each block that was read.
  void load(ParameterRegistry& registry, CheckpointContent content,
            const std::function<void(int64_t bytes)>& progress = {});

  // The two halves of it, for ranks that hold parts.
  void check_parameters(const ParameterRegistry& registry, CheckpointContent content) const;
  // Reads the block from the stored ones that overlap it, and no others. A stored block read whole is held against its
  // checksum of the manifest; every piece is against those of the file.
  void read(const CheckpointBlock& block);

  int64_t bytes_read() const { return bytes_read_; }  // of the tensors' elements in the files, so far

  // Reads every stored block whole and checks every checksum; returns what is damaged, a line each. `observe` is given
  // the elements as they pass, block after block.
  using Observe = std::function<void(const DatasetRecord& stored, std::span<const std::byte> values)>;
  std::vector<std::string> verify(const Observe& observe);

 private:
  using UsePiece = std::function<void(const Region& piece, std::span<const std::byte> values)>;

  Hdf5File& file(const std::string& name);
  // `use` is given pieces in global coordinates, in order.
  void read_part(const DatasetRecord& stored, const Region& part, const UsePiece& use);

  std::string folder_;
  Manifest manifest_;
  std::multimap<std::string, size_t> blocks_;  // dataset name -> index in manifest_.datasets
  std::map<std::string, Hdf5File> files_;      // opened so far
  int64_t bytes_read_ = 0;
};

}  // namespace palimpsest
