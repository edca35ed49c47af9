// HDF5 files: checked, checksummed, safe to use from several threads.
//
// Written so that every flipped bit is seen: metadata of format 1.10 carries checksums, every dataset is chunked with
// Fletcher32. Times are not recorded, so equal content gives equal files. The library has one lock for the process;
// it is taken for each piece of at most 4 MiB, so that reading data and writing a checkpoint interleave. No file locks.
// A failure is a UserError of one line that names the file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace palimpsest {

// Element types of datasets, all little endian in the file.
enum class Hdf5Type : uint8_t { kF32, kF64, kU8, kU16, kU32, kI32, kI64 };
int64_t size_of(Hdf5Type type);      // bytes
const char* name_of(Hdf5Type type);  // "f32", "u16", ...

template <class T>
struct Hdf5TypeOf;
template <>
struct Hdf5TypeOf<float> {
  static constexpr Hdf5Type value = Hdf5Type::kF32;
};
template <>
struct Hdf5TypeOf<double> {
  static constexpr Hdf5Type value = Hdf5Type::kF64;
};
template <>
struct Hdf5TypeOf<uint8_t> {
  static constexpr Hdf5Type value = Hdf5Type::kU8;
};
template <>
struct Hdf5TypeOf<uint16_t> {
  static constexpr Hdf5Type value = Hdf5Type::kU16;
};
template <>
struct Hdf5TypeOf<uint32_t> {
  static constexpr Hdf5Type value = Hdf5Type::kU32;
};
template <>
struct Hdf5TypeOf<int32_t> {
  static constexpr Hdf5Type value = Hdf5Type::kI32;
};
template <>
struct Hdf5TypeOf<int64_t> {
  static constexpr Hdf5Type value = Hdf5Type::kI64;
};

struct Hdf5Dataset {
  Hdf5Type type = Hdf5Type::kF32;
  std::vector<int64_t> shape;  // empty: a single value
  int64_t stored_bytes = 0;    // less than elements * size when parts were never written (or are compressed)

  int64_t num_elements() const;
};

class Hdf5File {
 public:
  static constexpr int64_t kMaxPieceBytes = int64_t{4} << 20;

  static Hdf5File create(const std::string& path);  // replaces what is there
  static Hdf5File open(const std::string& path);    // read-only
  Hdf5File(Hdf5File&&) noexcept;
  Hdf5File& operator=(Hdf5File&&) noexcept;
  // A created file that was not closed is abandoned: no longer written to, and not readable as HDF5.
  ~Hdf5File();

  // Writes what is still in memory and closes. When anything about the file failed, now or earlier, it throws; nothing
  // of the file stays open either way. Follow with sync_file for the contents to reach the disk.
  void close();
  const std::string& path() const;

  // ---- datasets: "name" or "group/name"; groups are made as needed --------------------------------------------------
  // Chunks are whole rows (dimension 0) where they fit into max_chunk_bytes. Extents may be 0, a shape may not be
  // empty.
  void create_dataset(const std::string& name, Hdf5Type type, const std::vector<int64_t>& shape,
                      int64_t max_chunk_bytes = kMaxPieceBytes);
  // One-dimensional, of length 0; grows by append.
  void create_growing_dataset(const std::string& name, Hdf5Type type, int64_t chunk_elements);

  // T must be the type of the dataset. data holds the block of `shape` at `start`, row by row.
  template <class T>
  void write(const std::string& name, std::span<const T> data, const std::vector<int64_t>& start,
             const std::vector<int64_t>& shape) {
    write_block(name, Hdf5TypeOf<T>::value, data.data(), data.size(), start, shape);
  }
  template <class T>
  void write(const std::string& name, std::span<const T> data) {  // all of it
    const Hdf5Dataset info = dataset(name);
    write<T>(name, data, std::vector<int64_t>(info.shape.size(), 0), info.shape);
  }
  template <class T>
  void append(const std::string& name, std::span<const T> data) {
    append_elements(name, Hdf5TypeOf<T>::value, data.data(), data.size());
  }
  template <class T>
  void read(const std::string& name, std::span<T> out, const std::vector<int64_t>& start,
            const std::vector<int64_t>& shape) const {
    read_block(name, Hdf5TypeOf<T>::value, out.data(), out.size(), start, shape);
  }
  template <class T>
  std::vector<T> read(const std::string& name) const {  // all of it
    const Hdf5Dataset info = dataset(name);
    check_plausible(name, info);
    std::vector<T> out(info.num_elements());
    read<T>(name, out, std::vector<int64_t>(info.shape.size(), 0), info.shape);
    return out;
  }

  bool has_dataset(const std::string& name) const;
  Hdf5Dataset dataset(const std::string& name) const;  // throws when it is missing
  std::vector<std::string> dataset_names() const;      // all, with their groups, in byte order

  // ---- attributes of a dataset, a group or, as "/", the file --------------------------------------------------------
  void set_int(const std::string& object, const std::string& name, int64_t value);
  void set_double(const std::string& object, const std::string& name, double value);
  void set_string(const std::string& object, const std::string& name, const std::string& value);  // without NUL
  void set_ints(const std::string& object, const std::string& name, const std::vector<int64_t>& values);

  bool has_attribute(const std::string& object, const std::string& name) const;
  int64_t get_int(const std::string& object, const std::string& name) const;    // integers and booleans of any width
  double get_double(const std::string& object, const std::string& name) const;  // any number
  std::string get_string(const std::string& object, const std::string& name) const;
  std::vector<int64_t> get_ints(const std::string& object, const std::string& name) const;

 private:
  struct Impl;
  explicit Hdf5File(std::unique_ptr<Impl> impl);

  void write_block(const std::string& name, Hdf5Type type, const void* data, size_t count,
                   const std::vector<int64_t>& start, const std::vector<int64_t>& shape);
  void append_elements(const std::string& name, Hdf5Type type, const void* data, size_t count);
  void read_block(const std::string& name, Hdf5Type type, void* out, size_t count, const std::vector<int64_t>& start,
                  const std::vector<int64_t>& shape) const;
  void check_plausible(const std::string& name, const Hdf5Dataset& info) const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace palimpsest
