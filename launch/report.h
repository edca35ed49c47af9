// Figures for other programs: what --json writes.
#pragma once

#include <string>
#include <string_view>

namespace palimpsest {

// Whether `path`, as --json gives it, stands for standard output.
bool is_standard_output(std::string_view path);

// Writes the JSON and a line end to the file, or to standard output. An empty path: nothing was asked for.
void write_report(const std::string& path, const std::string& json);

}  // namespace palimpsest
