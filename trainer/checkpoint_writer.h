// Writing checkpoints from any number of ranks, in the background or not; the files are the same. What stands on the
// disk at every moment of a save: checkpoint_folder.h.
//
// Every rank writes a file of its own in a thread, and beside it a record of what stands in it. Rank 0 has a second
// thread, which publishes the checkpoint as soon as it sees the records of all ranks: nothing of it waits for a step to
// end. Ranks talk to each other on the thread that calls, at the moments when all of them call: save() and
// take_finished() at the end of a step, finish() at the end of the run. Then all learn what became of the save; where
// rank 0 does not see the records yet, as on file systems that take their time, it is told what stands in them. A
// failure on one rank ends the save on all of them: what was written is removed, all throw, the older checkpoints stay.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "data/file_ops.h"
#include "kernels/arena.h"
#include "parallel/mesh.h"
#include "trainer/checkpoint_block.h"
#include "trainer/checkpoint_manifest.h"
#include "trainer/checkpoint_rank_file.h"

namespace palimpsest {

// Makes <folder>.partial, whose rank files are flushed, the checkpoint <folder>, once the manifest is complete and all
// its files are seen. On an error <folder> is as it was before. Returns warnings, a line each.
std::vector<std::string> publish_checkpoint(const std::string& folder, const Manifest& manifest);

// Saves the folder `path` as the only rank, blocking. On an error nothing new stays. Returns warnings.
using FillRankFile = std::function<void(RankFileWriter&)>;
std::vector<std::string> write_checkpoint(const std::string& path, const CheckpointHeader& header,
                                          const FillRankFile& fill);
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
  int64_t bytes = 0;                  // of the ranks' files; on rank 0
  double seconds = 0.0;               // from save() until it was a checkpoint; on rank 0
  std::vector<std::string> warnings;  // on rank 0
};

// Saves a run's checkpoints into its folder, which rank 0 locks, and removes old ones. Used by one thread of each rank
// of `world`; all of them make the same calls.
class CheckpointWriter {
 public:
  // `blocks` view the run's live tensors: what this rank owns. With a snapshot (allocate_snapshot of the same blocks)
  // save() copies and returns, and a thread writes; without, save() returns when the checkpoint stands. `snapshot` and
  // `world` must outlive the writer.
  CheckpointWriter(SavePolicy policy, std::vector<CheckpointBlock> blocks,
                   std::optional<std::vector<CheckpointBlock>> snapshot, Communicator& world = Mesh::single().world());
  // Waits for this rank's threads. With one rank the pending save becomes a checkpoint; its error is lost unless
  // finish() was called.
  ~CheckpointWriter();
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
  // What killed saves left and the constructor cleaned up, a line each; on rank 0.
  const std::vector<std::string>& leftovers() const { return leftovers_; }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase : uint8_t { kIdle, kWriting, kPublishing };

  bool is_first() const { return world_.rank() == 0; }
  void settle();  // takes the pending save to its end
  bool all_ranks_done(Clock::duration patience);
  void end_phase();
  RankFile write_rank_file();
  FinishedSave publish(const std::vector<int64_t>& damaged);
  std::optional<std::vector<std::string>> await_rank_files();
  void stop_publishing();
  template <class Body>
  void agree_or_clean_up(Body&& body);

  SavePolicy policy_;
  std::vector<CheckpointBlock> blocks_;
  std::optional<std::vector<CheckpointBlock>> snapshot_;
  Communicator& world_;
  FileDescriptor lock_;
  std::vector<std::string> leftovers_;
  std::vector<int64_t> damaged_;
  std::vector<FinishedSave> finished_;

  // The pending save.
  Phase phase_ = Phase::kIdle;
  CheckpointHeader header_;
  std::string folder_;
  Clock::time_point begin_;
  std::future<RankFile> written_;        // while kWriting
  std::future<FinishedSave> published_;  // while kWriting or kPublishing, on rank 0

  std::mutex mutex_;
  std::condition_variable told_;
  // Guarded by mutex_: what the publishing thread is told.
  std::optional<std::vector<std::string>> rank_files_;
  bool give_up_ = false;
};

}  // namespace palimpsest
