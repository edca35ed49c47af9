#include "trainer/export_hf.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "data/file_ops.h"
#include "data/safetensors.h"
#include "data/tokenizer.h"
#include "kernels/check.h"
#include "model/language_model.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/config.h"
#include "trainer/hf_config_writer.h"
#include "trainer/hf_folder.h"
#include "trainer/json_object.h"

namespace palimpsest {

namespace {

constexpr const char* kIndex = "model.safetensors.index.json";

// A run of elements of a public tensor that are consecutive in one of our parameters.
struct Segment {
  int64_t start = 0, count = 0;  // elements of the public tensor
  const ParameterSpec* parameter = nullptr;
  int64_t first = 0;  // element of the parameter
};

struct PublicTensor {
  Shape shape;
  bool any_shape = false;
  std::vector<Segment> segments;  // by start; together the whole tensor
};

// The public tensors of a model, under every name that they may have.
class PublicTensors {
 public:
  PublicTensors(const HfModel& model, const ParameterRegistry& registry) {
    for (const Parameter& parameter : registry.parameters()) {
      const HfPlace place = hf_place(model, parameter.spec);
      const int64_t row_size = place.shape.numel() / std::max<int64_t>(1, place.shape[0]);
      PublicTensor& tensor = tensors_[place.names[0]];
      if (tensor.segments.empty()) order_.push_back(place.names[0]);
      tensor.shape = place.shape;
      tensor.any_shape = place.any_shape;
      int64_t first = 0;
      for (const RowRange& rows : place.rows) {
        tensor.segments.push_back({rows.start * row_size, rows.count * row_size, &parameter.spec, first});
        first += rows.count * row_size;
      }
      for (const std::string& name : place.names) usual_name_[name] = place.names[0];
    }
    // The public Kimi Linear has no tied head: a copy of the embedding computes the same.
    if (model.config.tie_embeddings && model.family == HfFamily::kKimiLinear) order_.emplace_back("lm_head.weight");
    for (auto& [name, tensor] : tensors_) check_whole(name, tensor);
  }

  const PublicTensor* find(const std::string& name) const {
    const auto usual = usual_name_.find(name);
    return usual == usual_name_.end() ? nullptr : &tensors_.at(usual->second);
  }
  const std::vector<std::string>& names() const { return order_; }  // the usual ones, in the order of the registry

 private:
  static void check_whole(const std::string& name, PublicTensor& tensor) {
    std::sort(tensor.segments.begin(), tensor.segments.end(),
              [](const Segment& a, const Segment& b) { return a.start < b.start; });
    int64_t end = 0;
    for (const Segment& segment : tensor.segments) {
      CHECK(segment.start == end, "public tensor ", name, " has a gap at element ", end);
      end += segment.count;
    }
    CHECK(end == tensor.shape.numel(), "public tensor ", name, " has ", end, " of ", tensor.shape.numel(), " elements");
  }

  std::map<std::string, PublicTensor> tensors_;
  std::map<std::string, std::string> usual_name_;
  std::vector<std::string> order_;
};

// Writes tensors from a checkpoint, converted, without holding more than a piece.
class TensorSource {
 public:
  TensorSource(CheckpointReader& checkpoint, const PublicTensors& tensors, const SafetensorsFile* unknown,
               const std::function<void(int64_t)>& progress)
      : checkpoint_(checkpoint), tensors_(tensors), unknown_(unknown), progress_(progress) {}

  bool is_known(const std::string& name) const { return tensors_.find(name) != nullptr; }

  void write(const SafeEntry& entry, SafetensorsWriter& writer) {
    const PublicTensor* tensor = tensors_.find(entry.name);
    if (tensor == nullptr) return write_unknown(entry, writer);
    CHECK(tensor->shape.numel() * size_of(entry.dtype) == entry.bytes, "public tensor ", entry.name);
    for (const Segment& segment : tensor->segments) write_segment(segment, entry.dtype, writer);
  }

 private:
  void write_unknown(const SafeEntry& entry, SafetensorsWriter& writer) {
    if (unknown_ == nullptr || !unknown_->tensors().count(entry.name))
      throw_user_error(kUnknownTensors, ": tensor '", entry.name, "' is missing; --drop-unknown leaves it out");
    const std::span<const std::byte> bytes = unknown_->tensors().at(entry.name).bytes;
    if (static_cast<int64_t>(bytes.size()) != entry.bytes)
      throw_user_error(unknown_->path(), ": tensor '", entry.name, "' has another size than it came with");
    writer.write(bytes);
    unknown_->release(bytes);
    if (progress_) progress_(entry.bytes);
  }

