#include "launch/report.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "data/file_ops.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

// A file is replaced as a whole. A device or a pipe (and /dev/fd/N, whatever it is) is written to as it stands: another
// file in its place would not reach who reads it.
bool is_replaced(const std::string& path) {
  return !path.starts_with("/dev/") && (!path_exists(path) || is_regular_file(path));
}

// What a link points at.
std::string file_behind(const std::string& path) {
  return path_exists(path) ? std::filesystem::canonical(path).string() : path;
}

}  // namespace

bool is_standard_output(std::string_view path) {
  return path == "-" || path == "/dev/stdout";
}

void check_report(const std::string& path) {
  if (path.empty() || is_standard_output(path)) return;
  if (is_directory(path)) throw_file_error("write", path, EISDIR);
  if (!is_replaced(path)) return;
  const std::string probe = file_behind(path) + ".tmp";
  OutputFile(probe, OutputFile::Mode::kReplace).close();
  remove_file(probe);
}

void write_report(const std::string& path, const std::string& json) {
  if (path.empty()) return;
  if (!is_standard_output(path)) {
    if (is_replaced(path)) return write_file_atomically(file_behind(path), json + "\n");
    OutputFile file(path, OutputFile::Mode::kAppend);
    file.write(json + "\n");
    return file.close();
  }
  if (std::fprintf(stdout, "%s\n", json.c_str()) < 0 || std::fflush(stdout) != 0)
    throw_user_error("standard output cannot be written");
}

}  // namespace palimpsest
