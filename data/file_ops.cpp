#include "data/file_ops.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "kernels/check.h"

namespace palimpsest {

namespace {

int64_t number_in_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return 0;
  int64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stop != end || value < 1)
    throw_user_error(name, "=", text, ": expected a whole number, 1 or more");
  return value;
}

// The counter must be one for the whole process: an operation number names a moment of the run, whichever thread
// reaches it.
struct OperationCounter {
  std::atomic<int64_t> count = 0;
  std::atomic<int64_t> kill_at = number_in_environment("PALIMPSEST_KILL_AT_FILE_OPERATION");
  std::atomic<int64_t> fail_at = number_in_environment("PALIMPSEST_FAIL_AT_FILE_OPERATION");
  std::atomic<int64_t> delay_ms = number_in_environment("PALIMPSEST_FILE_OPERATION_DELAY_MS");
  const bool prints = number_in_environment("PALIMPSEST_PRINT_FILE_OPERATIONS") != 0;
};

OperationCounter& operation_counter() {
  static OperationCounter counter;
  return counter;
}

std::string parent_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).lexically_normal().parent_path();
  return parent.empty() ? "." : parent.string();
}

bool status_of(const std::string& path, struct stat& status) {
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  throw_file_error("look at", path, errno);
}

void sync_descriptor(const FileDescriptor& fd, const std::string& path) {
  count_file_operation("flush", path);
  if (::fsync(fd.get()) != 0) throw_file_error("flush", path, errno);
}

FileDescriptor open_to_write(const std::string& path, OutputFile::Mode mode) {
  count_file_operation("create", path);
  const int how = mode == OutputFile::Mode::kAppend ? O_APPEND : O_TRUNC;
  FileDescriptor fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | how, 0666));
  if (!fd.is_open()) throw_file_error("create", path, errno);
  return fd;
}

}  // namespace

void throw_file_error(std::string_view action, std::string_view path, int error_number) {
  const char* cause = strerrordesc_np(error_number);  // the one form that neither races nor translates
  throw_user_error("cannot ", action, " ", path, ": ", cause != nullptr ? cause : "unknown error");
}

void count_file_operation(std::string_view action, std::string_view path) {
  OperationCounter& counter = operation_counter();
  if (const int64_t delay = counter.delay_ms; delay > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  const int64_t number = ++counter.count;
  if (counter.prints)
    std::fprintf(stderr, "file operation %lld: %.*s %.*s\n", static_cast<long long>(number),
                 static_cast<int>(action.size()), action.data(), static_cast<int>(path.size()), path.data());
  if (number == counter.kill_at) {
    std::raise(SIGKILL);
  }
  if (number == counter.fail_at) throw_file_error(action, path, ENOSPC);
}

int64_t num_file_operations() {
  return operation_counter().count;
}

void inject_file_fault(FileFault fault, int64_t operations_from_now) {
  OperationCounter& counter = operation_counter();
  const int64_t number = counter.count + operations_from_now;
  counter.kill_at = fault == FileFault::kKill ? number : 0;
  counter.fail_at = fault == FileFault::kFail ? number : 0;
}

void inject_file_delay(int64_t milliseconds) {
  operation_counter().delay_ms = milliseconds;
}

bool path_exists(const std::string& path) {
  struct stat status = {};
  return status_of(path, status);
}

bool is_directory(const std::string& path) {
  struct stat status = {};
  return status_of(path, status) && S_ISDIR(status.st_mode);
}

bool is_regular_file(const std::string& path) {
  struct stat status = {};
  return status_of(path, status) && S_ISREG(status.st_mode);
}

int64_t file_size(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) throw_file_error("look at", path, errno);
  return status.st_size;
}

