// safetensors files (https://github.com/huggingface/safetensors, format of 2023): 8 bytes little-endian header length,
// a JSON header {name: {dtype, shape, data_offsets}}, then the bytes of all tensors without gaps.
//
// Files are mapped, not read: a model larger than memory can be taken tensor by tensor. Headers are hostile until
// proved otherwise: lengths, overlaps, gaps, offsets past the end, duplicate names and sizes that do not fit their
// shape are UserErrors that name file and tensor.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/file_ops.h"

namespace palimpsest {

enum class SafeDType : uint8_t { kBool, kU8, kI8, kI16, kU16, kF16, kBF16, kI32, kU32, kF32, kF64, kI64, kU64 };
const char* name_of(SafeDType dtype);  // as in the files: "F32", "BF16", ...
int64_t size_of(SafeDType dtype);

struct SafeTensor {
  SafeDType dtype = SafeDType::kF32;
  std::vector<int64_t> shape;        // any number of dimensions
  std::span<const std::byte> bytes;  // row-major; not aligned; valid as long as the file or folder object
  int64_t numel() const;
};

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::map<std::string, SafeTensor>& tensors() const { return tensors_; }
  const std::string& path() const { return file_.path(); }
  std::span<const std::byte> header() const { return header_; }  // JSON
  bool holds(std::span<const std::byte> part) const {
    const std::span<const std::byte> all = file_.bytes();
    return part.data() >= all.data() && part.data() + part.size() <= all.data() + all.size();
  }
  void release(std::span<const std::byte> part) const { file_.release(part); }

 private:
  MappedFile file_;
  std::span<const std::byte> header_;
  std::map<std::string, SafeTensor> tensors_;
};

// A model's folder: model.safetensors, or model.safetensors.index.json with its shards.
class SafetensorsFolder {
 public:
  explicit SafetensorsFolder(const std::string& directory);

  const SafeTensor* find(const std::string& name) const;  // null when there is none
  std::vector<std::string> names() const;
  const std::string& directory() const { return directory_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  // Takes what was read of a tensor, or of a part of one, out of this process's memory.
  void release(std::span<const std::byte> part) const;

 private:
  std::string directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, const SafeTensor*> tensors_;
};

// Elements [start, start + out.size()) as f32. `where` (file and tensor) stands in the message when the dtype is no
// number type that training can use (only F32, F16, BF16 and F64 are).
void read_as_f32(const SafeTensor& tensor, int64_t start, std::span<float> out, const std::string& where);
// The same for whole I32 or I64 tensors of ids.
std::vector<int32_t> read_as_i32(const SafeTensor& tensor, const std::string& where);

// Reads a header on its own; `payload_bytes` follow it. For tests and fuzzing; `path` stands in messages.
std::map<std::string, SafeTensor> parse_safetensors_header(std::span<const std::byte> header,
                                                           std::span<const std::byte> payload, const std::string& path);

// One line of a header.
struct SafeEntry {
  std::string name;
  SafeDType dtype = SafeDType::kF32;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};
// The tensors of a header that stands alone, in the order of their data.
std::vector<SafeEntry> list_safetensors_header(std::span<const std::byte> header, const std::string& path);
// A header's text, padded so that the data is aligned to 8 bytes. Sets the entries' bytes.
std::string make_safetensors_header(std::vector<SafeEntry>& entries,
                                    const std::map<std::string, std::string>& metadata);

// A file written tensor by tensor, piece by piece, in the order of its header.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::string_view header, int64_t data_bytes);
  void write(std::span<const std::byte> bytes);
  void finish();  // checks that all data is there; it reaches the disk

 private:
  OutputFile file_;
  int64_t left_;
};

// The values in an element type of files: F32, F16, BF16 or F64. Rounds to nearest even.
std::vector<std::byte> to_elements(std::span<const float> values, SafeDType dtype);

// Writes a file whole, under a temporary name first; tensors in the order of the list.
struct NamedSafeTensor {
  std::string name;
  SafeTensor tensor;
};
void write_safetensors(const std::string& path, const std::vector<NamedSafeTensor>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace palimpsest
