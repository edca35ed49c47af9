#include "trainer/checkpoint_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <span>
#include <utility>

#include "data/hdf5_file.h"
#include "kernels/check.h"
#include "trainer/checkpoint_folder.h"

namespace palimpsest {

namespace {

std::span<const std::byte> bytes_of(const Tensor& tensor) {
  check_contiguous("block", tensor);
  return {static_cast<const std::byte*>(tensor.raw()), static_cast<size_t>(tensor.bytes())};
}

template <class T>
std::span<const T> elements_of(const Tensor& tensor) {
  return {tensor.data<T>(), static_cast<size_t>(tensor.numel())};
}

void write_block(Hdf5File& file, const CheckpointBlock& block) {
  const Tensor& tensor = block.tensor;
  const bool wide = tensor.dtype() == DType::kF64;
  file.create_dataset(block.name, wide ? Hdf5Type::kF64 : Hdf5Type::kF32, extents_of(tensor.shape()),
                      piece_bytes(tensor.shape(), tensor.dtype()));
  file.set_ints(block.name, "global_shape", extents_of(block.global_shape));
  file.set_ints(block.name, "start", extents_of(block.start));
  if (wide)
    file.write(block.name, elements_of<double>(tensor));
  else
    file.write(block.name, elements_of<float>(tensor));
}

FinishedSave save_one(const SavePolicy& policy, const CheckpointHeader& header,
                      const std::vector<CheckpointBlock>& blocks, const std::vector<int64_t>& damaged) {
  const auto start = std::chrono::steady_clock::now();
  FinishedSave done;
  done.step = header.state.step;
  done.path = policy.directory + "/" + checkpoint_name(done.step);
  done.warnings = write_checkpoint(done.path, header, blocks);
  for (std::string& failure :
       remove_old_checkpoints(policy.directory, done.step, policy.keep_last, policy.keep_every, damaged))
    done.warnings.push_back(std::move(failure));
  done.bytes = file_size(done.path + "/" + rank_file_name(0, 1));
  done.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return done;
}

}  // namespace

std::string rank_file_name(int64_t rank, int64_t num_ranks) {
  return fmt::format("rank-{:05}-of-{:05}.h5", rank, num_ranks);
}

RankFile write_rank_file(const std::string& folder, int64_t rank, int64_t num_ranks,
                         const std::vector<CheckpointBlock>& blocks) {
  RankFile result;
  result.file.name = rank_file_name(rank, num_ranks);
  const std::string path = folder + "/" + result.file.name;
  Hdf5File file = Hdf5File::create(path);
  for (const CheckpointBlock& block : blocks) {
    if (block.tensor.numel() == 0) continue;  // a rank may hold nothing of a tensor
    write_block(file, block);
    result.datasets.push_back({block.name, result.file.name, block.global_shape, block.region(), block.tensor.dtype(),
                               crc32_of(bytes_of(block.tensor))});
  }
  file.close();
  sync_file(path);
  result.file.bytes = file_size(path);
  return result;
}

std::vector<std::string> publish_checkpoint(const std::string& folder, const Manifest& manifest) {
  const std::string partial = folder + std::string(kPartialSuffix);
  const std::string replaced = folder + std::string(kReplacedSuffix);
  const std::string parent = std::filesystem::path(folder).parent_path().string();
  sync_directory(partial);
  if (path_exists(replaced)) settle_replaced(folder);
  if (has_manifest(folder)) {
    rename_path(folder, replaced);
  } else if (path_exists(folder)) {
    remove_tree(folder);
  }
  try {
    rename_path(partial, folder);
    sync_directory(parent.empty() ? "." : parent);
    write_file_atomically(folder + "/" + Manifest::kFileName, to_text(manifest));
  } catch (...) {
    try_remove(folder + "/" + Manifest::kFileName);
    try_remove(folder);
    try {
      if (path_exists(replaced)) settle_replaced(folder);
    } catch (const UserError&) {
      // The old checkpoint still counts under its other name, and is put back by the next start.
    }
    throw;
  }
  std::vector<std::string> warnings;
  try {
    if (path_exists(replaced)) remove_checkpoint(replaced);
  } catch (const UserError& error) {
    warnings.emplace_back(error.what());
  }
  return warnings;
}

std::vector<std::string> write_checkpoint(const std::string& path, const CheckpointHeader& header,
                                          const std::vector<CheckpointBlock>& blocks) {
  const std::string folder = path.substr(0, path.find_last_not_of('/') + 1);  // "out/" is "out"
  const std::string partial = folder + std::string(kPartialSuffix);
  try {
    if (path_exists(partial)) remove_tree(partial);
    create_directories(partial);
    RankFile rank = write_rank_file(partial, 0, 1, blocks);
    Manifest manifest{header, {std::move(rank.file)}, std::move(rank.datasets)};
    return publish_checkpoint(folder, manifest);
  } catch (...) {
    try_remove(partial);
    throw;
  }
}

std::vector<CheckpointBlock> allocate_snapshot(const std::vector<CheckpointBlock>& blocks, Arena& arena) {
  std::vector<CheckpointBlock> snapshot = blocks;
  for (CheckpointBlock& block : snapshot) block.tensor = arena.allocate(block.tensor.dtype(), block.tensor.shape());
  return snapshot;
}

CheckpointWriter::CheckpointWriter(SavePolicy policy, std::vector<CheckpointBlock> blocks,
                                   std::optional<std::vector<CheckpointBlock>> snapshot)
    : policy_(std::move(policy)),
      blocks_(std::move(blocks)),
      snapshot_(std::move(snapshot)),
      lock_(lock_checkpoints(policy_.directory)),
      leftovers_(remove_leftovers(policy_.directory)) {
  CHECK(!snapshot_ || snapshot_->size() == blocks_.size(), "a snapshot of other blocks");
}

CheckpointWriter::~CheckpointWriter() {
  if (pending_.valid()) pending_.wait();
}

void CheckpointWriter::save(CheckpointHeader header) {
  wait();
  std::erase(damaged_, header.state.step);  // written anew
  if (!snapshot_) {
    finished_.push_back(save_one(policy_, header, blocks_, damaged_));
    return;
  }
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const std::span<const std::byte> live = bytes_of(blocks_[i].tensor);
    CHECK((*snapshot_)[i].tensor.shape() == blocks_[i].tensor.shape(), "a snapshot of other blocks");
    std::memcpy((*snapshot_)[i].tensor.raw(), live.data(), live.size());
  }
  pending_ = std::async(std::launch::async, [this, header = std::move(header), damaged = damaged_] {
    return save_one(policy_, header, *snapshot_, damaged);
  });
}

void CheckpointWriter::wait() {
  if (pending_.valid()) finished_.push_back(pending_.get());
}

std::vector<FinishedSave> CheckpointWriter::take_finished() {
  if (pending_.valid() && pending_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) wait();
  return std::exchange(finished_, {});
}

std::vector<FinishedSave> CheckpointWriter::finish() {
  wait();
  return std::exchange(finished_, {});
}

}  // namespace palimpsest
