#include "data/hdf5_file.h"

#include <algorithm>
#include <utility>

#include "data/hdf5_impl.h"
#include "kernels/check.h"

namespace palimpsest {

using hdf5::Extents;
using hdf5::Id;
using hdf5::LibraryLock;

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
  std::vector<hsize_t> most = hdf5::to_hsize(shape);
  for (hsize_t& extent : most) extent = extent == 0 ? H5S_UNLIMITED : extent;
  impl_->create(name, type, hdf5::to_hsize(shape), most, hdf5::chunk_of(shape, size_of(type), max_chunk_bytes));
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
