#include "trainer/checkpoint_rank_file.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "data/file_ops.h"
#include "kernels/device.h"

namespace palimpsest {

std::string rank_file_name(int64_t rank, int64_t num_ranks) {
  return fmt::format("rank-{:05}-of-{:05}.h5", rank, num_ranks);
}

RankFileWriter::RankFileWriter(const std::string& folder, int64_t rank, int64_t num_ranks)
    : path_(folder + "/" + rank_file_name(rank, num_ranks)), file_(Hdf5File::create(path_)) {
  written_.file.name = rank_file_name(rank, num_ranks);
}

void RankFileWriter::add(const std::string& name, const Shape& global_shape, const Region& region, DType dtype,
                         const PieceSource& source) {
  const bool wide = dtype == DType::kF64;
  file_.create_dataset(name, wide ? Hdf5Type::kF64 : Hdf5Type::kF32, extents_of(region.shape),
                       piece_bytes(region.shape, dtype));
  file_.set_ints(name, "global_shape", extents_of(global_shape));
  file_.set_ints(name, "start", extents_of(region.start));
  uint32_t checksum = 0;
  for_each_piece(region.shape, dtype, [&](const Region& piece) {
    const std::span<const std::byte> bytes = source(piece);
    const auto count = static_cast<size_t>(piece.shape.numel());
    CHECK(bytes.size() == count * static_cast<size_t>(size_of(dtype)), "a piece of ", bytes.size(), " bytes for ",
          piece.shape.str());
    const std::vector<int64_t> start = extents_of(piece.start), shape = extents_of(piece.shape);
    if (wide)
      file_.write(name, std::span(reinterpret_cast<const double*>(bytes.data()), count), start, shape);
    else
      file_.write(name, std::span(reinterpret_cast<const float*>(bytes.data()), count), start, shape);
    checksum = crc32_of(bytes, checksum);
  });
  written_.datasets.push_back({name, written_.file.name, global_shape, region, dtype, checksum});
}

void RankFileWriter::add(const CheckpointBlock& block) {
  HostCopy values(block.tensor);
  const Tensor& tensor = values.fetch().tensor();
  const auto* next = static_cast<const std::byte*>(tensor.raw());
  add(block.name, block.global_shape, block.region(), tensor.dtype(), [&](const Region& piece) {
    const std::span bytes(next, static_cast<size_t>(piece.shape.numel() * size_of(tensor.dtype())));
    next += bytes.size();  // pieces follow memory
    return bytes;
  });
}

RankFile RankFileWriter::finish() {
  file_.close();
  sync_file(path_);
  written_.file.bytes = file_size(path_);
  return std::move(written_);
}

}  // namespace palimpsest