std::vector<std::string> list_directory(const std::string& path) {
  std::error_code error;
  std::filesystem::directory_iterator entry(path, error);
  std::vector<std::string> names;
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error) throw_file_error("list", path, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

int64_t free_bytes(const std::string& path) {
  std::string existing = path.empty() ? "." : path;
  while (!path_exists(existing) && existing != "." && existing != "/") existing = parent_of(existing);
  struct statvfs status = {};
  if (::statvfs(existing.c_str(), &status) != 0) throw_file_error("ask for the free space of", existing, errno);
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

std::string read_whole_file(const std::string& path, int64_t max_bytes) {
  const FileDescriptor fd = open_for_reading(path);
  std::string content;
  std::string buffer(size_t{64} << 10, '\0');
  while (true) {
    const ssize_t count = ::read(fd.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_file_error("read", path, errno);
    if (count == 0) return content;
    content.append(buffer, 0, count);
    if (static_cast<int64_t>(content.size()) > max_bytes)
      throw_user_error(path, ": larger than the ", max_bytes, " bytes that such a file may have");
  }
}

void check_writable(const std::string& directory, int64_t required_bytes) {
  create_directories(directory);
  const std::string probe = directory + "/.writable-" + std::to_string(::getpid());
  OutputFile(probe, OutputFile::Mode::kReplace).close();
  remove_file(probe);
  const int64_t available = free_bytes(directory);
  if (available < required_bytes)
    throw_user_error(directory, ": ", required_bytes, " bytes are needed but ", available, " bytes are free");
}

void create_directories(const std::string& path) {
  if (path.empty() || is_directory(path)) return;
  const std::string parent = parent_of(path);
  if (parent != path) create_directories(parent);
  count_file_operation("create the folder", path);
  if (::mkdir(path.c_str(), 0777) == 0) return;
  const int error = errno;
  if (error == EEXIST && is_directory(path)) return;  // another process was faster
  throw_file_error("create the folder", path, error == EEXIST ? ENOTDIR : error);
}

void sync_file(const std::string& path) {
  sync_descriptor(open_for_reading(path), path);
}

void sync_directory(const std::string& path) {
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.is_open()) throw_file_error("open the folder", path, errno);
  sync_descriptor(fd, path);
}

void rename_path(const std::string& from, const std::string& to) {
  count_file_operation("rename", from);
  if (::rename(from.c_str(), to.c_str()) != 0) throw_file_error("rename to " + to + " the path", from, errno);
}

void remove_file(const std::string& path) {
  count_file_operation("remove", path);
  if (::unlink(path.c_str()) != 0) throw_file_error("remove", path, errno);
}

void remove_tree(const std::string& path) {
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0) throw_file_error("remove", path, errno);
  if (!S_ISDIR(status.st_mode)) return remove_file(path);  // a link is removed, what it points at stays
  for (const std::string& name : list_directory(path)) remove_tree(std::string(path).append("/").append(name));
  count_file_operation("remove the folder", path);
  if (::rmdir(path.c_str()) != 0) throw_file_error("remove the folder", path, errno);
}

bool try_remove(const std::string& path) noexcept {
  try {
    struct stat status = {};
    if (::lstat(path.c_str(), &status) == 0) remove_tree(path);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void write_file_atomically(const std::string& path, std::string_view content) {
  const std::string temporary = path + ".tmp";
  try {
    OutputFile file(temporary, OutputFile::Mode::kReplace);
    file.write(content);
    file.sync();
    file.close();
    rename_path(temporary, path);
  } catch (...) {
    try_remove(temporary);
    throw;
  }
  sync_directory(parent_of(path));
}

// ---- handles --------------------------------------------------------------------------------------------------------

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (is_open()) ::close(fd_);
}

int FileDescriptor::release() {
  return std::exchange(fd_, -1);
}

void FileDescriptor::close(const std::string& path) {
  if (::close(release()) != 0) throw_file_error("close", path, errno);
}

FileDescriptor open_for_reading(const std::string& path) {
  FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_open()) throw_file_error("open", path, errno);
  if (is_directory(path)) throw_file_error("read", path, EISDIR);
  return fd;
}

OutputFile::OutputFile(std::string path, Mode mode) : path_(std::move(path)), fd_(open_to_write(path_, mode)) {}

void OutputFile::write(std::span<const std::byte> bytes) {
  count_file_operation("write", path_);
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_file_error("write", path_, errno);
    bytes = bytes.subspan(count);
  }
}

void OutputFile::write(std::string_view text) {
  write(std::as_bytes(std::span(text)));
}

void OutputFile::sync() {
  sync_descriptor(fd_, path_);
}

void OutputFile::close() {
  fd_.close(path_);
}

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const FileDescriptor fd = open_for_reading(path_);
  struct stat status = {};
  if (::fstat(fd.get(), &status) != 0) throw_file_error("look at", path_, errno);
  size_ = status.st_size;
  if (size_ == 0) return;
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (address == MAP_FAILED) throw_file_error("map", path_, errno);
  address_ = address;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      address_(std::exchange(other.address_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(address_, other.address_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (address_ != nullptr) ::munmap(address_, size_);
}

void MappedFile::release(std::span<const std::byte> part) const {
  if (part.empty()) return;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto begin = static_cast<size_t>(part.data() - static_cast<const std::byte*>(address_));
  CHECK(begin <= size_ && part.size() <= size_ - begin, path_, ": not a part of the file");
  const size_t first = begin / page * page;
  // Only advice: without it the system takes the pages back when it needs them.
  (void)madvise(static_cast<std::byte*>(address_) + first, begin + part.size() - first, MADV_DONTNEED);
}

}  // namespace palimpsest
