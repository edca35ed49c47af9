// Figures for other programs: what --json writes.
#pragma once

#include <string>
#include <string_view>

namespace palimpsest {

// Whether `path`, as --json gives it, stands for standard output.
bool is_standard_output(std::string_view path);

// For commands that work for long before they write: throws where write_report would for want of a folder or of rights.
void check_report(const std::string& path);

// Writes the JSON and a line end to the file, or to standard output. An empty path: nothing was asked for.
void write_report(const std::string& path, const std::string& json);

}  // namespace palimpsest
