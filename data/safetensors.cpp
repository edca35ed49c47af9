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

SafeTensor parse_tensor(const Json& entry, std::span<const std::byte> payload, const std::string& where,
                        std::pair<int64_t, int64_t>& range) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets"))
    throw_user_error(where, ": needs dtype, shape and data_offsets");
  SafeTensor tensor;
  const Json& dtype = entry.at("dtype");
  const auto row = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                [&](const DTypeRow& candidate) { return dtype == candidate.name; });
  if (row == std::end(kDTypes)) throw_user_error(where, ": dtype ", dtype.dump(), " is not known");
  tensor.dtype = row->dtype;

  const Json& shape = entry.at("shape");
  if (!shape.is_array()) throw_user_error(where, ": shape must be a list");
  int64_t numel = 1;
  for (const Json& extent : shape) {
    const int64_t value = natural(extent, where, "shape");
    tensor.shape.push_back(value);
    if (__builtin_mul_overflow(numel, value, &numel)) throw_user_error(where, ": shape ", shape.dump(), " overflows");
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(numel, row->size, &bytes)) throw_user_error(where, ": shape ", shape.dump(), " overflows");

  const Json& offsets = entry.at("data_offsets");
  if (!offsets.is_array() || offsets.size() != 2) throw_user_error(where, ": data_offsets must be two numbers");
  range = {natural(offsets[0], where, "data_offsets"), natural(offsets[1], where, "data_offsets")};
  if (range.first > range.second || range.second > static_cast<int64_t>(payload.size()))
    throw_user_error(where, ": data_offsets ", offsets.dump(), " do not lie in the file's ", payload.size(),
                     " bytes of data");
  if (range.second - range.first != bytes)
    throw_user_error(where, ": data_offsets ", offsets.dump(), " hold ", range.second - range.first,
                     " bytes, dtype and shape need ", bytes);
  tensor.bytes = payload.subspan(static_cast<size_t>(range.first), static_cast<size_t>(bytes));
  return tensor;
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
    std::pair<int64_t, int64_t> range;
    tensors[name] = parse_tensor(entry, payload, path + ": tensor '" + printable(name) + "'", range);
    ranges.emplace_back(range, name);
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
  tensors_ = parse_safetensors_header(rest.first(header_bytes), rest.subspan(header_bytes), path);
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

void write_safetensors(const std::string& path, const std::vector<NamedSafeTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    CHECK(!header.contains(name), "tensor ", name, " is written twice");
    const int64_t end = offset + static_cast<int64_t>(tensor.bytes.size());
    header[name] = {{"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts aligned to 8 bytes
  const uint64_t header_bytes = text.size();
  const std::string temporary = path + ".partial";
  try {
    OutputFile file(temporary, OutputFile::Mode::kReplace);
    file.write(std::as_bytes(std::span(&header_bytes, 1)));
    file.write(text);
    for (const auto& [name, tensor] : tensors) file.write(tensor.bytes);
    file.sync();
    file.close();
    rename_path(temporary, path);
  } catch (...) {
    try_remove(temporary);
    throw;
  }
}

}  // namespace palimpsest
