#include "trainer/checkpoint_writer.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iterator>
#include <utility>

#include "kernels/device.h"
#include "parallel/agreement.h"
#include "trainer/checkpoint_folder.h"

namespace palimpsest {

namespace {

std::string partial_of(const std::string& folder) {
  return folder + std::string(kPartialSuffix);
}

// Every rank must write where rank 0 looks.
void check_files_are_seen(const std::string& folder, const Manifest& manifest) {
  for (const FileRecord& file : manifest.files) {
    const std::string path = folder + "/" + file.name;
    const int64_t bytes = path_exists(path) ? file_size(path) : 0;
    if (bytes != file.bytes)
      throw_user_error(path, ": its rank wrote ", file.bytes, " bytes and rank 0 sees ", bytes,
                       "; run.dir must be on a file system that all ranks share");
  }
}

void make_empty(const std::string& folder) {
  if (path_exists(folder)) remove_tree(folder);
  create_directories(folder);
}

FinishedSave publish_save(const SavePolicy& policy, const std::string& folder, const Manifest& manifest,
                          const std::vector<int64_t>& damaged) {
  FinishedSave done;
  done.step = manifest.header.state.step;
  done.path = folder;
  done.warnings = publish_checkpoint(folder, manifest);
  for (std::string& failure :
       remove_old_checkpoints(policy.directory, done.step, policy.keep_last, policy.keep_every, damaged))
    done.warnings.push_back(std::move(failure));
  for (const FileRecord& file : manifest.files) done.bytes += file.bytes;
  return done;
}

Manifest manifest_of(const CheckpointHeader& header, const std::vector<std::string>& rank_files) {
  Manifest manifest{header, {}, {}};
  for (const std::string& text : rank_files) {
    RankFile rank = parse_rank_file(text);
    manifest.files.push_back(std::move(rank.file));
    std::move(rank.datasets.begin(), rank.datasets.end(), std::back_inserter(manifest.datasets));
  }
  return manifest;
}

// What a rank leaves beside its file once that is on the disk. The rename is the last thing that can fail.
constexpr std::string_view kRecordSuffix = ".done";

void leave_record(const std::string& folder, const RankFile& rank_file) {
  const std::string path = folder + "/" + rank_file.file.name + std::string(kRecordSuffix), unfinished = path + ".new";
  OutputFile file(unfinished, OutputFile::Mode::kReplace);
  file.write(to_text(rank_file));
  file.sync();
  file.close();
  rename_path(unfinished, path);
}

// In the order of the ranks.
std::vector<std::string> records_in(const std::string& folder) {
  std::vector<std::string> paths = list_directory(folder);
  std::erase_if(paths, [](const std::string& name) { return !name.ends_with(kRecordSuffix); });
  const std::string begin = folder + "/";
  for (std::string& path : paths) path.insert(0, begin);
  return paths;
}

}  // namespace

std::vector<std::string> publish_checkpoint(const std::string& folder, const Manifest& manifest) {
  const std::string partial = partial_of(folder);
  const std::string replaced = folder + std::string(kReplacedSuffix);
  const std::string parent = std::filesystem::path(folder).parent_path().string();
  check_complete(manifest, folder);
  check_files_are_seen(partial, manifest);
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
                                          const FillRankFile& fill) {
  const std::string folder = path.substr(0, path.find_last_not_of('/') + 1);  // "out/" is "out"
  const std::string partial = partial_of(folder);
  try {
    make_empty(partial);
    RankFileWriter file(partial, 0, 1);
    fill(file);
    RankFile rank = file.finish();
    return publish_checkpoint(folder, {header, {std::move(rank.file)}, std::move(rank.datasets)});
  } catch (...) {
    try_remove(partial);
    throw;
  }
}

std::vector<std::string> write_checkpoint(const std::string& path, const CheckpointHeader& header,
                                          const std::vector<CheckpointBlock>& blocks) {
  return write_checkpoint(path, header, [&](RankFileWriter& file) {
    for (const CheckpointBlock& block : blocks) file.add(block);
  });
}

std::vector<CheckpointBlock> allocate_snapshot(const std::vector<CheckpointBlock>& blocks, Arena& arena) {
  std::vector<CheckpointBlock> snapshot = blocks;
  for (CheckpointBlock& block : snapshot) block.tensor = arena.allocate(block.tensor.dtype(), block.tensor.shape());
  return snapshot;
}

CheckpointWriter::CheckpointWriter(SavePolicy policy, std::vector<CheckpointBlock> blocks,
                                   std::optional<std::vector<CheckpointBlock>> snapshot, Communicator& world)
    : policy_(std::move(policy)), blocks_(std::move(blocks)), snapshot_(std::move(snapshot)), world_(world) {
  CHECK(!snapshot_ || snapshot_->size() == blocks_.size(), "a snapshot of other blocks");
  agree(world_, [&] {
    if (!is_first()) return;
    lock_ = lock_checkpoints(policy_.directory);
    leftovers_ = remove_leftovers(policy_.directory);
  });
}

CheckpointWriter::~CheckpointWriter() {
  try {
    if (world_.size() == 1) settle();
  } catch (const std::exception&) {
    // finish() would have told.
  }
  if (written_.valid()) written_.wait();
  stop_publishing();
}

void CheckpointWriter::save(CheckpointHeader header) {
  settle();
  begin_ = Clock::now();
  header_ = std::move(header);
  folder_ = policy_.directory + "/" + checkpoint_name(header_.state.step);
  std::erase(damaged_, header_.state.step);  // written anew
  agree_or_clean_up([&] {
    if (is_first()) make_empty(partial_of(folder_));
  });
  if (snapshot_) {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const Tensor &live = blocks_[i].tensor, &copy = (*snapshot_)[i].tensor;
      CHECK(copy.shape() == live.shape(), "a snapshot of other blocks");
      copy_to_host(copy, live);
    }
  }
  phase_ = Phase::kWriting;
  written_ = std::async(std::launch::async, [this] { return write_rank_file(); });
  if (is_first()) {
    rank_files_.reset();
    give_up_ = false;
    published_ = std::async(std::launch::async, [this, damaged = damaged_] { return publish(damaged); });
  }
  if (!snapshot_) settle();
}

