#include "tests/support/h5_file.h"

#include <hdf5.h>

#include <charconv>

#include "kernels/check.h"

namespace palimpsest::support {

namespace {

// An HDF5 identifier and the function that closes it.
class Handle {
 public:
  Handle(int64_t id, herr_t (*close)(hid_t), const std::string& what) : id_(id), close_(close) {
    CHECK(id >= 0, "HDF5 cannot open ", what);
  }
  ~Handle() { close_(id_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  hid_t id() const { return id_; }

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

std::optional<double> parse_number(const std::string& text) {
  if (text == "true" || text == "True") return 1.0;
  if (text == "false" || text == "False") return 0.0;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string format_number(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  CHECK(error == std::errc(), "number too long");
  return {buffer, end};
}

struct AttributeValue {
  std::optional<std::string> text;
  std::optional<double> number;
};

AttributeValue read_attribute(hid_t file, const std::string& name, const std::string& what) {
  const Handle attribute(H5Aopen(file, name.c_str(), H5P_DEFAULT), H5Aclose, what);
  const Handle type(H5Aget_type(attribute.id()), H5Tclose, what);
  const Handle space(H5Aget_space(attribute.id()), H5Sclose, what);
  CHECK(H5Sget_simple_extent_npoints(space.id()) == 1, what, " is not a single value");
  if (H5Tget_class(type.id()) != H5T_STRING) {
    double value = 0;
    CHECK(H5Aread(attribute.id(), H5T_NATIVE_DOUBLE, &value) >= 0, what, " cannot be read as a number");
    return {.text = std::nullopt, .number = value};
  }
  if (H5Tis_variable_str(type.id()) > 0) {
    char* value = nullptr;
    const Handle memory_type(H5Tcopy(type.id()), H5Tclose, what);
    CHECK(H5Aread(attribute.id(), memory_type.id(), &value) >= 0 && value != nullptr, what, " cannot be read as text");
    AttributeValue result = {.text = std::string(value), .number = std::nullopt};
    CHECK(H5free_memory(value) >= 0, what, " cannot be freed");
    return result;
  }
  std::string value(H5Tget_size(type.id()), '\0');
  CHECK(H5Aread(attribute.id(), type.id(), value.data()) >= 0, what, " cannot be read as text");
  value.resize(std::min(value.find('\0'), value.size()));
  while (!value.empty() && value.back() == ' ') value.pop_back();
  return {.text = value, .number = std::nullopt};
}

bool has_attribute(hid_t file, const std::string& name, const std::string& what) {
  const htri_t exists = H5Aexists(file, name.c_str());
  CHECK(exists >= 0, "HDF5 cannot look up ", what);
  return exists > 0;
}

}  // namespace

H5File::H5File(const std::string& path) : path_(path), file_(-1) {
  CHECK(H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0, "HDF5 keeps printing its errors");
  file_ = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  CHECK(file_ >= 0, "HDF5 cannot open ", path);
}

H5File::~H5File() {
  H5Fclose(file_);
}

std::vector<std::string> H5File::names_in(const std::string& group) const {
  const htri_t exists = H5Lexists(file_, group.c_str(), H5P_DEFAULT);
  CHECK(exists >= 0, path_, ": cannot look up ", group);
  std::vector<std::string> names;
  if (exists == 0) return names;
  const Handle opened(H5Gopen2(file_, group.c_str(), H5P_DEFAULT), H5Gclose, path_ + ": " + group);
  H5G_info_t info;
  CHECK(H5Gget_info(opened.id(), &info) >= 0, path_, ": cannot list ", group);
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    const ssize_t length = H5Lget_name_by_idx(opened.id(), ".", H5_INDEX_NAME, H5_ITER_INC, i, nullptr, 0, H5P_DEFAULT);
    CHECK(length >= 0, path_, ": cannot list ", group);
    std::string name(static_cast<size_t>(length) + 1, '\0');
    CHECK(
        H5Lget_name_by_idx(opened.id(), ".", H5_INDEX_NAME, H5_ITER_INC, i, name.data(), name.size(), H5P_DEFAULT) >= 0,
        path_, ": cannot list ", group);
    name.pop_back();
    names.push_back(name);
  }
  return names;
}

H5Array H5File::dataset(const std::string& name) const {
  const std::string what = path_ + ": " + name;
  const Handle dataset(H5Dopen2(file_, name.c_str(), H5P_DEFAULT), H5Dclose, what);
  const Handle space(H5Dget_space(dataset.id()), H5Sclose, what);
  const int num_dims = H5Sget_simple_extent_ndims(space.id());
  CHECK(num_dims >= 0, what, " has no shape");
  std::vector<hsize_t> dims(static_cast<size_t>(num_dims));
  CHECK(H5Sget_simple_extent_dims(space.id(), dims.data(), nullptr) >= 0, what, " has no shape");
  H5Array array;
  int64_t count = 1;
  for (const hsize_t extent : dims) {
    array.shape.push_back(static_cast<int64_t>(extent));
    count *= static_cast<int64_t>(extent);
  }
  array.values.resize(static_cast<size_t>(count));
  if (count > 0)
    CHECK(H5Dread(dataset.id(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, array.values.data()) >= 0, what,
          " cannot be read as numbers");
  return array;
}

std::optional<double> H5File::number(const std::string& attribute) const {
  const std::string what = path_ + ": attribute " + attribute;
  if (!has_attribute(file_, attribute, what)) return std::nullopt;
  const AttributeValue value = read_attribute(file_, attribute, what);
  const std::optional<double> number = value.number ? value.number : parse_number(*value.text);
  CHECK(number.has_value(), what, " is '", *value.text, "', expected a number");
  return number;
}

std::optional<std::string> H5File::text(const std::string& attribute) const {
  const std::string what = path_ + ": attribute " + attribute;
  if (!has_attribute(file_, attribute, what)) return std::nullopt;
  const AttributeValue value = read_attribute(file_, attribute, what);
  return value.text ? *value.text : format_number(*value.number);
}

}  // namespace palimpsest::support
