// Reads small HDF5 files whole: numbers as double, whatever their type in the file. Anything unexpected throws an
// Error that names the file and the object.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace palimpsest::support {

struct H5Array {
  std::vector<int64_t> shape;
  std::vector<double> values;  // row-major
};

class H5File {
 public:
  explicit H5File(const std::string& path);
  ~H5File();
  H5File(const H5File&) = delete;
  H5File& operator=(const H5File&) = delete;

  std::vector<std::string> names_in(const std::string& group) const;  // links of a group, none when it is absent
  H5Array dataset(const std::string& name) const;
  // Attributes of the root; absent ones give nothing. A number may be stored as integer, float, boolean or text.
  std::optional<double> number(const std::string& attribute) const;
  std::optional<std::string> text(const std::string& attribute) const;

 private:
  std::string path_;
  int64_t file_;
};

}  // namespace palimpsest::support
