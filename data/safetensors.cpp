#include "data/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "kernels/tensor.h"

namespace palimpsest {

namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxHeaderBytes = int64_t{100} << 20;

struct DTypeRow {
  SafeDType dtype;
  const char* name;
  int64_t size;
};
constexpr DTypeRow kDTypes[] = {
    {SafeDType::kBool, "BOOL", 1}, {SafeDType::kU8, "U8", 1},   {SafeDType::kI8, "I8", 1},
    {SafeDType::kI16, "I16", 2},   {SafeDType::kU16, "U16", 2}, {SafeDType::kF16, "F16", 2},
    {SafeDType::kBF16, "BF16", 2}, {SafeDType::kI32, "I32", 4}, {SafeDType::kU32, "U32", 4},
    {SafeDType::kF32, "F32", 4},   {SafeDType::kF64, "F64", 8}, {SafeDType::kI64, "I64", 8},
    {SafeDType::kU64, "U64", 8},
};

const DTypeRow& row_of(SafeDType dtype) {
  for (const DTypeRow& row : kDTypes)
    if (row.dtype == dtype) return row;
  CHECK(false, "unknown dtype");
  return kDTypes[0];
}

// Names come from the file: they must not break a message into lines.
std::string printable(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return c < ' ' || c == 0x7F; }, '?');
  return name;
}

// Parses JSON and refuses an object that names a key twice, which the parser alone would let pass.
Json parse_unique(std::string_view text, const std::string& path) {
  std::vector<std::set<std::string>> keys;
  std::string twice;
  const auto watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      twice = value.get<std::string>();
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, watch);
  } catch (const Json::exception& error) {
    throw_user_error(path, ": the header is not valid JSON: ", printable(error.what()));
  }
  if (!twice.empty()) throw_user_error(path, ": the header names '", printable(twice), "' twice");
  if (!json.is_object()) throw_user_error(path, ": the header must be a JSON object");
  return json;
}

// A non-negative integer of the header.
int64_t natural(const Json& value, const std::string& where, const char* what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{1} << 62)
    throw_user_error(where, ": ", what, " holds ", value.dump(), ", must be a non-negative integer");
  return static_cast<int64_t>(value.get<uint64_t>());
}

// What a header says of one tensor, consistent in itself.
struct Extent {
  SafeDType dtype = SafeDType::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes of the data
};

Extent parse_extent(const Json& entry, const std::string& where) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets"))
    throw_user_error(where, ": needs dtype, shape and data_offsets");
  Extent extent;
  const Json& dtype = entry.at("dtype");
  const auto row = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                [&](const DTypeRow& candidate) { return dtype == candidate.name; });
  if (row == std::end(kDTypes)) throw_user_error(where, ": dtype ", dtype.dump(), " is not known");
  extent.dtype = row->dtype;

  const Json& shape = entry.at("shape");
  if (!shape.is_array()) throw_user_error(where, ": shape must be a list");
  int64_t numel = 1;
  for (const Json& size : shape) {
    const int64_t value = natural(size, where, "shape");
    extent.shape.push_back(value);
    if (__builtin_mul_overflow(numel, value, &numel)) throw_user_error(where, ": shape ", shape.dump(), " overflows");
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(numel, row->size, &bytes)) throw_user_error(where, ": shape ", shape.dump(), " overflows");

  const Json& offsets = entry.at("data_offsets");
  if (!offsets.is_array() || offsets.size() != 2) throw_user_error(where, ": data_offsets must be two numbers");
  extent.begin = natural(offsets[0], where, "data_offsets");
  extent.end = natural(offsets[1], where, "data_offsets");
  if (extent.begin > extent.end) throw_user_error(where, ": data_offsets ", offsets.dump(), " do not lie in order");
  if (extent.end - extent.begin != bytes)
    throw_user_error(where, ": data_offsets ", offsets.dump(), " hold ", extent.end - extent.begin,
                     " bytes, dtype and shape need ", bytes);
  return extent;
}

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal, or zero
  return sign ? -magnitude : magnitude;
}

uint16_t float_to_half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));  // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to more than the largest
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the value in units of 2^-24, rounded, in the low mantissa bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

template <class T, class Convert>
std::vector<std::byte> convert_all(std::span<const float> values, Convert&& convert) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T element = convert(values[i]);
    std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
  }
  return bytes;
}

// out[i] = convert(element start + i), elements of type T.
template <class T, class Convert, class Out>
void read_elements(const SafeTensor& tensor, int64_t start, std::span<Out> out, Convert&& convert) {
  const std::byte* source = tensor.bytes.data() + static_cast<size_t>(start) * sizeof(T);
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, source + i * sizeof(T), sizeof(T));
    out[i] = convert(value);
  }
}

}  // namespace

