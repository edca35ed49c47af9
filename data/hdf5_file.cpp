#include "data/hdf5_file.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <utility>

#include "data/hdf5_driver.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

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

// What the library says was the root of its last failure in this thread, on one line.
std::string library_cause() {
  std::string cause;
  const auto keep_first = [](unsigned position, const H5E_error2_t* error, void* out) -> herr_t {
    if (position == 0 && error->desc != nullptr) *static_cast<std::string*>(out) = error->desc;
    return 0;
  };
  if (H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_first, &cause) < 0 || cause.empty()) cause = "unknown cause";
  std::replace(cause.begin(), cause.end(), '\n', ' ');
  return cause;
}

hid_t file_type(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kF32:
      return H5T_IEEE_F32LE;
    case Hdf5Type::kF64:
      return H5T_IEEE_F64LE;
    case Hdf5Type::kU8:
      return H5T_STD_U8LE;
    case Hdf5Type::kU16:
      return H5T_STD_U16LE;
    case Hdf5Type::kU32:
      return H5T_STD_U32LE;
    case Hdf5Type::kI32:
      return H5T_STD_I32LE;
    case Hdf5Type::kI64:
      return H5T_STD_I64LE;
  }
  CHECK(false, "not an element type");
}

constexpr Hdf5Type kAllTypes[] = {Hdf5Type::kF32, Hdf5Type::kF64, Hdf5Type::kU8, Hdf5Type::kU16,
                                  Hdf5Type::kU32, Hdf5Type::kI32, Hdf5Type::kI64};

using Extents = std::vector<int64_t>;

std::vector<hsize_t> to_hsize(const Extents& extents) {
  return {extents.begin(), extents.end()};
}

int64_t product(const Extents& extents) {  // stops at the largest number: a file may claim anything
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int64_t count = 1;
  for (const int64_t extent : extents) {
    if (extent == 0) return 0;
    count = count > kMost / extent ? kMost : count * extent;
  }
  return count;
}

// Rows as long as they fit into max_bytes; a longer row is cut the same way.
std::vector<hsize_t> chunk_of(const Extents& shape, int64_t element_size, int64_t max_bytes) {
  std::vector<hsize_t> chunk(shape.size(), 1);
  int64_t bytes = element_size;
  for (size_t i = shape.size(); i-- > 0;) {
    const int64_t extent = std::clamp<int64_t>(shape[i], 1, std::max<int64_t>(1, max_bytes / bytes));
    chunk[i] = extent;
    bytes *= extent;
    if (extent < shape[i]) break;
  }
  return chunk;
}

// Cuts the block into pieces of at most kMaxPieceBytes, at chunk borders where a piece holds a chunk, so that no chunk
// is read or written twice.
void for_each_piece(const Extents& start, const Extents& shape, const Extents& chunk, int64_t element_size,
                    const std::function<void(const Extents&, const Extents&)>& body) {
  const int64_t bytes = product(shape) * element_size;
  const auto dim = std::find_if(shape.begin(), shape.end(), [](int64_t extent) { return extent > 1; }) - shape.begin();
  if (bytes <= Hdf5File::kMaxPieceBytes || dim == static_cast<int64_t>(shape.size())) return body(start, shape);
  const int64_t most = std::max<int64_t>(1, Hdf5File::kMaxPieceBytes / (bytes / shape[dim]));
  Extents piece_start = start, piece_shape = shape;
  for (int64_t done = 0; done < shape[dim]; done += piece_shape[dim]) {
    piece_start[dim] = start[dim] + done;
    const int64_t aligned = most >= chunk[dim] ? most - most % chunk[dim] - piece_start[dim] % chunk[dim] : most;
    piece_shape[dim] = std::min(aligned, shape[dim] - done);
    for_each_piece(piece_start, piece_shape, chunk, element_size, body);
  }
}

std::string join(const Extents& extents) {
  std::string text = "[";
  for (size_t i = 0; i < extents.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(extents[i]);
  return text + "]";
}

}  // namespace

