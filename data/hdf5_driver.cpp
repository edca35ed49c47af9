#include "data/hdf5_driver.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "data/file_ops.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

// What travels in the property list.
struct DriverInfo {
  Hdf5FileState* state;
};

// The library knows an open file by the address of its first member.
struct OpenFile {
  H5FD_t common = {};
  Hdf5FileState* state = nullptr;
  FileDescriptor fd;
  haddr_t end_of_allocation = 0;  // bytes the library has given out
  haddr_t end_of_file = 0;        // bytes on the disk
};

// No exception may cross the library: it is kept as the state's error. False after a failure.
template <class Body>
bool guarded(Hdf5FileState& state, Body&& body) {
  try {
    body();
    return true;
  } catch (const std::exception& failure) {
    if (state.error.empty()) state.error = failure.what();
    return false;
  }
}

OpenFile* cast(H5FD_t* file) {
  return reinterpret_cast<OpenFile*>(file);
}
const OpenFile* cast(const H5FD_t* file) {
  return reinterpret_cast<const OpenFile*>(file);
}

bool drops_changes(const Hdf5FileState& state) {
  return state.abandoned || !state.error.empty();
}

FileDescriptor open_descriptor(const std::string& path, unsigned flags) {
  if ((flags & H5F_ACC_RDWR) == 0) return open_for_reading(path);
  int how = O_RDWR | O_CLOEXEC;
  if ((flags & H5F_ACC_CREAT) != 0) how |= O_CREAT;
  if ((flags & H5F_ACC_TRUNC) != 0) how |= O_TRUNC;
  if ((flags & H5F_ACC_EXCL) != 0) how |= O_EXCL;
  count_file_operation("create", path);
  FileDescriptor fd(::open(path.c_str(), how, 0666));
  if (!fd.is_open()) throw_file_error("create", path, errno);
  return fd;
}

H5FD_t* open_file(const char*, unsigned flags, hid_t file_access, haddr_t max_address) {
  const auto* info = static_cast<const DriverInfo*>(H5Pget_driver_info(file_access));
  if (info == nullptr || max_address == 0) return nullptr;
  Hdf5FileState& state = *info->state;
  std::unique_ptr<OpenFile> file;
  const bool opened = guarded(state, [&] {
    file = std::make_unique<OpenFile>();
    file->state = &state;
    file->fd = open_descriptor(state.path, flags);
    struct stat status = {};
    if (::fstat(file->fd.get(), &status) != 0) throw_file_error("look at", state.path, errno);
    file->end_of_file = status.st_size;
  });
  return opened ? &file.release()->common : nullptr;
}

herr_t close_file(H5FD_t* file) {
  const std::unique_ptr<OpenFile> owned(cast(file));
  Hdf5FileState& state = *owned->state;
  guarded(state, [&] { owned->fd.close(state.path); });
  return 0;  // an error is in the state
}

herr_t query(const H5FD_t*, unsigned long* flags) {
  if (flags != nullptr)
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA;
  return 0;
}

haddr_t get_end_of_allocation(const H5FD_t* file, H5FD_mem_t) {
  return cast(file)->end_of_allocation;
}

herr_t set_end_of_allocation(H5FD_t* file, H5FD_mem_t, haddr_t address) {
  cast(file)->end_of_allocation = address;
  return 0;
}

haddr_t get_end_of_file(const H5FD_t* file, H5FD_mem_t) {
  return cast(file)->end_of_file;
}

herr_t read_bytes(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address, size_t size, void* buffer) {
  const OpenFile& open = *cast(file);
  const bool done = guarded(*open.state, [&] {
    auto* to = static_cast<char*>(buffer);
    while (size > 0) {
      const ssize_t count = ::pread(open.fd.get(), to, size, static_cast<off_t>(address));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw_file_error("read", open.state->path, errno);
      if (count == 0) {  // past the end of the file the library expects zeros
        std::memset(to, 0, size);
        return;
      }
      to += count;
      address += count;
      size -= count;
    }
  });
  return done ? 0 : -1;
}

herr_t write_bytes(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address, size_t size, const void* buffer) {
  OpenFile& open = *cast(file);
  if (drops_changes(*open.state)) return 0;
  guarded(*open.state, [&] {
    count_file_operation("write", open.state->path);
    const auto* from = static_cast<const char*>(buffer);
    while (size > 0) {
      const ssize_t count = ::pwrite(open.fd.get(), from, size, static_cast<off_t>(address));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw_file_error("write", open.state->path, errno);
      from += count;
      address += count;
      size -= count;
    }
    if (address > open.end_of_file) open.end_of_file = address;
  });
  return 0;  // an error is in the state
}

herr_t set_length(H5FD_t* file, hid_t, hbool_t) {
  OpenFile& open = *cast(file);
  if (open.end_of_file == open.end_of_allocation) return 0;
  if (!drops_changes(*open.state))
    guarded(*open.state, [&] {
      count_file_operation("write", open.state->path);
      if (::ftruncate(open.fd.get(), static_cast<off_t>(open.end_of_allocation)) != 0)
        throw_file_error("write", open.state->path, errno);
    });
  open.end_of_file = open.end_of_allocation;
  return 0;
}

// Members not named stay null: the library then does the ordinary thing (no locks among them).
H5FD_class_t driver_class() {
  constexpr H5FD_mem_t kFreeLists[] = H5FD_FLMAP_DICHOTOMY;
  H5FD_class_t driver = {};
  driver.name = "palimpsest";
  driver.maxaddr = (haddr_t{1} << 62) - 1;
  driver.fc_degree = H5F_CLOSE_STRONG;
  driver.fapl_size = sizeof(DriverInfo);
  driver.open = open_file;
  driver.close = close_file;
  driver.query = query;
  driver.get_eoa = get_end_of_allocation;
  driver.set_eoa = set_end_of_allocation;
  driver.get_eof = get_end_of_file;
  driver.read = read_bytes;
  driver.write = write_bytes;
  driver.truncate = set_length;
  std::memcpy(driver.fl_map, kFreeLists, sizeof(kFreeLists));
  return driver;
}

}  // namespace

herr_t set_hdf5_driver(hid_t file_access, Hdf5FileState& state) {
  static const H5FD_class_t kDriver = driver_class();
  static const hid_t kDriverId = H5FDregister(&kDriver);  // for the life of the process, as the library wants it
  const DriverInfo info = {&state};
  return H5Pset_driver(file_access, kDriverId, &info);
}

}  // namespace palimpsest