const char* name_of(SafeDType dtype) {
  return row_of(dtype).name;
}

int64_t size_of(SafeDType dtype) {
  return row_of(dtype).size;
}

int64_t SafeTensor::numel() const {
  return static_cast<int64_t>(bytes.size()) / size_of(dtype);
}

std::map<std::string, SafeTensor> parse_safetensors_header(std::span<const std::byte> header,
                                                           std::span<const std::byte> payload,
                                                           const std::string& path) {
  const Json json = parse_unique({reinterpret_cast<const char*>(header.data()), header.size()}, path);
  std::map<std::string, SafeTensor> tensors;
  std::vector<std::pair<std::pair<int64_t, int64_t>, std::string>> ranges;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") continue;
    const std::string where = path + ": tensor '" + printable(name) + "'";
    const Extent extent = parse_extent(entry, where);
    if (extent.end > static_cast<int64_t>(payload.size()))
      throw_user_error(where, ": data_offsets ", entry.at("data_offsets").dump(), " do not lie in the file's ",
                       payload.size(), " bytes of data");
    tensors[name] = {
        extent.dtype, extent.shape,
        payload.subspan(static_cast<size_t>(extent.begin), static_cast<size_t>(extent.end - extent.begin))};
    ranges.push_back({{extent.begin, extent.end}, name});
  }
  std::sort(ranges.begin(), ranges.end());
  int64_t end = 0;
  for (const auto& [range, name] : ranges) {
    if (range.first < end) throw_user_error(path, ": tensor '", printable(name), "' overlaps the one before it");
    if (range.first > end)
      throw_user_error(path, ": ", range.first - end, " bytes before tensor '", printable(name), "' belong to none");
    end = range.second;
  }
  if (end != static_cast<int64_t>(payload.size()))
    throw_user_error(path, ": ", static_cast<int64_t>(payload.size()) - end, " bytes at the end belong to no tensor");
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const std::span<const std::byte> bytes = file_.bytes();
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) throw_user_error(path, ": too short for a safetensors file");
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  const std::span<const std::byte> rest = bytes.subspan(sizeof(header_bytes));
  if (header_bytes > rest.size() || header_bytes > static_cast<uint64_t>(kMaxHeaderBytes))
    throw_user_error(path, ": byte 0: a header of ", header_bytes, " bytes does not fit the file of ", bytes.size());
  header_ = rest.first(header_bytes);
  tensors_ = parse_safetensors_header(header_, rest.subspan(header_bytes), path);
}

SafetensorsFolder::SafetensorsFolder(const std::string& directory) : directory_(directory) {
  const std::string single = directory + "/model.safetensors";
  const std::string index = directory + "/model.safetensors.index.json";
  std::map<std::string, std::string> file_of;  // tensor -> file, from the index
  if (path_exists(index)) {
    const Json json = parse_unique(read_whole_file(index), index);
    if (!json.contains("weight_map") || !json.at("weight_map").is_object())
      throw_user_error(index, ": needs an object weight_map");
    std::set<std::string> files;
    for (const auto& [name, file] : json.at("weight_map").items()) {
      if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
        throw_user_error(index, ": tensor '", printable(name), "': ", file.dump(), " is no file of this folder");
      file_of[name] = file.get<std::string>();
      files.insert(file_of[name]);
    }
    for (const std::string& file : files) files_.emplace_back(std::string(directory).append("/").append(file));
  } else if (path_exists(single)) {
    files_.emplace_back(single);
  } else {
    throw_user_error(directory, ": holds neither model.safetensors nor model.safetensors.index.json");
  }
  for (const SafetensorsFile& file : files_) {
    for (const auto& [name, tensor] : file.tensors()) {
      if (!tensors_.emplace(name, &tensor).second)
        throw_user_error(file.path(), ": tensor '", printable(name), "' stands in another file too");
    }
  }
  for (const auto& [name, file] : file_of)
    if (!find(name)) throw_user_error(index, ": tensor '", printable(name), "' is not in ", printable(file));
}

const SafeTensor* SafetensorsFolder::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

std::vector<std::string> SafetensorsFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

void SafetensorsFolder::release(std::span<const std::byte> part) const {
  for (const SafetensorsFile& file : files_)
    if (file.holds(part)) return file.release(part);
}

