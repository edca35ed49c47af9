#include "trainer/checkpoint_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "data/file_ops.h"
#include "kernels/check.h"
#include "kernels/device.h"

namespace palimpsest {

namespace {

constexpr int64_t kMaxManifestBytes = int64_t{256} << 20;
constexpr size_t kMaxOpenFiles = 256;

// start - origin, or with a negative sign start + origin.
Shape shifted(const Shape& start, const Shape& origin, int64_t sign) {
  Shape result;
  for (int i = 0; i < start.num_dims(); ++i) result.push_back(start[i] + sign * origin[i]);
  return result;
}

// What goes wrong while a checkpoint's files are read is damage to it.
template <class Body>
decltype(auto) as_damage(Body&& body) {
  try {
    return body();
  } catch (const UserError& error) {
    throw CheckpointDamage(error.what());
  }
}

// "missing a, b, c and 4 more"
std::string listed(const char* what, const std::vector<std::string>& names) {
  constexpr size_t kMost = 5;
  if (names.empty()) return "";
  std::string text = std::string("; ") + what;
  for (size_t i = 0; i < std::min(kMost, names.size()); ++i) text += (i > 0 ? ", " : " ") + names[i];
  return names.size() > kMost ? fmt::format("{} and {} more", text, names.size() - kMost) : text;
}

std::vector<const char*> parts_of(CheckpointContent content) {
  if (content == CheckpointContent::kWeights) return {"model/"};
  return {"model/", "adam_m/", "adam_v/"};
}

}  // namespace

CheckpointReader::CheckpointReader(std::string folder) : folder_(std::move(folder)) {
  const std::string path = folder_ + "/" + Manifest::kFileName;
  const std::string text = as_damage([&] { return read_whole_file(path, kMaxManifestBytes); });
  manifest_ = parse_manifest(text, path);
  for (size_t i = 0; i < manifest_.datasets.size(); ++i) blocks_.emplace(manifest_.datasets[i].name, i);
  for (const FileRecord& record : manifest_.files) {
    const std::string file_path = folder_ + "/" + record.name;
    const int64_t bytes = as_damage([&] { return file_size(file_path); });
    if (bytes != record.bytes)
      throw CheckpointDamage(fmt::format("{}: has {} bytes, the manifest says {}: the file was changed or cut off",
                                         file_path, bytes, record.bytes));
  }
}

void CheckpointReader::load(ParameterRegistry& registry, CheckpointContent content,
                            const std::function<void(int64_t bytes)>& progress) {
  check_parameters(registry, content);
  for (CheckpointBlock& block : wanted_blocks(registry, content)) {
    const HostCopy values(block.tensor);
    block.tensor = values.tensor();
    read(block);
    values.store();
    if (progress) progress(block.tensor.bytes());
  }
}

void CheckpointReader::check_parameters(const ParameterRegistry& registry, CheckpointContent content) const {
  const auto first_moment = blocks_.lower_bound("adam_m/");
  const bool has_optimizer = first_moment != blocks_.end() && first_moment->first.starts_with("adam_m/");
  if (content == CheckpointContent::kWeightsAndOptimizer && !has_optimizer)
    throw_user_error(folder_,
                     ": holds weights but no optimizer state, so a run cannot be resumed from it; from=", folder_,
                     " starts a new run with its weights");
  std::vector<std::string> missing, extra, misshapen;
  std::set<std::string> wanted;
  for (const char* part : parts_of(content)) {
    for (const Parameter& parameter : registry.parameters()) {
      const std::string name = part + parameter.spec.name;
      wanted.insert(name);
      const auto found = blocks_.find(name);
      if (found == blocks_.end()) {
        missing.push_back(name);
        continue;
      }
      const DatasetRecord& stored = manifest_.datasets[found->second];
      if (stored.global_shape != parameter.spec.shape)
        misshapen.push_back(fmt::format("{} is {} in the checkpoint and {} in the model", name,
                                        stored.global_shape.str(), parameter.spec.shape.str()));
      if (content == CheckpointContent::kWeightsAndOptimizer && stored.dtype != parameter.value_shard.dtype())
        throw_user_error(folder_, ": holds ", name_of(stored.dtype), " values but this run computes in ",
                         name_of(parameter.value_shard.dtype()), "; precision must be that of the run that is resumed");
    }
    for (auto stored = blocks_.lower_bound(part); stored != blocks_.end() && stored->first.starts_with(part);
         stored = blocks_.upper_bound(stored->first))
      if (!wanted.contains(stored->first)) extra.push_back(stored->first);
  }
  if (missing.empty() && extra.empty() && misshapen.empty()) return;
  throw_user_error(folder_, ": does not fit the model", listed("missing", missing), listed("not in the model:", extra),
                   listed("of another shape:", misshapen));
}

void CheckpointReader::read(const CheckpointBlock& block) {
  const Region wanted = block.region();
  const auto [first, last] = blocks_.equal_range(block.name);
  CHECK(first != last && manifest_.datasets[first->second].global_shape == block.global_shape, "dataset '", block.name,
        "' was not checked");
  for (auto stored = first; stored != last; ++stored) {
    const DatasetRecord& record = manifest_.datasets[stored->second];
    if (const auto part = overlap(record.region, wanted))
      read_part(record, *part, [&](const Region& piece, std::span<const std::byte> values) {
        copy_piece(piece, values, record.dtype, wanted, block.tensor);
      });
  }
}

std::vector<std::string> CheckpointReader::verify(const Observe& observe) {
  std::vector<std::string> damage;
  for (const DatasetRecord& stored : manifest_.datasets) {
    try {
      read_part(stored, stored.region,
                [&](const Region&, std::span<const std::byte> values) { observe(stored, values); });
    } catch (const CheckpointDamage& error) {
      // A file that does not open says the same of each of its datasets.
      if (damage.empty() || damage.back() != error.what()) damage.emplace_back(error.what());
    }
  }
  return damage;
}

Hdf5File& CheckpointReader::file(const std::string& name) {
  const auto found = files_.find(name);
  if (found != files_.end()) return found->second;
  if (files_.size() >= kMaxOpenFiles) files_.clear();
  return files_.emplace(name, Hdf5File::open(folder_ + "/" + name)).first->second;
}

void CheckpointReader::read_part(const DatasetRecord& stored, const Region& part, const UsePiece& use) {
  const auto complain = [&](const char* what) {
    throw CheckpointDamage(fmt::format("{}/{}: dataset '{}' {}", folder_, stored.file, stored.name, what));
  };
  Hdf5File& source = as_damage([&]() -> Hdf5File& { return file(stored.file); });
  const Hdf5Type type = stored.dtype == DType::kF64 ? Hdf5Type::kF64 : Hdf5Type::kF32;
  as_damage([&] {
    const Hdf5Dataset info = source.dataset(stored.name);
    if (info.type != type || info.shape != extents_of(stored.region.shape) ||
        source.get_ints(stored.name, "global_shape") != extents_of(stored.global_shape) ||
        source.get_ints(stored.name, "start") != extents_of(stored.region.start))
      complain("is not the block that the manifest describes");
  });
  std::vector<std::byte> buffer(piece_bytes(part.shape, stored.dtype));
  uint32_t checksum = 0;
  for_each_piece(part.shape, stored.dtype, [&](const Region& local) {
    const Region piece = {shifted(local.start, part.start, 1), local.shape};
    const std::vector<int64_t> start = extents_of(shifted(piece.start, stored.region.start, -1));
    const std::vector<int64_t> shape = extents_of(piece.shape);
    const size_t count = piece.shape.numel();
    const std::span<std::byte> bytes(buffer.data(), count * size_of(stored.dtype));
    as_damage([&] {
      if (stored.dtype == DType::kF64)
        source.read(stored.name, std::span(reinterpret_cast<double*>(bytes.data()), count), start, shape);
      else
        source.read(stored.name, std::span(reinterpret_cast<float*>(bytes.data()), count), start, shape);
    });
    bytes_read_ += static_cast<int64_t>(bytes.size());
    checksum = crc32_of(bytes, checksum);
    use(piece, bytes);
  });
  if (part == stored.region && checksum != stored.crc32) complain("does not have the checksum that the manifest gives");
}

}  // namespace palimpsest
