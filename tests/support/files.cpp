#include "tests/support/files.h"

#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

// Asked by the leak sanitizer. The HDF5 library loses a few hundred bytes each time it meets damaged metadata.
extern "C" const char* __lsan_default_suppressions();  // NOLINT(bugprone-reserved-identifier): the sanitizer's name
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libhdf5";
}  // NOLINT(bugprone-reserved-identifier)

namespace palimpsest::support {

TempDirectory::TempDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "palimpsest-test-XXXXXX").string();
  CHECK(::mkdtemp(pattern.data()) != nullptr, pattern);
  path_ = pattern;
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

SmallFileSystem::SmallFileSystem(int64_t bytes, bool read_only) {
  const std::string options = "size=" + std::to_string(bytes);
  mounted_ = ::mount("tmpfs", path().c_str(), "tmpfs", read_only ? MS_RDONLY : 0, options.c_str()) == 0;
}

SmallFileSystem::~SmallFileSystem() {
  if (mounted_) ::umount2(path().c_str(), MNT_DETACH);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good(), path);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

void write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << content;
  file.close();
  CHECK(file.good(), path);
}

void write_script(const std::string& path, const std::string& content) {
  write_file(path, content);
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

void flip_bit(const std::string& path, size_t byte, int bit) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(byte));
  const int value = file.get();
  file.seekp(static_cast<std::streamoff>(byte));
  file.put(static_cast<char>(value ^ (1 << bit)));
  file.close();
  CHECK(file.good(), path);
}

std::string user_error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const UserError& error) {
    std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected a UserError, got: " << error.what();
    return "";
  }
  ADD_FAILURE() << "expected a UserError, got none";
  return "";
}

int run_in_child(const std::function<void()>& body) {
  std::fflush(nullptr);  // or the child would print it again
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    try {
      body();
    } catch (const std::exception&) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  return status;
}

}  // namespace palimpsest::support