void read_as_f32(const SafeTensor& tensor, int64_t start, std::span<float> out, const std::string& where) {
  CHECK(start >= 0 && start + static_cast<int64_t>(out.size()) <= tensor.numel(), where);
  switch (tensor.dtype) {
    case SafeDType::kF32:
      read_elements<float>(tensor, start, out, [](float x) { return x; });
      return;
    case SafeDType::kF64:
      read_elements<double>(tensor, start, out, [](double x) { return static_cast<float>(x); });
      return;
    case SafeDType::kF16:
      read_elements<uint16_t>(tensor, start, out, half_to_float);
      return;
    case SafeDType::kBF16:
      read_elements<uint16_t>(tensor, start, out, [](uint16_t x) { return to_float(BF16{x}); });
      return;
    default:
      throw_user_error(where, ": dtype ", name_of(tensor.dtype), ", weights must be F32, F16, BF16 or F64");
  }
}

std::vector<int32_t> read_as_i32(const SafeTensor& tensor, const std::string& where) {
  std::vector<int32_t> values(static_cast<size_t>(tensor.numel()));
  const std::span<int32_t> out(values);
  if (tensor.dtype == SafeDType::kI32) {
    read_elements<int32_t>(tensor, 0, out, [](int32_t x) { return x; });
  } else if (tensor.dtype == SafeDType::kI64) {
    read_elements<int64_t>(tensor, 0, out, [&](int64_t x) {
      if (x < INT32_MIN || x > INT32_MAX) throw_user_error(where, ": ", x, " does not fit 32 bits");
      return static_cast<int32_t>(x);
    });
  } else {
    throw_user_error(where, ": dtype ", name_of(tensor.dtype), ", ids must be I32 or I64");
  }
  return values;
}

std::vector<SafeEntry> list_safetensors_header(std::span<const std::byte> header, const std::string& path) {
  const Json json = parse_unique({reinterpret_cast<const char*>(header.data()), header.size()}, path);
  std::vector<std::pair<int64_t, SafeEntry>> entries;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") continue;
    const Extent extent = parse_extent(entry, path + ": tensor '" + printable(name) + "'");
    entries.push_back({extent.begin, {name, extent.dtype, extent.shape, extent.end - extent.begin}});
  }
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<SafeEntry> list;
  int64_t end = 0;
  for (auto& [begin, entry] : entries) {
    if (begin != end)
      throw_user_error(path, ": tensor '", printable(entry.name), "' does not follow the one before it");
    end += entry.bytes;
    list.push_back(std::move(entry));
  }
  return list;
}

std::string make_safetensors_header(std::vector<SafeEntry>& entries,
                                    const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (SafeEntry& entry : entries) {
    CHECK(!header.contains(entry.name), "tensor ", entry.name, " is written twice");
    int64_t numel = 1;
    for (const int64_t extent : entry.shape) numel *= extent;
    entry.bytes = numel * size_of(entry.dtype);
    header[entry.name] = {
        {"dtype", name_of(entry.dtype)}, {"shape", entry.shape}, {"data_offsets", {offset, offset + entry.bytes}}};
    offset += entry.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::string_view header, int64_t data_bytes)
    : file_(path, OutputFile::Mode::kReplace), left_(data_bytes) {
  const uint64_t header_bytes = header.size();
  file_.write(std::as_bytes(std::span(&header_bytes, 1)));
  file_.write(header);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  left_ -= static_cast<int64_t>(bytes.size());
  CHECK(left_ >= 0, file_.path(), ": more data than its header says");
  file_.write(bytes);
}

void SafetensorsWriter::finish() {
  CHECK(left_ == 0, file_.path(), ": ", left_, " bytes of data are missing");
  file_.sync();
  file_.close();
}

std::vector<std::byte> to_elements(std::span<const float> values, SafeDType dtype) {
  switch (dtype) {
    case SafeDType::kF32:
      return convert_all<float>(values, [](float x) { return x; });
    case SafeDType::kF64:
      return convert_all<double>(values, [](float x) { return static_cast<double>(x); });
    case SafeDType::kF16:
      return convert_all<uint16_t>(values, float_to_half);
    case SafeDType::kBF16:
      return convert_all<uint16_t>(values, [](float x) { return to_bf16(x).bits; });
    default:
      CHECK(false, "weights are not written as ", name_of(dtype));
      return {};
  }
}

void write_safetensors(const std::string& path, const std::vector<NamedSafeTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<SafeEntry> entries;
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    entries.push_back({name, tensor.dtype, tensor.shape, 0});
    bytes += static_cast<int64_t>(tensor.bytes.size());
  }
  const std::string temporary = path + ".partial";
  try {
    SafetensorsWriter writer(temporary, make_safetensors_header(entries, metadata), bytes);
    for (const auto& [name, tensor] : tensors) writer.write(tensor.bytes);
    writer.finish();
    rename_path(temporary, path);
  } catch (...) {
    try_remove(temporary);
    throw;
  }
}

}  // namespace palimpsest
