#include "trainer/checkpoint_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>
#include <utility>

#include "kernels/check.h"
#include "parallel/agreement.h"

namespace palimpsest {

namespace {

constexpr std::string_view kStep = "step-";

struct FolderName {
  int64_t step = 0;
  std::string_view suffix;  // "", kPartialSuffix or kReplacedSuffix
};

std::optional<FolderName> parse_name(std::string_view name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  FolderName parsed;
  const auto [stop, error] = std::from_chars(name.data() + kStep.size(), name.data() + name.size(), parsed.step);
  if (error != std::errc() || parsed.step < 0) return std::nullopt;
  parsed.suffix = name.substr(stop - name.data());
  if (!parsed.suffix.empty() && parsed.suffix != kPartialSuffix && parsed.suffix != kReplacedSuffix)
    return std::nullopt;
  return checkpoint_name(parsed.step) + std::string(parsed.suffix) == name ? std::optional(parsed) : std::nullopt;
}

std::string path_in(const std::string& directory, const std::string& name) {
  return fmt::format("{}/{}", directory, name);
}

std::vector<std::string> names_in(const std::string& directory) {
  return is_directory(directory) ? list_directory(directory) : std::vector<std::string>();
}

// What rank 0 lists, on every rank.
std::vector<CheckpointEntry> list_for_all(const std::string& directory, Communicator& world) {
  constexpr char kEnd = '\0';
  std::string text;
  agree(world, [&] {
    if (world.rank() != 0) return;
    for (const CheckpointEntry& entry : list_checkpoints(directory))
      text += fmt::format("{}{}{}", entry.has_manifest ? '+' : '-', entry.path, kEnd);
  });
  text = broadcast_text(world, text);
  std::vector<CheckpointEntry> entries;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find(kEnd, begin);
    CheckpointEntry entry = {.path = text.substr(begin + 1, end - begin - 1), .has_manifest = text[begin] == '+'};
    entry.step = parse_name(std::string_view(entry.path).substr(directory.size() + 1)).value().step;
    entries.push_back(std::move(entry));
    begin = end + 1;
  }
  return entries;
}

// Uses a checkpoint on every rank. Returns the damage that the first rank with any found.
std::optional<std::string> try_to_use(const std::string& path, const UseCheckpoint& use, Communicator& world) {
  std::string damage;
  agree(world, [&] {
    try {
      CheckpointReader reader(path);
      use(reader);
    } catch (const CheckpointDamage& error) {
      damage = error.what();
    }
  });
  if (max_over(world, damage.empty() ? 0 : 1) == 0) return std::nullopt;
  const std::vector<std::string> all = gather_texts(world, damage);
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) return all.size() == 1 ? all[rank] : fmt::format("rank {}: {}", rank, all[rank]);
  return std::nullopt;
}

// Runs `body`; a failure becomes a line of text.
template <class Body>
void attempt(std::vector<std::string>& failures, Body&& body) {
  try {
    body();
  } catch (const UserError& error) {
    failures.emplace_back(error.what());
  }
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  return fmt::format("{}{:06}", kStep, step);
}

std::string to_text(const SkippedCheckpoint& skipped) {
  return fmt::format("skipped checkpoint {}: {}", skipped.path, skipped.reason);
}

bool has_manifest(const std::string& folder) {
  return path_exists(folder + "/" + Manifest::kFileName);
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& directory) {
  std::vector<CheckpointEntry> entries;
  for (const std::string& name : names_in(directory)) {
    const auto parsed = parse_name(name);
    const std::string path = path_in(directory, name);
    if (parsed && parsed->suffix != kPartialSuffix && is_directory(path))
      entries.push_back({parsed->step, path, has_manifest(path)});
  }
  // A replaced folder stands before the one that replaces it.
  std::sort(entries.begin(), entries.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return a.step != b.step ? a.step < b.step : a.path > b.path;
  });
  return entries;
}

NewestCheckpoint use_newest_checkpoint(const std::string& directory, const UseCheckpoint& use, Communicator& world) {
  NewestCheckpoint newest;
  std::string all_damage;
  const std::vector<CheckpointEntry> entries = list_for_all(directory, world);
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (!entry->has_manifest) {
      newest.skipped.push_back({entry->step, entry->path, "its save was not finished (no manifest.json)"});
      continue;
    }
    // A folder that was renamed would be taken for newer than it is, again and again.
    const auto use_named = [&](CheckpointReader& reader) {
      const int64_t step = reader.manifest().header.state.step;
      if (step != entry->step)
        throw CheckpointDamage(fmt::format("{}: renamed: its manifest is of step {}", entry->path, step));
      use(reader);
    };
    const std::optional<std::string> damage = try_to_use(entry->path, use_named, world);
    if (!damage) {
      newest.path = entry->path;
      return newest;
    }
    newest.skipped.push_back({entry->step, entry->path, *damage});
    all_damage += "; " + *damage;
  }
  agree(world, [&] {
    if (!all_damage.empty()) throw_user_error(directory, ": every checkpoint is damaged", all_damage);
  });
  return newest;
}

