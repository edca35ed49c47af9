// The folder <run.dir>/checkpoints: one folder a checkpoint, named step-000123.
//
// A save goes through these states; the process or the machine may stop at any moment, and only (4) and (5) count:
//   1. step-000123.partial          files being written; each is closed and flushed and gets a record beside it, which
//                                   rank 0 takes away again when it has all; then the folder is flushed
//   2. step-000123.replaced         only where this step was saved before: the old folder, moved aside, still counts
//   3. step-000123                  renamed, without a manifest: not a checkpoint
//   4. step-000123/manifest.json    written under another name, flushed, renamed: now it is a checkpoint
//   5. older ones are removed       their manifests first, so that half a checkpoint is none
// What a killed save leaves is removed, or put back in case 2, when the next run of this folder starts.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/file_ops.h"
#include "parallel/mesh.h"
#include "trainer/checkpoint_reader.h"

namespace palimpsest {

constexpr std::string_view kPartialSuffix = ".partial";
constexpr std::string_view kReplacedSuffix = ".replaced";
std::string checkpoint_name(int64_t step);  // "step-000123"
bool has_manifest(const std::string& folder);

struct CheckpointEntry {
  int64_t step = 0;
  std::string path;
  bool has_manifest = false;  // without, it is not a checkpoint
};
// Oldest first; empty where there is no such folder. Temporary folders are not listed.
std::vector<CheckpointEntry> list_checkpoints(const std::string& directory);

struct SkippedCheckpoint {
  int64_t step = 0;
  std::string path;
  std::string reason;
};
std::string to_text(const SkippedCheckpoint& skipped);  // "skipped checkpoint PATH: REASON"
struct NewestCheckpoint {
  std::optional<std::string> path;         // none where no save was ever finished
  std::vector<SkippedCheckpoint> skipped;  // newer ones, newest first
};
// Opens the newest checkpoint and calls `use` with it; on CheckpointDamage, from opening or from `use`, goes on with
// the next older one. Throws a UserError when there are checkpoints and all are damaged. Other errors of `use` pass.
// Every rank of `world` makes the same call and uses the same checkpoint: rank 0 lists them, and damage that one rank
// finds, or another error, is one of all. No collectives in `use`.
using UseCheckpoint = std::function<void(CheckpointReader&)>;
NewestCheckpoint use_newest_checkpoint(const std::string& directory, const UseCheckpoint& use,
                                       Communicator& world = Mesh::single().world());
// The same where `path` (from=..., resume=...) is a checkpoint itself, a run's folder, or its folder of checkpoints.
// Throws a UserError where it is none of them or holds no checkpoint.
NewestCheckpoint use_checkpoint(const std::string& path, const UseCheckpoint& use,
                                Communicator& world = Mesh::single().world());

// Removes what killed saves left and puts back what they had moved aside; returns what was done, a line each.
std::vector<std::string> remove_leftovers(const std::string& directory);

// Removes a checkpoint so that it stops being one first.
void remove_checkpoint(const std::string& folder);
// Where <folder>.replaced stands: removes it when <folder> is complete, else puts it back in its place.
void settle_replaced(const std::string& folder);

// After step `newest` was saved: keeps it, the keep_last - 1 before it, and every multiple of keep_every (0: none).
// Steps above `newest` and those in `damaged` are neither counted nor removed. Returns what could not be removed, a
// line each: the run goes on.
std::vector<std::string> remove_old_checkpoints(const std::string& directory, int64_t newest, int64_t keep_last,
                                                int64_t keep_every, const std::vector<int64_t>& damaged);

// Makes the folder when missing. Throws a UserError unless every rank can write to it and it has room for the
// checkpoints that will stand in it at a time: keep_last and the one being written, less those it already holds. Each
// rank gives the bytes of its own file.
void check_room_for_checkpoints(const std::string& directory, int64_t bytes_each, int64_t keep_last,
                                Communicator& world = Mesh::single().world());

// Held by the one process that saves into the folder: rank 0. Throws a UserError when another holds it; a file system
// without locks is taken as it is.
FileDescriptor lock_checkpoints(const std::string& directory);

}  // namespace palimpsest
