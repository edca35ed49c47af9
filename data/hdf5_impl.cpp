#include "data/hdf5_impl.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace palimpsest {

namespace hdf5 {

std::vector<hsize_t> to_hsize(const Extents& extents) {
  return {extents.begin(), extents.end()};
}

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

}  // namespace hdf5

namespace {

using hdf5::Extents;
using hdf5::Id;

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

int64_t product(const Extents& extents) {  // stops at the largest number: a file may claim anything
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int64_t count = 1;
  for (const int64_t extent : extents) {
    if (extent == 0) return 0;
    count = count > kMost / extent ? kMost : count * extent;
  }
  return count;
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

void Hdf5File::Impl::fail(const std::string& action) const {
  if (!state.error.empty()) throw UserError(state.error);
  throw_user_error(state.path, ": cannot ", action, ": ", hdf5::library_cause());
}

Id Hdf5File::Impl::checked(hid_t id, Id::Close close, const std::string& action) const {
  Id owned(id, close);
  check(id, action);
  return owned;
}

Id Hdf5File::Impl::file_access() {
  Id access = checked(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "prepare opening");
  check(set_hdf5_driver(access, state), "prepare opening");
  check(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "prepare opening");
  return access;
}

bool Hdf5File::Impl::exists(const std::string& name) const {  // each group on the way must be asked for by itself
  for (size_t end = name.find('/');; end = name.find('/', end + 1)) {
    const std::string prefix = name.substr(0, end);
    if (check(H5Lexists(file, prefix.c_str(), H5P_DEFAULT), "look for '" + prefix + "'") == 0) return false;
    if (end == std::string::npos) return true;
  }
}

void Hdf5File::Impl::create_groups(const std::string& name) {
  for (size_t end = name.find('/'); end != std::string::npos; end = name.find('/', end + 1)) {
    const std::string group = name.substr(0, end);
    if (exists(group)) continue;
    const std::string action = "create the group '" + group + "'";
    const Id properties = checked(H5Pcreate(H5P_GROUP_CREATE), H5Pclose, action);
    check(H5Pset_obj_track_times(properties, false), action);
    checked(H5Gcreate2(file, group.c_str(), H5P_DEFAULT, properties, H5P_DEFAULT), H5Gclose, action);
  }
}

void Hdf5File::Impl::create(const std::string& name, Hdf5Type type, const std::vector<hsize_t>& shape,
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

void Hdf5File::Impl::use(const std::string& name) {
  if (open_id >= 0 && open_name == name) return;
  close_dataset();
  const std::string action = "open the dataset '" + name + "'";
  if (!exists(name)) throw_user_error(state.path, ": has no dataset '", name, "'");
  const Id access = checked(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose, action);
  // Chunks go to the disk as they are written, so that a failure is that of the write and not of a later close.
  if (writable) check(H5Pset_chunk_cache(access, 1, 0, 1.0), action);
  open_id = checked(H5Dopen2(file, name.c_str(), access), H5Dclose, action);
  open_info = describe(name, action);
  open_chunk = chunk_in_file(open_info, action);
  open_name = name;  // last: what could not be described must not be taken for open
}

Hdf5Dataset Hdf5File::Impl::describe(const std::string& name, const std::string& action) const {
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

Extents Hdf5File::Impl::chunk_in_file(const Hdf5Dataset& info, const std::string& action) const {
  const Id properties = checked(H5Dget_create_plist(open_id), H5Pclose, action);
  std::vector<hsize_t> chunk(info.shape.size(), 1);
  if (H5Pget_layout(properties) == H5D_CHUNKED)
    check(H5Pget_chunk(properties, static_cast<int>(chunk.size()), chunk.data()), action);
  return {chunk.begin(), chunk.end()};
}

void Hdf5File::Impl::close_dataset() {
  open_name.clear();
  check(open_id.close(), "close a dataset");
}

void Hdf5File::Impl::transfer(Direction direction, const std::string& name, void* data, const Extents& start,
                              const Extents& shape, const Extents& piece_start, const Extents& piece_shape) {
  const hdf5::LibraryLock lock;
  use(name);
  const std::string action =
      (direction == Direction::kRead ? "read the dataset '" : "write the dataset '") + name + "'";
  const Id file_space = checked(H5Dget_space(open_id), H5Sclose, action);
  Id memory_space;
  if (!shape.empty()) {
    const std::vector<hsize_t> at = hdf5::to_hsize(piece_start), extent = hdf5::to_hsize(piece_shape),
                               whole = hdf5::to_hsize(shape);
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

void Hdf5File::Impl::transfer_block(Direction direction, const std::string& name, Hdf5Type type, void* data,
                                    size_t count, const Extents& start, const Extents& shape) {
  Extents chunk;
  {
    const hdf5::LibraryLock lock;
    use(name);
    if (open_info.type != type)
      throw_user_error(state.path, ": dataset '", name, "' is ", name_of(open_info.type), ", expected ", name_of(type));
    bool inside = start.size() == open_info.shape.size() && shape.size() == open_info.shape.size();
    for (size_t i = 0; inside && i < shape.size(); ++i)
      inside =
          start[i] >= 0 && shape[i] >= 0 && start[i] <= open_info.shape[i] && shape[i] <= open_info.shape[i] - start[i];
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

Id Hdf5File::Impl::object(const std::string& name, const std::string& action) const {
  if (name != "/" && !exists(name)) throw_user_error(state.path, ": has no '", name, "'");
  return checked(H5Oopen(file, name.c_str(), H5P_DEFAULT), H5Oclose, action);
}

void Hdf5File::Impl::set(const std::string& object_name, const std::string& name, hid_t stored_type, hid_t space,
                         hid_t given_type, const void* value) const {
  CHECK(writable, "'", state.path, "' is open for reading");
  const std::string action = "write the attribute '" + name + "' of '" + object_name + "'";
  const Id owner = object(object_name, action);
  const Id attribute =
      checked(H5Acreate2(owner, name.c_str(), stored_type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, action);
  check(H5Awrite(attribute, given_type, value), action);
}

}  // namespace palimpsest
