// The inside of Hdf5File: handles of the library and what is done with them under its lock. Included by hdf5_*.cpp
// alone.
#pragma once

#include <hdf5.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "data/hdf5_driver.h"
#include "data/hdf5_file.h"
#include "kernels/check.h"

namespace palimpsest {

namespace hdf5 {

// One lock for the library, whether or not it was built to have its own. Error reports are kept by thread, so printing
// them is switched off each time.
class LibraryLock {
 public:
  LibraryLock() : lock_(mutex()) {
    static const bool kReady = [] {
      // At exit the library would flush what is still open; every file here is closed by its owner. The call fails only
      // when other code has started the library before, whose exit handler then stays.
      static_cast<void>(H5dont_atexit());
      return H5open() >= 0;
    }();
    CHECK(kReady, "the HDF5 library could not be started");
    CHECK(H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex library;
    return library;
  }
  std::lock_guard<std::mutex> lock_;
};

// An identifier of the library with the function that gives it back. Used under the lock.
class Id {
 public:
  using Close = herr_t (*)(hid_t);
  Id() = default;
  Id(hid_t id, Close close) : id_(id), close_(close) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Id& operator=(Id&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  Id(const Id&) = delete;
  Id& operator=(const Id&) = delete;
  ~Id() { close(); }

  operator hid_t() const { return id_; }
  herr_t close() { return id_ >= 0 ? close_(std::exchange(id_, -1)) : 0; }

 private:
  hid_t id_ = -1;
  Close close_ = nullptr;
};

using Extents = std::vector<int64_t>;

std::vector<hsize_t> to_hsize(const Extents& extents);

// What the library says was the root of its last failure in this thread, on one line.
std::string library_cause();

// Chunks of at most max_bytes: rows as long as they fit; a longer row is cut the same way.
std::vector<hsize_t> chunk_of(const Extents& shape, int64_t element_size, int64_t max_bytes);

}  // namespace hdf5

// Everything in here is used under the lock.
struct Hdf5File::Impl {
  using Extents = hdf5::Extents;
  using Id = hdf5::Id;

  Hdf5FileState state;
  Id file;
  bool writable = false;

  // The dataset used last stays open; one is enough for files that are read or written one dataset after another.
  std::string open_name;
  Id open_id;
  Hdf5Dataset open_info;
  Extents open_chunk;

  explicit Impl(const std::string& path) { state.path = path; }

  [[noreturn]] void fail(const std::string& action) const;
  template <class Result>
  Result check(Result result, const std::string& action) const {
    if (result < 0 || !state.error.empty()) fail(action);
    return result;
  }
  Id checked(hid_t id, Id::Close close, const std::string& action) const;

  Id file_access();  // a property list

  bool exists(const std::string& name) const;

  void create_groups(const std::string& name);

  void create(const std::string& name, Hdf5Type type, const std::vector<hsize_t>& shape,
              const std::vector<hsize_t>& most, const std::vector<hsize_t>& chunk);

  // Makes `name` the open dataset.
  void use(const std::string& name);

  Hdf5Dataset describe(const std::string& name, const std::string& action) const;

  Extents chunk_in_file(const Hdf5Dataset& info, const std::string& action) const;

  void close_dataset();

  enum class Direction : uint8_t { kRead, kWrite };

  // The part `piece` of the block `start`, `shape`, whose elements stand in `data`.
  void transfer(Direction direction, const std::string& name, void* data, const Extents& start, const Extents& shape,
                const Extents& piece_start, const Extents& piece_shape);

  void transfer_block(Direction direction, const std::string& name, Hdf5Type type, void* data, size_t count,
                      const Extents& start, const Extents& shape);

  // ---- attributes -------------------------------------------------------------------------------------------------
  Id object(const std::string& name, const std::string& action) const;

  void set(const std::string& object_name, const std::string& name, hid_t stored_type, hid_t space, hid_t given_type,
           const void* value) const;

  // Calls body(attribute, its type, number of values).
  template <class Body>
  auto get(const std::string& object_name, const std::string& name, Body&& body) const {
    const hdf5::LibraryLock lock;
    const std::string action = "read the attribute '" + name + "' of '" + object_name + "'";
    const Id owner = object(object_name, action);
    if (check(H5Aexists(owner, name.c_str()), action) == 0)
      throw_user_error(state.path, ": has no attribute '", name, "' of '", object_name, "'");
    const Id attribute = checked(H5Aopen(owner, name.c_str(), H5P_DEFAULT), H5Aclose, action);
    const Id type = checked(H5Aget_type(attribute), H5Tclose, action);
    const Id space = checked(H5Aget_space(attribute), H5Sclose, action);
    const auto count = check(H5Sget_simple_extent_npoints(space), action);
    const auto require = [&](bool holds, const char* expected) {
      if (!holds) throw_user_error(state.path, ": attribute '", name, "' of '", object_name, "' should be ", expected);
    };
    return body(attribute, type, count, action, require);
  }
};

}  // namespace palimpsest
