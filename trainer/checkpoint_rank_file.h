// One rank's file of a checkpoint, written piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "data/hdf5_file.h"
#include "kernels/tensor.h"
#include "trainer/checkpoint_block.h"
#include "trainer/checkpoint_manifest.h"

namespace palimpsest {

std::string rank_file_name(int64_t rank, int64_t num_ranks);  // "rank-00000-of-00001.h5"

class RankFileWriter {
 public:
  RankFileWriter(const std::string& folder, int64_t rank, int64_t num_ranks);

  // Adds a dataset that holds `region` of a tensor. `source` is asked for its pieces in the order of memory, each in
  // the region's own coordinates, and gives the elements row by row.
  using PieceSource = std::function<std::span<const std::byte>(const Region& piece)>;
  void add(const std::string& name, const Shape& global_shape, const Region& region, DType dtype,
           const PieceSource& source);
  void add(const CheckpointBlock& block);  // from memory
  // Closes the file and flushes it to the disk.
  RankFile finish();

 private:
  std::string path_;
  RankFile written_;
  Hdf5File file_;
};

}  // namespace palimpsest
