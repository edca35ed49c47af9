#include "trainer/hf_weights.h"

#include <algorithm>
#include <charconv>
#include <set>

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

// The layer that a name says; -1 outside the layers.
int64_t layer_of(const std::string& name) {
  constexpr std::string_view kLayers = "model.layers.";
  int64_t layer = -1;
  if (name.starts_with(kLayers)) std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
  return layer;
}

// The name without the numbers of layer and expert: "model.layers.*.mlp.experts.*.up_proj.weight".
std::string kind_of(std::string_view name) {
  std::string kind;
  while (!name.empty()) {
    const std::string_view part = name.substr(0, std::min(name.find('.'), name.size() - 1) + 1);
    const bool number =
        part.find_first_not_of("0123456789") == part.size() - 1 && part.ends_with('.') && part.size() > 1;
    kind += number ? "*." : part;
    name.remove_prefix(part.size());
  }
  return kind;
}

// The kinds of tensor that a model has, to tell strangers from tensors in the wrong place.
class KnownKinds {
 public:
  void add(const std::string& name) { kinds_.insert(kind_of(name)); }

  // Of a known kind, or inside a module of a known kind: "x.bias" or "x.lora_A.weight" where there is "x.weight".
  bool has(const std::string& name) const {
    const std::string kind = kind_of(name);
    if (kinds_.count(kind)) return true;
    for (size_t dot = kind.find('.'); dot != std::string::npos; dot = kind.find('.', dot + 1))
      if (kinds_.count(kind.substr(0, dot) + ".weight")) return true;
    return false;
  }

 private:
  std::set<std::string> kinds_;
};

}  // namespace

std::string list_text(const std::vector<std::string>& names) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kMost) text += " and " + std::to_string(names.size() - kMost) + " more";
  return text;
}

void read_hf_elements(const SafeTensor& tensor, const HfPlace& place, int64_t first, std::span<float> out,
                      const std::string& where) {
  const int64_t row_size = place.shape.numel() / std::max<int64_t>(1, place.shape[0]);
  int64_t begin = 0;  // of a range, in elements of the parameter
  size_t filled = 0;
  for (const RowRange& range : place.rows) {
    const int64_t end = begin + range.count * row_size, at = first + static_cast<int64_t>(filled);
    if (filled < out.size() && at >= begin && at < end) {
      const auto count = std::min(out.size() - filled, static_cast<size_t>(end - at));
      read_as_f32(tensor, range.start * row_size + at - begin, out.subspan(filled, count), where);
      filled += count;
    }
    begin = end;
  }
  CHECK(filled == out.size(), where, ": ", filled, " of ", out.size(), " elements from ", first, " have a place");
}

HfWeights::HfWeights(const SafetensorsFolder& folder, const HfModel& model, const ParameterRegistry& registry)
    : folder_(folder), num_layers_(model.config.num_layers) {
  std::set<std::string> used;
  KnownKinds known;
  for (const Parameter& parameter : registry.parameters()) {
    Source source{.place = hf_place(model, parameter.spec)};
    const std::vector<std::string>& names = source.place.names;
    const auto name = std::find_if(names.begin(), names.end(),
                                   [&](const auto& candidate) { return folder.find(candidate) != nullptr; });
    if (name == names.end())
      throw_user_error(folder.directory(), ": tensor '", names[0], "' ", source.place.shape.str(), " is missing");
    source.tensor = folder.find(*name);
    source.where = folder.directory() + ": tensor '" + *name + "'";
    if (!fits(*source.tensor, source.place))
      throw_user_error(source.where, " is ", shape_text(source.tensor->shape), ", the config needs ",
                       source.place.shape.str());
    used.insert(*name);
    for (const std::string& spelling : names) known.add(spelling);
    sources_.emplace(parameter.spec.name, std::move(source));
  }
  if (model.config.tie_embeddings) used.insert("lm_head.weight");  // the embedding once more (trainer/hf_folder.h)
  for (const std::string& name : folder.names()) {
    if (used.count(name)) continue;
    // Layers behind the last are next-token heads; the public library writes a shared expert of size 0.
    if (layer_of(name) < num_layers_ && folder.find(name)->numel() > 0 && known.has(name))
      throw_user_error(folder.directory(), ": tensor '", name, "' has no place in the model of config.json");
    unknown_.push_back(name);
  }
}

std::vector<std::string> HfWeights::notices() const {
  std::vector<std::string> inside, others, lines;
  for (const std::string& name : unknown_) {
    const int64_t layer = layer_of(name);
    (layer >= 0 && layer < num_layers_ ? inside : others).push_back(name);
  }
  if (!inside.empty())
    lines.push_back("tensors in the model's layers that it has no use for (export gives them back): " +
                    list_text(inside));
  if (!others.empty()) lines.push_back("tensors without a meaning here (export gives them back): " + list_text(others));
  return lines;
}

const HfWeights::Source& HfWeights::source_of(const std::string& parameter) const {
  const auto found = sources_.find(parameter);
  CHECK(found != sources_.end(), "parameter ", parameter, " was not looked for");
  return found->second;
}

void HfWeights::read(const std::string& parameter, int64_t first, std::span<float> out) const {
  const Source& source = source_of(parameter);
  read_hf_elements(*source.tensor, source.place, first, out, source.where);
  folder_.release(source.tensor->bytes);
}

void HfWeights::read(const CheckpointBlock& block) const {
  constexpr std::string_view kPart = "model/";
  CHECK(block.name.starts_with(kPart), "block ", block.name, " holds no weights");
  const Source& source = source_of(block.name.substr(kPart.size()));
  // A row of the block is a part of a row of the parameter; only dimensions 0 and 1 are ever cut.
  const HostCopy there(block.tensor);
  const Tensor& out = there.tensor();
  if (out.numel() == 0) return;
  int64_t row_size = 1, column_size = 1;
  for (int i = 1; i < block.global_shape.num_dims(); ++i) row_size *= block.global_shape[i];
  for (int i = 2; i < block.global_shape.num_dims(); ++i) column_size *= block.global_shape[i];
  const int64_t column = out.num_dims() > 1 ? block.start[1] * column_size : 0;
  std::vector<float> values(static_cast<size_t>(out.row_size()));
  for (int64_t row = 0; row < out.dim(0); ++row) {
    read_hf_elements(*source.tensor, source.place, (block.start[0] + row) * row_size + column, values, source.where);
    const Tensor to = out.rows(row, 1);
    if (out.dtype() == DType::kF64) {
      std::copy(values.begin(), values.end(), to.data<double>());
    } else {
      std::copy(values.begin(), values.end(), to.data<float>());
    }
  }
  there.store();
  folder_.release(source.tensor->bytes);
}

}  // namespace palimpsest
