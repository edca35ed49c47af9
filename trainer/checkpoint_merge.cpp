#include "trainer/checkpoint_merge.h"

#include <cstddef>
#include <set>
#include <span>

#include "data/file_ops.h"
#include "kernels/check.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/checkpoint_writer.h"
#include "trainer/hf_folder.h"

namespace palimpsest {

std::vector<std::string> merge_checkpoint(const std::string& in, const std::string& out,
                                          const std::function<void(int64_t bytes)>& progress) {
  if (path_exists(out)) throw_user_error(out, ": already exists; merge writes a new folder");
  CheckpointReader reader(in);
  if (const std::vector<std::string> damage = reader.verify([](const DatasetRecord&, std::span<const std::byte>) {});
      !damage.empty())
    throw CheckpointDamage(damage[0]);
  const Manifest& manifest = reader.manifest();
  CheckpointHeader header = manifest.header;
  header.world = WorldLayout();
  return write_checkpoint(out, header, [&](RankFileWriter& file) {
    std::vector<std::byte> buffer;
    std::set<std::string> written;
    for (const DatasetRecord& stored : manifest.datasets) {
      if (!written.insert(stored.name).second) continue;
      file.add(
          stored.name, stored.global_shape, whole_region(stored.global_shape), stored.dtype, [&](const Region& piece) {
            buffer.resize(static_cast<size_t>(piece.shape.numel() * size_of(stored.dtype)));
            reader.read({stored.name, stored.global_shape, piece.start, {buffer.data(), stored.dtype, piece.shape}});
            if (progress) progress(static_cast<int64_t>(buffer.size()));
            return std::span<const std::byte>(buffer);
          });
    }
    // What export needs of a public model: before the manifest makes it a checkpoint.
    const std::string folder = out.substr(0, out.find_last_not_of('/') + 1) + std::string(kPartialSuffix);
    if (const auto kept = find_kept_files(in)) copy_kept_files(*kept, folder + "/" + kKeptFolder);
  });
}

}  // namespace palimpsest
