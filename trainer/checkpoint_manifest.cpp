#include "trainer/checkpoint_manifest.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

namespace palimpsest {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "palimpsest checkpoint";

// The last lines, of fixed length, stand outside what the checksum covers.
std::string trailer(std::string_view covered) {
  return fmt::format(" \"manifest_crc32\": \"{:08x}\"\n}}\n", crc32_of(std::as_bytes(std::span(covered))));
}

// ---- writing --------------------------------------------------------------------------------------------------------

// A config or path that is not UTF-8 must not stop a save.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <class Fields>
Json to_json(const Fields& fields) {
  Json object;
  const auto add = [&](const char* name, int64_t value) { object[name] = value; };
  Fields copy = fields;
  copy.visit(add);
  return object;
}

Json to_json(const FileRecord& file) {
  return {{"name", file.name}, {"bytes", file.bytes}};
}

Json to_json(const DatasetRecord& dataset) {
  return {{"name", dataset.name},
          {"file", dataset.file},
          {"global_shape", extents_of(dataset.global_shape)},
          {"start", extents_of(dataset.region.start)},
          {"shape", extents_of(dataset.region.shape)},
          {"dtype", name_of(dataset.dtype)},
          {"crc32", fmt::format("{:08x}", dataset.crc32)}};
}

template <class Record>
std::string list_text(const char* name, const std::vector<Record>& records) {
  std::string text = fmt::format(" \"{}\": [\n", name);
  for (size_t i = 0; i < records.size(); ++i)
    text += "  " + dump(to_json(records[i])) + (i + 1 < records.size() ? ",\n" : "\n");
  return text + " ],\n";
}

// ---- reading --------------------------------------------------------------------------------------------------------

// One object of the manifest; every question it cannot answer is a complaint that names the field.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) throw CheckpointDamage(where_ + ": expected an object");
  }

  const Json& at(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end()) complain(name, "is missing");
    return *found;
  }
  std::string text(const char* name) const {
    if (!at(name).is_string()) complain(name, "is not a text");
    return at(name).get<std::string>();
  }
  int64_t whole_number(const char* name) const { return whole_number(name, at(name)); }
  Shape shape(const char* name) const {
    const Json& list = at(name);
    if (!list.is_array() || list.empty() || list.size() > Shape::kMaxDims)
      complain(name, fmt::format("is not a list of 1 to {} extents", Shape::kMaxDims));
    Shape shape;
    for (const Json& extent : list) shape.push_back(whole_number(name, extent));
    return shape;
  }
  uint32_t checksum(const char* name) const {
    const std::string digits = text(name);
    if (digits.size() != 8 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
      complain(name, "is not 8 hexadecimal digits");
    return static_cast<uint32_t>(std::stoul(digits, nullptr, 16));
  }
  DType dtype(const char* name) const {
    const std::string value = text(name);
    for (const DType known : {DType::kF32, DType::kF64})
      if (value == name_of(known)) return known;
    complain(name, "is neither f32 nor f64");
  }
  template <class Body>
  void for_each(const char* name, Body&& body) const {
    const Json& list = at(name);
    if (!list.is_array()) complain(name, "is not a list");
    for (size_t i = 0; i < list.size(); ++i) body(Fields(list[i], fmt::format("{}: {}[{}]", where_, name, i)));
  }
  template <class Target>
  void read_into(Target& target) const {
    const auto take = [&](const char* name, int64_t& value) { value = whole_number(name); };
    target.visit(take);
  }
  [[noreturn]] void complain(const char* name, const std::string& what) const {
    throw CheckpointDamage(fmt::format("{}: field '{}' {}", where_, name, what));
  }

 private:
  int64_t whole_number(const char* name, const Json& value) const {
    const bool too_large = value.is_number_unsigned() &&
                           value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (!value.is_number_integer() || too_large || value.get<int64_t>() < 0)
      complain(name, "is not a whole number, 0 or more");
    return value.get<int64_t>();
  }

  const Json& object_;
  std::string where_;
};

TrainState read_state(const Fields& fields) {
  TrainState state;
  fields.read_into(state);
  const Json& losses = fields.at("eval_losses");
  if (!losses.is_object()) fields.complain("eval_losses", "is not an object");
  for (const auto& [name, loss] : losses.items()) {
    if (!loss.is_number() && !loss.is_null()) fields.complain("eval_losses", "holds something else than numbers");
    // JSON has no word for infinity and NaN: they are written as null.
    state.eval_losses[name] = loss.is_null() ? std::numeric_limits<double>::quiet_NaN() : loss.get<double>();
  }
  return state;
}

FileRecord read_file_record(const Fields& fields) {
  FileRecord file = {fields.text("name"), fields.whole_number("bytes")};
  // The name becomes part of a path: it must not lead out of the folder.
  if (file.name.empty() || file.name[0] == '.' || file.name.find('/') != std::string::npos ||
      file.name.find('\0') != std::string::npos)
    fields.complain("name", "is not a plain file name");
  return file;
}

DatasetRecord read_dataset_record(const Fields& fields) {
  DatasetRecord dataset = {fields.text("name"),          fields.text("file"),
                           fields.shape("global_shape"), {fields.shape("start"), fields.shape("shape")},
                           fields.dtype("dtype"),        fields.checksum("crc32")};
  const Shape& global = dataset.global_shape;
  const auto& [start, shape] = dataset.region;
  constexpr int64_t kMostElements = int64_t{1} << 56;
  int64_t elements = 1;
  for (int i = 0; i < global.num_dims(); ++i) {
    if (global[i] == 0 || global[i] > kMostElements / elements) fields.complain("global_shape", "is not plausible");
    elements *= global[i];
  }
  bool inside = start.num_dims() == global.num_dims() && shape.num_dims() == global.num_dims();
  for (int i = 0; inside && i < global.num_dims(); ++i)
    inside = shape[i] > 0 && shape[i] <= global[i] && start[i] <= global[i] - shape[i];
  if (!inside) fields.complain("shape", "and start do not lie in global_shape");
  return dataset;
}