int64_t size_of(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kU8:
      return 1;
    case Hdf5Type::kU16:
      return 2;
    case Hdf5Type::kF32:
    case Hdf5Type::kU32:
    case Hdf5Type::kI32:
      return 4;
    case Hdf5Type::kF64:
    case Hdf5Type::kI64:
      return 8;
  }
  CHECK(false, "not an element type");
}

const char* name_of(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kF32:
      return "f32";
    case Hdf5Type::kF64:
      return "f64";
    case Hdf5Type::kU8:
      return "u8";
    case Hdf5Type::kU16:
      return "u16";
    case Hdf5Type::kU32:
      return "u32";
    case Hdf5Type::kI32:
      return "i32";
    case Hdf5Type::kI64:
      return "i64";
  }
  CHECK(false, "not an element type");
}

int64_t Hdf5Dataset::num_elements() const {
  return product(shape);
}

// Everything in here is used under the lock.
struct Hdf5File::Impl {
  Hdf5FileState state;
  Id file;
  bool writable = false;

  // The dataset used last stays open; one is enough for files that are read or written one dataset after another.
  std::string open_name;
  Id open_id;
  Hdf5Dataset open_info;
  Extents open_chunk;

  explicit Impl(const std::string& path) { state.path = path; }

  [[noreturn]] void fail(const std::string& action) const {
    if (!state.error.empty()) throw UserError(state.error);
    throw_user_error(state.path, ": cannot ", action, ": ", library_cause());
  }
  template <class Result>
  Result check(Result result, const std::string& action) const {
    if (result < 0 || !state.error.empty()) fail(action);
    return result;
  }
  Id checked(hid_t id, Id::Close close, const std::string& action) const {
    Id owned(id, close);
    check(id, action);
    return owned;
  }

  Id file_access() {
    Id access = checked(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "prepare opening");
    check(set_hdf5_driver(access, state), "prepare opening");
    check(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "prepare opening");
    return access;
  }

  bool exists(const std::string& name) const {  // each group on the way must be asked for by itself
    for (size_t end = name.find('/');; end = name.find('/', end + 1)) {
      const std::string prefix = name.substr(0, end);
      if (check(H5Lexists(file, prefix.c_str(), H5P_DEFAULT), "look for '" + prefix + "'") == 0) return false;
      if (end == std::string::npos) return true;
    }
  }

  void create_groups(const std::string& name) {
    for (size_t end = name.find('/'); end != std::string::npos; end = name.find('/', end + 1)) {
      const std::string group = name.substr(0, end);
      if (exists(group)) continue;
      const std::string action = "create the group '" + group + "'";
      const Id properties = checked(H5Pcreate(H5P_GROUP_CREATE), H5Pclose, action);
      check(H5Pset_obj_track_times(properties, false), action);
      checked(H5Gcreate2(file, group.c_str(), H5P_DEFAULT, properties, H5P_DEFAULT), H5Gclose, action);
    }
  }

  void create(const std::string& name, Hdf5Type type, const std::vector<hsize_t>& shape,
              const std::vector<hsize_t>& most, const std::vector<hsize_t>& chunk) {
    CHECK(writable, "'", state.path, "' is open for reading");
    const std::string action = "create the dataset '" + name + "'";
    const auto rank = static_cast<int>(shape.size());
    const Id space = checked(H5Screate_simple(rank, shape.data(), most.data()), H5Sclose, action);
    const Id properties = checked(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, action);
    check(H5Pset_chunk(properties, rank, chunk.data()), action);
    check(H5Pset_fletcher32(properties), action);
    check(H5Pset_obj_track_times(properties, false), action);
    create_groups(name);
    checked(H5Dcreate2(file, name.c_str(), file_type(type), space, H5P_DEFAULT, properties, H5P_DEFAULT), H5Dclose,
            action);
  }

  // Makes `name` the open dataset.
  void use(const std::string& name) {
    if (open_id >= 0 && open_name == name) return;
    close_dataset();
    const std::string action = "open the dataset '" + name + "'";
    if (!exists(name)) throw_user_error(state.path, ": has no dataset '", name, "'");
    const Id access = checked(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose, action);
    // Chunks go to the disk as they are written, so that a failure is that of the write and not of a later close.
    if (writable) check(H5Pset_chunk_cache(access, 1, 0, 1.0), action);
    open_id = checked(H5Dopen2(file, name.c_str(), access), H5Dclose, action);
    open_name = name;
    open_info = describe(name, action);
    open_chunk = chunk_in_file(open_info, action);
  }

