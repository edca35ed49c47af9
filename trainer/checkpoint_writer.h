// Writing checkpoints, in the background or not; the files are the same. What stands on the disk at every moment of a
// save: checkpoint_folder.h.
#pragma once

#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "data/file_ops.h"
#include "kernels/arena.h"
#include "trainer/checkpoint_block.h"
#include "trainer/checkpoint_manifest.h"

namespace palimpsest {

std::string rank_file_name(int64_t rank, int64_t num_ranks);  // "rank-00000-of-00001.h5"

// Writes one rank's file and flushes it to the disk; the records are what the manifest lists.
struct RankFile {
  FileRecord file;
  std::vector<DatasetRecord> datasets;
};
RankFile write_rank_file(const std::string& folder, int64_t rank, int64_t num_ranks,
                         const std::vector<CheckpointBlock>& blocks);

// Makes <folder>.partial, whose rank files are flushed, the checkpoint <folder>. On an error <folder> is as it was
// before. Returns warnings, a line each.
std::vector<std::string> publish_checkpoint(const std::string& folder, const Manifest& manifest);

// Saves the folder `path` as the only rank, blocking. On an error nothing new stays. Returns warnings.
std::vector<std::string> write_checkpoint(const std::string& path, const CheckpointHeader& header,
                                          const std::vector<CheckpointBlock>& blocks);

// The blocks with memory of their own, from the arena: where a background save copies them to. With a planning arena
// this counts what the run has to set aside.
std::vector<CheckpointBlock> allocate_snapshot(const std::vector<CheckpointBlock>& blocks, Arena& arena);

struct SavePolicy {
  std::string directory;  // <run.dir>/checkpoints
  int64_t keep_last = 2;
  int64_t keep_every = 0;
};

struct FinishedSave {
  int64_t step = 0;
  std::string path;
  int64_t bytes = 0;     // of the rank's file
  double seconds = 0.0;  // of writing
  std::vector<std::string> warnings;
};

// Saves a run's checkpoints into its folder, which it locks, and removes old ones. Used by one thread.
class CheckpointWriter {
 public:
  // `blocks` view the run's live tensors. With a snapshot (allocate_snapshot of the same blocks) save() copies and
  // returns, and a thread writes; without, save() writes. `snapshot` must outlive the writer.
  CheckpointWriter(SavePolicy policy, std::vector<CheckpointBlock> blocks,
                   std::optional<std::vector<CheckpointBlock>> snapshot);
  ~CheckpointWriter();  // waits for the pending save; its error is lost unless finish() was called
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Captures tensors and header at this moment. Waits for the pending save first, and throws its error.
  void save(CheckpointHeader header);
  // Saves that ended since the last call. Throws the error of one that failed.
  std::vector<FinishedSave> take_finished();
  // The same after waiting for the pending one. Called before a run ends.
  std::vector<FinishedSave> finish();

  // Steps found damaged: not counted among those kept.
  void set_damaged(std::vector<int64_t> steps) { damaged_ = std::move(steps); }
  // What killed saves left and the constructor cleaned up, a line each.
  const std::vector<std::string>& leftovers() const { return leftovers_; }

 private:
  void wait();

  SavePolicy policy_;
  std::vector<CheckpointBlock> blocks_;
  std::optional<std::vector<CheckpointBlock>> snapshot_;
  FileDescriptor lock_;
  std::vector<std::string> leftovers_;
  std::vector<int64_t> damaged_;
  std::vector<FinishedSave> finished_;
  std::future<FinishedSave> pending_;
};

}  // namespace palimpsest