void check_covered_once(const Manifest& manifest, const std::string& path) {
  std::map<std::string, std::vector<const DatasetRecord*>> blocks_by_name;
  for (const DatasetRecord& dataset : manifest.datasets) blocks_by_name[dataset.name].push_back(&dataset);
  for (auto& [name, blocks] : blocks_by_name) {
    const auto complain = [&, &name = name](const char* what) {
      throw CheckpointDamage(fmt::format("{}: dataset '{}' {}", path, name, what));
    };
    int64_t elements = 0;
    for (const DatasetRecord* block : blocks) {
      if (block->global_shape != blocks[0]->global_shape || block->dtype != blocks[0]->dtype)
        complain("has blocks of different tensors");
      elements += block->region.shape.numel();
    }
    // From the top row down, a block can only overlap those that start above its last row.
    std::sort(blocks.begin(), blocks.end(),
              [](const DatasetRecord* a, const DatasetRecord* b) { return a->region.start[0] < b->region.start[0]; });
    for (size_t i = 0; i < blocks.size(); ++i) {
      const Region& above = blocks[i]->region;
      const int64_t end = above.start[0] + above.shape[0];
      for (size_t j = i + 1; j < blocks.size() && blocks[j]->region.start[0] < end; ++j)
        if (overlap(above, blocks[j]->region)) complain("has blocks that overlap");
    }
    if (elements != blocks[0]->global_shape.numel()) complain("is not covered by its blocks");
  }
}

void check_files(const Manifest& manifest, const std::string& path) {
  std::set<std::string> files;
  for (const FileRecord& file : manifest.files)
    if (!files.insert(file.name).second)
      throw CheckpointDamage(fmt::format("{}: file '{}' is listed twice", path, file.name));
  std::set<std::pair<std::string, std::string>> places;
  for (const DatasetRecord& dataset : manifest.datasets) {
    if (!files.contains(dataset.file))
      throw CheckpointDamage(
          fmt::format("{}: dataset '{}' stands in '{}', which is not listed", path, dataset.name, dataset.file));
    if (!places.insert({dataset.file, dataset.name}).second)
      throw CheckpointDamage(fmt::format("{}: dataset '{}' stands twice in '{}'", path, dataset.name, dataset.file));
  }
}

std::string_view covered_part(std::string_view text, const std::string& path) {
  const size_t trailer_size = trailer("").size();
  if (text.size() < trailer_size) throw CheckpointDamage(path + ": too short to be a manifest");
  const std::string_view covered = text.substr(0, text.size() - trailer_size);
  if (text.substr(covered.size()) != trailer(covered))
    throw CheckpointDamage(path + ": its checksum does not match: the file was changed or cut off");
  return covered;
}

}  // namespace

std::string to_text(const RankFile& rank_file) {
  Json json = {{"file", to_json(rank_file.file)}, {"datasets", Json::array()}};
  for (const DatasetRecord& dataset : rank_file.datasets) json["datasets"].push_back(to_json(dataset));
  return dump(json);
}

RankFile parse_rank_file(std::string_view text) {
  const Json json = Json::parse(text);
  const Fields fields(json, "the list of a rank's blocks");
  RankFile rank_file = {read_file_record(Fields(fields.at("file"), "the list of a rank's blocks: file")), {}};
  fields.for_each("datasets", [&](const Fields& record) { rank_file.datasets.push_back(read_dataset_record(record)); });
  return rank_file;
}

void check_complete(const Manifest& manifest, const std::string& path) {
  check_files(manifest, path);
  check_covered_once(manifest, path);
}

std::string to_text(const Manifest& manifest) {
  const CheckpointHeader& header = manifest.header;
  Json state = to_json(header.state);
  state["eval_losses"] = Json::object();
  for (const auto& [name, loss] : header.state.eval_losses) state["eval_losses"][name] = loss;
  std::string text = "{\n";
  const auto add = [&](const char* name, const Json& value) {
    text += fmt::format(" \"{}\": {},\n", name, dump(value));
  };
  add("format", kFormat);
  add("format_version", Manifest::kFormatVersion);
  add("program", header.program);
  add("state", state);
  add("world", to_json(header.world));
  add("config", header.config);
  text += list_text("files", manifest.files);
  text += list_text("datasets", manifest.datasets);
  return text + trailer(text);
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  covered_part(text, path);
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) throw CheckpointDamage(path + ": not valid JSON");
  const Fields fields(json, path);
  if (fields.text("format") != kFormat) fields.complain("format", fmt::format("is not '{}'", kFormat));
  const int64_t version = fields.whole_number("format_version");
  if (version != Manifest::kFormatVersion)
    throw_user_error(path, ": written in format version ", version, " by ", fields.text("program"),
                     "; this program reads version ", Manifest::kFormatVersion);
  Manifest manifest;
  manifest.header.program = fields.text("program");
  manifest.header.config = fields.text("config");
  manifest.header.state = read_state(Fields(fields.at("state"), path + ": state"));
  Fields(fields.at("world"), path + ": world").read_into(manifest.header.world);
  fields.for_each("files", [&](const Fields& file) { manifest.files.push_back(read_file_record(file)); });
  fields.for_each("datasets", [&](const Fields& record) { manifest.datasets.push_back(read_dataset_record(record)); });
  check_complete(manifest, path);
  return manifest;
}

uint32_t crc32_of(std::span<const std::byte> bytes, uint32_t before) {
  return static_cast<uint32_t>(::crc32_z(before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace palimpsest
