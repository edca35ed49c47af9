#include "launch/report.h"

#include <cstdio>

#include "data/file_ops.h"
#include "kernels/check.h"

namespace palimpsest {

bool is_standard_output(std::string_view path) {
  return path == "-";
}

void write_report(const std::string& path, const std::string& json) {
  if (path.empty()) return;
  if (!is_standard_output(path)) return write_file_atomically(path, json + "\n");
  if (std::fprintf(stdout, "%s\n", json.c_str()) < 0 || std::fflush(stdout) != 0)
    throw_user_error("standard output cannot be written");
}

}  // namespace palimpsest
