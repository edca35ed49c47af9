// Temporary folders, damaged files and messages of user errors, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "kernels/check.h"

namespace palimpsest::support {

// A fresh folder that is removed with everything in it.
class TempDirectory {
 public:
  TempDirectory();
  ~TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// A file system of a few kilobytes in memory, mounted on a fresh folder. Only root may mount: skip the test with
// GTEST_SKIP when mounted() is false.
class SmallFileSystem {
 public:
  explicit SmallFileSystem(int64_t bytes, bool read_only = false);
  ~SmallFileSystem();
  SmallFileSystem(const SmallFileSystem&) = delete;
  SmallFileSystem& operator=(const SmallFileSystem&) = delete;

  bool mounted() const { return mounted_; }
  const std::string& path() const { return directory_.path(); }
  std::string operator/(const std::string& name) const { return directory_ / name; }

 private:
  TempDirectory directory_;
  bool mounted_ = false;
};

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& content);
void write_script(const std::string& path, const std::string& content);  // one that can be started
void flip_bit(const std::string& path, size_t byte, int bit);            // twice: as before

// The message of the UserError that body() throws; fails the test when it throws none, another type, or more than one
// line.
std::string user_error_of(const std::function<void()>& body);

// Runs body in a child process and returns its wait status.
int run_in_child(const std::function<void()>& body);

}  // namespace palimpsest::support