NewestCheckpoint use_checkpoint(const std::string& path, const UseCheckpoint& use, Communicator& world) {
  const auto first_sees = [&](bool seen) { return max_over(world, world.rank() == 0 && seen ? 1 : 0) == 1; };
  if (first_sees(has_manifest(path))) {
    const std::optional<std::string> damage = try_to_use(path, use, world);
    agree(world, [&] {
      if (damage) throw CheckpointDamage(*damage);
    });
    return {path, {}};
  }
  const std::string inside = path + "/checkpoints";
  NewestCheckpoint newest = use_newest_checkpoint(first_sees(is_directory(inside)) ? inside : path, use, world);
  agree(world, [&] {
    if (!newest.path)
      throw_user_error(path,
                       ": no checkpoint here; expected a checkpoint's folder (with a manifest.json), or a run's with a "
                       "finished checkpoint in it");
  });
  return newest;
}

void remove_checkpoint(const std::string& folder) {
  if (has_manifest(folder)) remove_file(folder + "/" + Manifest::kFileName);
  remove_tree(folder);
}

void settle_replaced(const std::string& folder) {
  const std::string replaced = folder + std::string(kReplacedSuffix);
  if (has_manifest(folder)) return remove_checkpoint(replaced);
  if (path_exists(folder)) remove_tree(folder);
  rename_path(replaced, folder);
}

std::vector<std::string> remove_leftovers(const std::string& directory) {
  std::vector<std::string> lines;
  const auto each = [&](std::string_view suffix, const auto& body) {
    for (const std::string& name : names_in(directory)) {
      const auto parsed = parse_name(name);
      if (parsed && parsed->suffix == suffix)
        attempt(lines, [&] { body(path_in(directory, name), path_in(directory, checkpoint_name(parsed->step))); });
    }
  };
  each(kPartialSuffix, [&](const std::string& path, const std::string&) {
    remove_tree(path);
    lines.push_back(path + ": removed, left by a save that was not finished");
  });
  each(kReplacedSuffix, [&](const std::string& path, const std::string& folder) {
    settle_replaced(folder);
    lines.push_back(path + ": settled, left by a save that was not finished");
  });
  each("", [&](const std::string& path, const std::string&) {
    if (!is_directory(path) || has_manifest(path)) return;
    remove_tree(path);
    lines.push_back(path + ": removed, its save was not finished (no manifest.json)");
  });
  return lines;
}

std::vector<std::string> remove_old_checkpoints(const std::string& directory, int64_t newest, int64_t keep_last,
                                                int64_t keep_every, const std::vector<int64_t>& damaged) {
  std::vector<std::string> failures;
  attempt(failures, [&] {
    const std::vector<CheckpointEntry> entries = list_checkpoints(directory);
    int64_t num_kept = 0;
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
      const bool known_bad = std::find(damaged.begin(), damaged.end(), entry->step) != damaged.end();
      if (!entry->has_manifest || entry->step > newest || (known_bad && entry->step != newest)) continue;
      if (num_kept++ < std::max<int64_t>(1, keep_last)) continue;
      if (keep_every > 0 && entry->step % keep_every == 0) continue;
      attempt(failures, [&] { remove_checkpoint(entry->path); });
    }
  });
  return failures;
}

void check_room_for_checkpoints(const std::string& directory, int64_t bytes_each, int64_t keep_last,
                                Communicator& world) {
  const int64_t bytes = sum_over(world, bytes_each);
  agree(world, [&] {
    if (world.rank() != 0) return;
    const std::vector<CheckpointEntry> entries = list_checkpoints(directory);
    const int64_t held =
        std::count_if(entries.begin(), entries.end(), [](const CheckpointEntry& entry) { return entry.has_manifest; });
    const int64_t to_come = std::max<int64_t>(1, keep_last + 1 - held);
    const int64_t available = free_bytes(directory);
    if (available < to_come * bytes)
      throw_user_error(directory, ": ", to_come * bytes, " bytes are required (", to_come, " checkpoints of ", bytes,
                       ") but ", available,
                       " bytes are free; make room, set run.dir to another place, or lower checkpoint.keep_last");
  });
  agree(world, [&] { check_writable(directory, 0); });  // last: it makes the folder
}

FileDescriptor lock_checkpoints(const std::string& directory) {
  create_directories(directory);
  const std::string path = directory + "/lock";
  count_file_operation("create", path);
  FileDescriptor fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!fd.is_open()) throw_file_error("create", path, errno);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw_user_error(directory,
                     ": another process is saving its checkpoints here; wait for it to end, or set run.dir to "
                     "another place");
  return fd;
}

}  // namespace palimpsest