  Hdf5Dataset describe(const std::string& name, const std::string& action) const {
    Hdf5Dataset info;
    const Id type = checked(H5Dget_type(open_id), H5Tclose, action);
    const auto* known = std::find_if(std::begin(kAllTypes), std::end(kAllTypes), [&](Hdf5Type candidate) {
      return check(H5Tequal(type, file_type(candidate)), action) > 0;
    });
    if (known == std::end(kAllTypes))
      throw_user_error(state.path, ": dataset '", name, "' has an element type that is not read here");
    info.type = *known;
    const Id space = checked(H5Dget_space(open_id), H5Sclose, action);
    const int rank = check(H5Sget_simple_extent_ndims(space), action);
    std::vector<hsize_t> shape(rank);
    check(H5Sget_simple_extent_dims(space, shape.data(), nullptr), action);
    for (const hsize_t extent : shape)
      if (extent > static_cast<hsize_t>(std::numeric_limits<int64_t>::max()))
        throw_user_error(state.path, ": dataset '", name, "' claims an extent of ", extent);
    info.shape.assign(shape.begin(), shape.end());
    info.stored_bytes = static_cast<int64_t>(H5Dget_storage_size(open_id));
    return info;
  }

  Extents chunk_in_file(const Hdf5Dataset& info, const std::string& action) const {
    const Id properties = checked(H5Dget_create_plist(open_id), H5Pclose, action);
    std::vector<hsize_t> chunk(info.shape.size(), 1);
    if (H5Pget_layout(properties) == H5D_CHUNKED)
      check(H5Pget_chunk(properties, static_cast<int>(chunk.size()), chunk.data()), action);
    return {chunk.begin(), chunk.end()};
  }

  void close_dataset() {
    open_name.clear();
    check(open_id.close(), "close a dataset");
  }

  enum class Direction : uint8_t { kRead, kWrite };

  // The part `piece` of the block `start`, `shape`, whose elements stand in `data`.
  void transfer(Direction direction, const std::string& name, void* data, const Extents& start, const Extents& shape,
                const Extents& piece_start, const Extents& piece_shape) {
    const LibraryLock lock;
    use(name);
    const std::string action =
        (direction == Direction::kRead ? "read the dataset '" : "write the dataset '") + name + "'";
    const Id file_space = checked(H5Dget_space(open_id), H5Sclose, action);
    Id memory_space;
    if (!shape.empty()) {
      const std::vector<hsize_t> at = to_hsize(piece_start), extent = to_hsize(piece_shape), whole = to_hsize(shape);
      std::vector<hsize_t> at_memory(at.size());
      for (size_t i = 0; i < at.size(); ++i) at_memory[i] = at[i] - start[i];
      memory_space = checked(H5Screate_simple(static_cast<int>(whole.size()), whole.data(), nullptr), H5Sclose, action);
      const auto select = [&](hid_t space, const std::vector<hsize_t>& from) {
        check(H5Sselect_hyperslab(space, H5S_SELECT_SET, from.data(), nullptr, extent.data(), nullptr), action);
      };
      select(file_space, at);
      select(memory_space, at_memory);
    } else {
      memory_space = checked(H5Scopy(file_space), H5Sclose, action);
    }
    const hid_t type = file_type(open_info.type);  // machines with another byte order are not supported
    if (direction == Direction::kRead)
      check(H5Dread(open_id, type, memory_space, file_space, H5P_DEFAULT, data), action);
    else
      check(H5Dwrite(open_id, type, memory_space, file_space, H5P_DEFAULT, data), action);
  }

