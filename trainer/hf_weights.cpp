#include "trainer/hf_weights.h"

#include <algorithm>
#include <set>
#include <vector>

#include "kernels/check.h"
#include "kernels/device.h"

namespace palimpsest {

namespace {

bool fits(const SafeTensor& tensor, const HfPlace& place) {
  if (place.any_shape) return tensor.numel() == place.shape.numel();
  if (static_cast<int>(tensor.shape.size()) != place.shape.num_dims()) return false;
  for (int i = 0; i < place.shape.num_dims(); ++i)
    if (tensor.shape[static_cast<size_t>(i)] != place.shape[i]) return false;
  return true;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

template <class T>
void store(const std::vector<float>& values, const Tensor& out) {
  std::copy(values.begin(), values.end(), out.data<T>());
}

}  // namespace

void gather_hf_rows(const SafeTensor& tensor, const HfPlace& place, std::span<float> out, const std::string& where) {
  const int64_t row_size = place.shape.numel() / std::max<int64_t>(1, place.shape[0]);
  size_t filled = 0;
  for (const RowRange& range : place.rows) {
    const auto count = static_cast<size_t>(range.count * row_size);
    CHECK(filled + count <= out.size(), where);
    read_as_f32(tensor, range.start * row_size, out.subspan(filled, count), where);
    filled += count;
  }
  CHECK(filled == out.size(), where, ": ", filled, " of ", out.size(), " elements have a place");
}

void load_hf_weights(const SafetensorsFolder& folder, const HfModel& model, ParameterRegistry& registry) {
  std::set<std::string> used;
  for (Parameter& parameter : registry.parameters()) {
    const HfPlace place = hf_place(model, parameter.spec);
    const auto name = std::find_if(place.names.begin(), place.names.end(),
                                   [&](const std::string& candidate) { return folder.find(candidate) != nullptr; });
    if (name == place.names.end())
      throw_user_error(folder.directory(), ": tensor '", place.names[0], "' ", place.shape.str(), " is missing");
    const SafeTensor& tensor = *folder.find(*name);
    const std::string where = folder.directory() + ": tensor '" + *name + "'";
    if (!fits(tensor, place))
      throw_user_error(where, " is ", shape_text(tensor.shape), ", the config needs ", place.shape.str());
    std::vector<float> values(static_cast<size_t>(parameter.value.numel()));
    gather_hf_rows(tensor, place, values, where);
    const HostCopy there(parameter.value);
    if (parameter.value.dtype() == DType::kF64) {
      store<double>(values, there.tensor());
    } else {
      store<float>(values, there.tensor());
    }
    there.store();
    used.insert(*name);
  }
  for (const std::string& name : folder.names())
    if (!used.count(name)) throw_user_error(folder.directory(), ": tensor '", name, "' has no place in this model");
}

}  // namespace palimpsest
