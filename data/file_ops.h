// The file system, checked: every call that fails throws a UserError "cannot DO PATH: cause" and nothing is ignored.
//
// Every operation that changes the file system passes one counted hook first, those of HDF5 files included. Environment
// variables, read at the first operation, let a test stop the process at any of them:
//   PALIMPSEST_KILL_AT_FILE_OPERATION=n   the process kills itself (SIGKILL) in place of operation n (the first is 1)
//   PALIMPSEST_FAIL_AT_FILE_OPERATION=n   operation n alone fails with "No space left on device"
//   PALIMPSEST_FILE_OPERATION_DELAY_MS=n  every operation first waits n milliseconds, as on a slow disk
//   PALIMPSEST_PRINT_FILE_OPERATIONS=1    every operation is a line on standard error: "file operation 7: rename PATH"
// Unset, the hook costs one atomic addition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace palimpsest {

// Throws "cannot <action> <path>: <text of error_number>", for example action "write", error_number ENOSPC.
[[noreturn]] void throw_file_error(std::string_view action, std::string_view path, int error_number);

// The hook. Called by whoever is about to change the file system by other means than the functions below.
void count_file_operation(std::string_view action, std::string_view path);
int64_t num_file_operations();  // counted since the process started

// What the environment variables do, for a test within one process: the operation `operations_from_now` (1 = the next)
// is struck. kNone takes the fault away.
enum class FileFault : uint8_t { kNone, kKill, kFail };
void inject_file_fault(FileFault fault, int64_t operations_from_now = 1);
void inject_file_delay(int64_t milliseconds);  // 0 takes it away

// ---- questions ----------------------------------------------------------------------------------------------------
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
bool is_regular_file(const std::string& path);                     // or a link to one
int64_t file_size(const std::string& path);                        // bytes
std::vector<std::string> list_directory(const std::string& path);  // names, in byte order, without "." and ".."
int64_t free_bytes(const std::string& path);                       // of its file system; the path need not exist yet
std::string read_whole_file(const std::string& path, int64_t max_bytes = int64_t{1} << 30);

// Throws unless a file can be written in this folder (made when missing) and its file system has room for
// `required_bytes`; the message holds required and free bytes.
void check_writable(const std::string& directory, int64_t required_bytes);

// ---- changes ------------------------------------------------------------------------------------------------------
void create_directories(const std::string& path);  // with missing parents; an existing folder is no error
void sync_file(const std::string& path);           // contents reach the disk
void sync_directory(const std::string& path);      // names in it reach the disk
void rename_path(const std::string& from, const std::string& to);
void remove_file(const std::string& path);
void remove_tree(const std::string& path);  // a file, or a folder with all in it

// For cleaning up on the way out of a failure: a file or a tree, missing or not. Never throws; false when something
// could not be removed.
bool try_remove(const std::string& path) noexcept;

// The file holds either its old content or all of the new one, whenever the process or the machine stops.
void write_file_atomically(const std::string& path, std::string_view content);

// ---- handles ------------------------------------------------------------------------------------------------------
// An open file descriptor, or none.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor();

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int release();
  void close(const std::string& path);  // throws when the system reports a late write error

 private:
  int fd_ = -1;
};

// Opens for reading. Throws when the path is missing, or a folder.
FileDescriptor open_for_reading(const std::string& path);

// A file written from front to back.
class OutputFile {
 public:
  enum class Mode : uint8_t { kReplace, kAppend };
  OutputFile(std::string path, Mode mode);

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  void sync();
  void close();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileDescriptor fd_;
};

// The bytes of a file, mapped read-only. The file must keep its length while mapped.
class MappedFile {
 public:
  explicit MappedFile(std::string path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(address_), size_}; }
  const std::string& path() const { return path_; }
  // Takes what was read of a part of bytes() out of this process's memory; reading it again takes it from the disk.
  void release(std::span<const std::byte> part) const;

 private:
  std::string path_;
  void* address_ = nullptr;  // null for an empty file
  size_t size_ = 0;
};

}  // namespace palimpsest