  void transfer_block(Direction direction, const std::string& name, Hdf5Type type, void* data, size_t count,
                      const Extents& start, const Extents& shape) {
    Extents chunk;
    {
      const LibraryLock lock;
      use(name);
      if (open_info.type != type)
        throw_user_error(state.path, ": dataset '", name, "' is ", name_of(open_info.type), ", expected ",
                         name_of(type));
      bool inside = start.size() == open_info.shape.size() && shape.size() == open_info.shape.size();
      for (size_t i = 0; inside && i < shape.size(); ++i)
        inside = start[i] >= 0 && shape[i] >= 0 && start[i] <= open_info.shape[i] &&
                 shape[i] <= open_info.shape[i] - start[i];
      if (!inside)
        throw_user_error(state.path, ": dataset '", name, "' of shape ", join(open_info.shape), " has no block ",
                         join(shape), " at ", join(start));
      chunk = open_chunk;
    }
    CHECK(static_cast<int64_t>(count) == product(shape), "'", name, "': ", count, " elements for shape ", join(shape));
    CHECK(direction == Direction::kRead || writable, "'", state.path, "' is open for reading");
    if (count == 0) return;
    for_each_piece(start, shape, chunk, size_of(type), [&](const Extents& piece_start, const Extents& piece_shape) {
      transfer(direction, name, data, start, shape, piece_start, piece_shape);
    });
  }

  // ---- attributes -------------------------------------------------------------------------------------------------
  Id object(const std::string& name, const std::string& action) const {
    if (name != "/" && !exists(name)) throw_user_error(state.path, ": has no '", name, "'");
    return checked(H5Oopen(file, name.c_str(), H5P_DEFAULT), H5Oclose, action);
  }