RankFile CheckpointWriter::write_rank_file() {
  const std::string folder = partial_of(folder_);
  RankFileWriter file(folder, world_.rank(), world_.size());
  for (const CheckpointBlock& block : snapshot_ ? *snapshot_ : blocks_) file.add(block);
  RankFile written = file.finish();
  leave_record(folder, written);
  return written;
}

FinishedSave CheckpointWriter::publish(const std::vector<int64_t>& damaged) {
  const std::optional<std::vector<std::string>> rank_files = await_rank_files();
  if (!rank_files) return {};  // a rank failed, and all of them know
  for (const std::string& record : records_in(partial_of(folder_))) remove_file(record);
  FinishedSave done = publish_save(policy_, folder_, manifest_of(header_, *rank_files), damaged);
  done.seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  return done;
}

// What stands in the files of all ranks; nothing when it is not to be expected.
std::optional<std::vector<std::string>> CheckpointWriter::await_rank_files() {
  constexpr std::chrono::milliseconds kShortNap{5}, kLongNap{500};
  const auto read_records = [&]() -> std::optional<std::vector<std::string>> {
    std::vector<std::string> records = records_in(partial_of(folder_));
    if (static_cast<int64_t>(records.size()) < world_.size()) return std::nullopt;
    for (std::string& record : records) record = read_whole_file(record);
    return records;
  };
  std::chrono::milliseconds nap = kShortNap;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      told_.wait_for(lock, nap, [&] { return give_up_ || rank_files_.has_value(); });
      if (rank_files_) return rank_files_;
      if (give_up_) break;
    }
    if (auto texts = read_records()) return texts;
    nap = std::min(2 * nap, kLongNap);
  }
  return read_records();
}

void CheckpointWriter::stop_publishing() {
  if (!published_.valid()) return;
  {
    const std::lock_guard lock(mutex_);
    give_up_ = true;
  }
  told_.notify_all();
  published_.wait();
}

std::vector<FinishedSave> CheckpointWriter::take_finished() {
  while (phase_ != Phase::kIdle && all_ranks_done({})) end_phase();
  return std::exchange(finished_, {});
}

std::vector<FinishedSave> CheckpointWriter::finish() {
  settle();
  return std::exchange(finished_, {});
}

void CheckpointWriter::settle() {
  // Ranks ask each other often rather than wait in a collective, whose deadline a slow disk must not meet.
  while (phase_ != Phase::kIdle)
    if (all_ranks_done(std::chrono::milliseconds(200))) end_phase();
}

bool CheckpointWriter::all_ranks_done(Clock::duration patience) {
  const auto is_done = [&](const auto& task) {
    return !task.valid() || task.wait_for(patience) == std::future_status::ready;
  };
  const bool done = phase_ == Phase::kWriting ? is_done(written_) : is_done(published_);
  return max_over(world_, done ? 0 : 1) == 0;
}

void CheckpointWriter::end_phase() {
  const Phase ended = std::exchange(phase_, Phase::kIdle);
  if (ended == Phase::kWriting) {
    RankFile mine;
    agree_or_clean_up([&] { mine = written_.get(); });
    std::vector<std::string> rank_files = texts_at_first(world_, to_text(mine));
    phase_ = Phase::kPublishing;
    if (!is_first()) return;
    {
      const std::lock_guard lock(mutex_);
      rank_files_ = std::move(rank_files);
    }
    told_.notify_all();
    return;
  }
  FinishedSave done = {.step = header_.state.step, .path = folder_};
  agree_or_clean_up([&] {
    if (is_first()) done = published_.get();
  });
  finished_.push_back(std::move(done));
}

template <class Body>
void CheckpointWriter::agree_or_clean_up(Body&& body) {
  try {
    agree(world_, body);
  } catch (...) {
    // Every rank is here. None goes on, and perhaps ends the job, before the files are gone.
    if (is_first()) {
      stop_publishing();
      published_ = {};
      try_remove(partial_of(folder_));
    }
    max_over(world_, 0);
    throw;
  }
}

}  // namespace palimpsest