  // Whole rows of the parameter at a time: a segment begins and ends at rows, since only those are ever cut.
  void write_segment(const Segment& segment, SafeDType dtype, SafetensorsWriter& writer) {
    const Shape& shape = segment.parameter->shape;
    const int64_t row_size = shape.numel() / std::max<int64_t>(1, shape[0]);
    constexpr int64_t kPieceElements = int64_t{1} << 20;
    const int64_t rows_at_once = std::max<int64_t>(1, kPieceElements / row_size);
    const int64_t begin = segment.first / row_size, end = begin + segment.count / row_size;
    for (int64_t row = begin; row < end; row += rows_at_once) {
      Shape start = {row}, part = {std::min(rows_at_once, end - row)};
      for (int i = 1; i < shape.num_dims(); ++i) {
        start.push_back(0);
        part.push_back(shape[i]);
      }
      values_.resize(static_cast<size_t>(part.numel()));
      checkpoint_.read({"model/" + segment.parameter->name, shape, start, Tensor(values_.data(), DType::kF32, part)});
      const std::vector<std::byte> bytes = to_elements(values_, dtype);
      writer.write(bytes);
      if (progress_) progress_(static_cast<int64_t>(bytes.size()));
    }
  }

  CheckpointReader& checkpoint_;
  const PublicTensors& tensors_;
  const SafetensorsFile* unknown_;
  const std::function<void(int64_t)>& progress_;
  std::vector<float> values_;
};

struct PublicFile {
  std::string name;
  std::string header;  // empty: to be made of the entries
  std::vector<SafeEntry> entries;
};

// The model's files as they were imported.
std::vector<PublicFile> kept_files(const std::string& kept) {
  std::vector<PublicFile> files;
  for (const std::string& name : list_directory(kept)) {
    if (!name.ends_with(kHeaderSuffix)) continue;
    PublicFile file{.name = name.substr(0, name.size() - std::string(kHeaderSuffix).size())};
    const std::string path = fmt::format("{}/{}", kept, name);
    file.header = read_whole_file(path);
    file.entries = list_safetensors_header(std::as_bytes(std::span(file.header)), path);
    files.push_back(std::move(file));
  }
  return files;
}

bool has_entry(const std::vector<PublicFile>& files, std::string_view name) {
  return std::any_of(files.begin(), files.end(), [&](const PublicFile& file) {
    return std::any_of(file.entries.begin(), file.entries.end(),
                       [&](const SafeEntry& entry) { return entry.name == name; });
  });
}

// Files for a model that was born here, none larger than shard_bytes unless one tensor is.
std::vector<PublicFile> new_files(const PublicTensors& tensors, int64_t shard_bytes) {
  std::vector<PublicFile> files(1);
  int64_t bytes = 0;
  for (const std::string& name : tensors.names()) {
    SafeEntry entry{.name = name, .dtype = SafeDType::kF32};
    const Shape& shape = tensors.find(name)->shape;
    for (int i = 0; i < shape.num_dims(); ++i) entry.shape.push_back(shape[i]);
    entry.bytes = shape.numel() * 4;
    if (bytes > 0 && bytes + entry.bytes > shard_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += entry.bytes;
    files.back().entries.push_back(std::move(entry));
  }
  for (size_t i = 0; i < files.size(); ++i)
    files[i].name =
        files.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
  return files;
}

std::string index_json(const std::vector<PublicFile>& files) {
  JsonObject weight_map, metadata, index;
  int64_t bytes = 0;
  for (const PublicFile& file : files) {
    for (const SafeEntry& entry : file.entries) {
      weight_map.add(entry.name, file.name);
      bytes += entry.bytes;
    }
  }
  metadata.add("total_size", bytes);
  index.add("metadata", metadata);
  index.add("weight_map", weight_map);
  return index.text() + "\n";
}

void check_same_model(const ModelConfig& imported, const Config& saved, const std::string& kept) {
  Config there = saved;
  there.model = imported;
  for (const ConfigDifference& difference : differences(there, saved))
    if (decides_computation(difference.key))
      throw_user_error(kept, "/config.json: the model was imported with ", difference.key, " = ", difference.before,
                       ", the checkpoint has ", difference.after);
}

// None when the tokenizer is not on this machine.
std::optional<HfMarks> marks_of(const std::string& tokenizer) {
  try {
    const std::unique_ptr<Tokenizer> read = load_tokenizer(tokenizer);
    return HfMarks{.bos = read->bos(), .eos = read->eos()};
  } catch (const UserError&) {
    return std::nullopt;
  }
}

void write_folder(CheckpointReader& checkpoint, const std::string& out, const ExportOptions& options,
                  const std::function<void(int64_t)>& progress, std::vector<std::string>& notices) {
  const Config saved = parse_config(checkpoint.manifest().header.config, checkpoint.folder());
  const std::optional<std::string> kept = find_kept_files(checkpoint.folder());
  HfModel model;
  std::vector<PublicFile> files;
  if (kept) {
    files = kept_files(*kept);
    model = read_hf_config(read_whole_file(*kept + "/config.json"), *kept + "/config.json");
    if (has_entry(files, "lm_head.weight")) model.config.tie_embeddings = saved.model.tie_embeddings;
    check_same_model(model.config, saved, *kept);
  } else {
    model = {hf_family_of(saved.model), saved.model};
  }
  ParameterRegistry registry;
  const LanguageModel language_model(model.config, registry);
  checkpoint.check_parameters(registry, CheckpointContent::kWeights);
  const PublicTensors tensors(model, registry);

  std::optional<SafetensorsFile> unknown;
  if (kept && path_exists(*kept + "/" + kUnknownTensors)) unknown.emplace(*kept + "/" + kUnknownTensors);
  TensorSource source(checkpoint, tensors, unknown ? &*unknown : nullptr, progress);
  if (!kept) files = new_files(tensors, options.shard_bytes);
  std::vector<std::string> dropped;
  if (options.drop_unknown) {
    for (PublicFile& file : files) {
      const auto begin = std::remove_if(file.entries.begin(), file.entries.end(),
                                        [&](const SafeEntry& entry) { return !source.is_known(entry.name); });
      if (begin == file.entries.end()) continue;
      for (auto entry = begin; entry != file.entries.end(); ++entry) dropped.push_back(entry->name);
      file.entries.erase(begin, file.entries.end());
      file.header.clear();
    }
    std::erase_if(files, [](const PublicFile& file) { return file.entries.empty(); });
    if (!dropped.empty()) notices.push_back("left out: " + list_text(dropped));
  }
  for (PublicFile& file : files) {
    if (file.header.empty()) file.header = make_safetensors_header(file.entries, {{"format", "pt"}});
    int64_t bytes = 0;
    for (const SafeEntry& entry : file.entries) bytes += entry.bytes;
    SafetensorsWriter writer(fmt::format("{}/{}", out, file.name), file.header, bytes);
    for (const SafeEntry& entry : file.entries) source.write(entry, writer);
    writer.finish();
  }
  if (!kept) {
    const std::optional<HfMarks> marks = marks_of(saved.data.tokenizer);
    if (!marks)
      notices.push_back("config.json names no bos and eos: data.tokenizer, " + saved.data.tokenizer +
                        ", cannot be read here");
    write_file_atomically(out + "/config.json", hf_config_json(model, saved.data.sequence_length, marks));
    if (files.size() > 1) write_file_atomically(out + "/" + kIndex, index_json(files));
    return;
  }
  for (const std::string& name : list_directory(*kept)) {
    if (name.ends_with(kHeaderSuffix) || name == kUnknownTensors) continue;
    const std::string content =
        name == kIndex && !dropped.empty() ? index_json(files) : read_whole_file(fmt::format("{}/{}", *kept, name));
    write_file_atomically(fmt::format("{}/{}", out, name), content);
  }
}

}  // namespace

std::vector<std::string> export_hf(const std::string& checkpoint, const std::string& out, const ExportOptions& options,
                                   const std::function<void(int64_t bytes)>& progress) {
  const std::string folder = out.substr(0, out.find_last_not_of('/') + 1);
  if (path_exists(folder)) throw_user_error(folder, ": already exists; export writes a new folder");
  const std::string partial = folder + std::string(kPartialSuffix);
  std::vector<std::string> notices;
  try {
    const NewestCheckpoint newest = use_checkpoint(checkpoint, [&](CheckpointReader& reader) {
      try_remove(partial);
      create_directories(partial);
      notices.clear();
      write_folder(reader, partial, options, progress, notices);
    });
    for (const SkippedCheckpoint& skipped : newest.skipped) notices.push_back(to_text(skipped));
    sync_directory(partial);
    rename_path(partial, folder);
  } catch (...) {
    try_remove(partial);
    throw;
  }
  return notices;
}

}  // namespace palimpsest