  void set(const std::string& object_name, const std::string& name, hid_t stored_type, hid_t space, hid_t given_type,
           const void* value) const {
    CHECK(writable, "'", state.path, "' is open for reading");
    const std::string action = "write the attribute '" + name + "' of '" + object_name + "'";
    const Id owner = object(object_name, action);
    const Id attribute =
        checked(H5Acreate2(owner, name.c_str(), stored_type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, action);
    check(H5Awrite(attribute, given_type, value), action);
  }

  // Calls body(attribute, its type, number of values).
  template <class Body>
  auto get(const std::string& object_name, const std::string& name, Body&& body) const {
    const LibraryLock lock;
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

Hdf5File::Hdf5File(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Hdf5File::Hdf5File(Hdf5File&&) noexcept = default;

Hdf5File& Hdf5File::operator=(Hdf5File&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}

Hdf5File::~Hdf5File() {
  if (!impl_) return;
  const LibraryLock lock;
  impl_->state.abandoned = true;
  impl_.reset();  // closes the dataset and the file; the driver drops what they would still write
}

Hdf5File Hdf5File::create(const std::string& path) {
  const LibraryLock lock;
  auto impl = std::make_unique<Impl>(path);
  impl->writable = true;
  const Id access = impl->file_access();
  const Id properties = impl->checked(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "create the file");
  impl->check(H5Pset_obj_track_times(properties, false), "create the file");
  impl->file = impl->checked(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, properties, access), H5Fclose, "create the file");
  return Hdf5File(std::move(impl));
}

Hdf5File Hdf5File::open(const std::string& path) {
  const LibraryLock lock;
  auto impl = std::make_unique<Impl>(path);
  const Id access = impl->file_access();
  impl->file = impl->checked(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access), H5Fclose, "open as an HDF5 file");
  return Hdf5File(std::move(impl));
}

void Hdf5File::close() {
  const LibraryLock lock;
  if (impl_->file < 0) return;
  const herr_t dataset_closed = impl_->open_id.close();
  const herr_t file_closed = impl_->file.close();
  impl_->check(std::min(dataset_closed, file_closed), "close the file");
}

const std::string& Hdf5File::path() const {
  return impl_->state.path;
}

// ---- datasets -------------------------------------------------------------------------------------------------------

void Hdf5File::create_dataset(const std::string& name, Hdf5Type type, const std::vector<int64_t>& shape,
                              int64_t max_chunk_bytes) {
  CHECK(!shape.empty() && max_chunk_bytes <= kMaxPieceBytes, "dataset '", name, "'");
  const LibraryLock lock;
  // The library wants no extent below the chunk's, so an extent of 0 is declared as one that could grow.
  std::vector<hsize_t> most = to_hsize(shape);
  for (hsize_t& extent : most) extent = extent == 0 ? H5S_UNLIMITED : extent;
  impl_->create(name, type, to_hsize(shape), most, chunk_of(shape, size_of(type), max_chunk_bytes));
}

void Hdf5File::create_growing_dataset(const std::string& name, Hdf5Type type, int64_t chunk_elements) {
  CHECK(chunk_elements > 0 && chunk_elements * size_of(type) <= kMaxPieceBytes, "dataset '", name, "'");
  const LibraryLock lock;
  impl_->create(name, type, {0}, {H5S_UNLIMITED}, {static_cast<hsize_t>(chunk_elements)});
}

void Hdf5File::write_block(const std::string& name, Hdf5Type type, const void* data, size_t count,
                           const std::vector<int64_t>& start, const std::vector<int64_t>& shape) {
  // Only H5Dwrite sees the pointer, which takes it as const again.
  impl_->transfer_block(Impl::Direction::kWrite, name, type, const_cast<void*>(data), count, start, shape);
}

void Hdf5File::append_elements(const std::string& name, Hdf5Type type, const void* data, size_t count) {
  Extents start;
  {
    const LibraryLock lock;
    impl_->use(name);
    start = impl_->open_info.shape;
    CHECK(start.size() == 1, "'", name, "' does not grow");
    const hsize_t grown = start[0] + count;
    impl_->check(H5Dset_extent(impl_->open_id, &grown), "extend the dataset '" + name + "'");
    impl_->open_info.shape[0] = static_cast<int64_t>(grown);
  }
  write_block(name, type, data, count, start, {static_cast<int64_t>(count)});
}

void Hdf5File::read_block(const std::string& name, Hdf5Type type, void* out, size_t count,
                          const std::vector<int64_t>& start, const std::vector<int64_t>& shape) const {
  impl_->transfer_block(Impl::Direction::kRead, name, type, out, count, start, shape);
}

void Hdf5File::check_plausible(const std::string& name, const Hdf5Dataset& info) const {
  // No compression of the library reaches this ratio: a larger claim is damage, and must not become an allocation.
  constexpr int64_t kRatio = 2048, kSlack = 1 << 20;
  if (info.num_elements() / kRatio > info.stored_bytes + kSlack)
    throw_user_error(path(), ": dataset '", name, "' claims ", info.num_elements(), " elements but stores ",
                     info.stored_bytes, " bytes");
}

bool Hdf5File::has_dataset(const std::string& name) const {
  const LibraryLock lock;
  if (!impl_->exists(name)) return false;
  return H5Iget_type(impl_->object(name, "open '" + name + "'")) == H5I_DATASET;
}

Hdf5Dataset Hdf5File::dataset(const std::string& name) const {
  const LibraryLock lock;
  impl_->use(name);
  return impl_->open_info;
}

std::vector<std::string> Hdf5File::dataset_names() const {
  const LibraryLock lock;
  std::vector<std::string> names;
  const auto keep = [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
    try {
      static_cast<std::vector<std::string>*>(out)->emplace_back(name);
      return 0;
    } catch (const std::exception&) {
      return -1;
    }
  };
  impl_->check(H5Lvisit(impl_->file, H5_INDEX_NAME, H5_ITER_INC, keep, &names), "list the datasets");
  std::erase_if(names, [&](const std::string& name) {
    return H5Iget_type(impl_->object(name, "open '" + name + "'")) != H5I_DATASET;
  });
  std::sort(names.begin(), names.end());
  return names;
}

// ---- attributes -----------------------------------------------------------------------------------------------------

void Hdf5File::set_int(const std::string& object, const std::string& name, int64_t value) {
  const LibraryLock lock;
  const Id space = impl_->checked(H5Screate(H5S_SCALAR), H5Sclose, "write '" + name + "'");
  impl_->set(object, name, H5T_STD_I64LE, space, H5T_NATIVE_INT64, &value);
}

void Hdf5File::set_double(const std::string& object, const std::string& name, double value) {
  const LibraryLock lock;
  const Id space = impl_->checked(H5Screate(H5S_SCALAR), H5Sclose, "write '" + name + "'");
  impl_->set(object, name, H5T_IEEE_F64LE, space, H5T_NATIVE_DOUBLE, &value);
}

void Hdf5File::set_string(const std::string& object, const std::string& name, const std::string& value) {
  CHECK(value.find('\0') == std::string::npos, "attribute '", name, "' holds a NUL");
  const LibraryLock lock;
  const std::string action = "write '" + name + "'";
  const Id space = impl_->checked(H5Screate(H5S_SCALAR), H5Sclose, action);
  // Of fixed length: strings of variable length live where no checksum covers them.
  const Id type = impl_->checked(H5Tcopy(H5T_C_S1), H5Tclose, action);
  impl_->check(H5Tset_size(type, value.size() + 1), action);
  impl_->check(H5Tset_cset(type, H5T_CSET_UTF8), action);
  impl_->set(object, name, type, space, type, value.c_str());
}

void Hdf5File::set_ints(const std::string& object, const std::string& name, const std::vector<int64_t>& values) {
  const LibraryLock lock;
  const hsize_t count = values.size();
  const Id space = impl_->checked(H5Screate_simple(1, &count, nullptr), H5Sclose, "write '" + name + "'");
  impl_->set(object, name, H5T_STD_I64LE, space, H5T_NATIVE_INT64, values.data());
}

bool Hdf5File::has_attribute(const std::string& object, const std::string& name) const {
  const LibraryLock lock;
  const std::string action = "look for the attribute '" + name + "'";
  return impl_->check(H5Aexists(impl_->object(object, action), name.c_str()), action) > 0;
}

int64_t Hdf5File::get_int(const std::string& object, const std::string& name) const {
  return impl_->get(object, name, [&](hid_t attribute, hid_t type, hssize_t count, auto& action, auto& require) {
    const H5T_class_t kind = H5Tget_class(type);
    require(count == 1 && (kind == H5T_INTEGER || kind == H5T_ENUM), "a whole number");
    int64_t value = 0;
    impl_->check(H5Aread(attribute, H5T_NATIVE_INT64, &value), action);
    return value;
  });
}

double Hdf5File::get_double(const std::string& object, const std::string& name) const {
  return impl_->get(object, name, [&](hid_t attribute, hid_t type, hssize_t count, auto& action, auto& require) {
    const H5T_class_t kind = H5Tget_class(type);
    require(count == 1 && (kind == H5T_INTEGER || kind == H5T_FLOAT), "a number");
    double value = 0;
    impl_->check(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value), action);
    return value;
  });
}

std::string Hdf5File::get_string(const std::string& object, const std::string& name) const {
  return impl_->get(object, name, [&](hid_t attribute, hid_t type, hssize_t count, auto& action, auto& require) {
    constexpr size_t kLongest = 16 << 20;
    require(count == 1 && H5Tget_class(type) == H5T_STRING && H5Tget_size(type) <= kLongest, "a text");
    std::string value;
    if (impl_->check(H5Tis_variable_str(type), action) > 0) {
      char* text = nullptr;
      impl_->check(H5Aread(attribute, type, &text), action);
      if (text != nullptr) value = text;
      impl_->check(H5free_memory(text), action);
    } else {
      value.resize(H5Tget_size(type));
      impl_->check(H5Aread(attribute, type, value.data()), action);
      value.resize(std::min(value.find('\0'), value.size()));
    }
    return value;
  });
}

std::vector<int64_t> Hdf5File::get_ints(const std::string& object, const std::string& name) const {
  return impl_->get(object, name, [&](hid_t attribute, hid_t type, hssize_t count, auto& action, auto& require) {
    constexpr hssize_t kMost = 1 << 16;
    require(count <= kMost && H5Tget_class(type) == H5T_INTEGER, "a list of whole numbers");
    std::vector<int64_t> values(count);
    if (count > 0) impl_->check(H5Aread(attribute, H5T_NATIVE_INT64, values.data()), action);
    return values;
  });
}

}  // namespace palimpsest
