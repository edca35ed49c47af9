#include "model/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "kernels/elementwise.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

const char* name_of(Init init) {
  switch (init) {
    case Init::kNormal:
      return "normal";
    case Init::kZeros:
      return "zeros";
    case Init::kOnes:
      return "ones";
    case Init::kLogUniform1To16:
      return "log uniform(1, 16)";
    case Init::kLogUniform0To16:
      return "log uniform(0, 16)";
    case Init::kDtBias:
      return "inverse softplus";
  }
  return "?";
}

// Index in the whole tensor of element i of the block.
int64_t global_index(const Shape& global, const TensorBlock& block, int64_t i) {
  int64_t index = 0, stride = 1;
  for (int dim = global.num_dims() - 1; dim >= 0; --dim) {
    index += (block.start[dim] + i % block.shape[dim]) * stride;
    i /= block.shape[dim];
    stride *= global[dim];
  }
  return index;
}

RowShard row_shard(int64_t rows, const ReplicaShare& replica) {
  RowShard shard;
  shard.each = (rows + replica.size - 1) / replica.size;
  shard.begin = std::min(rows, replica.rank * shard.each);
  shard.count = std::min(shard.each, rows - shard.begin);
  return shard;
}

// "model.layers.3.mlp.experts.17.up_proj.weight" -> "model.layers.3.mlp.experts.*.up_proj.weight"
std::string with_expert_as_star(const std::string& name) {
  constexpr std::string_view kMarker = ".experts.";
  const size_t at = name.find(kMarker);
  if (at == std::string::npos) return name;
  const size_t begin = at + kMarker.size();
  return name.substr(0, begin) + "*" + name.substr(std::min(name.size(), name.find('.', begin)));
}

template <class T>
void fill_initial(const Parameter& parameter, uint64_t seed, double initializer_range) {
  T* values = parameter.value.data<T>();
  const TensorBlock& block = parameter.block;
  const int64_t count = parameter.value.numel();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i)
    values[i] = static_cast<T>(
        initial_value(parameter.spec, seed, global_index(parameter.spec.shape, block, i), initializer_range));
}

}  // namespace

int64_t TensorShare::units(int64_t count, const std::string& what) const {
  if (count % size != 0) throw_user_error("parallel.tensor is ", size, ", must divide ", what, " = ", count);
  return count / size;
}

int64_t TensorShare::shared_units(int64_t count, const std::string& what) const {
  if (count % size == 0) return count / size;
  if (size % count == 0) return 1;
  throw_user_error("parallel.tensor is ", size, ", must divide ", what, " = ", count, " or be a multiple of it");
}

TensorBlock tensor_block(const ParameterSpec& spec, const TensorShare& share) {
  TensorBlock block;
  for (int i = 0; i < spec.shape.num_dims(); ++i) block.start.push_back(0);
  block.shape = spec.shape;
  const bool split = spec.split == TensorSplit::kRows || spec.split == TensorSplit::kColumns;
  if (!split || share.size == 1) {
    if (!split) block.copies = share.size;
    return block;
  }
  const int cut = spec.split == TensorSplit::kRows ? 0 : 1;
  const int64_t extent = spec.shape[cut];
  int64_t begin = 0, count = 0;
  if (spec.units > 0) {
    const int64_t unit_extent = extent / spec.units;
    const int64_t units = share.shared_units(spec.units, spec.name);
    block.copies = spec.units % share.size == 0 ? 1 : share.size / spec.units;
    begin = share.rank / block.copies * units * unit_extent;
    count = units * unit_extent;
  } else {
    const int64_t each = (extent + share.size - 1) / share.size;
    begin = std::min(extent, share.rank * each);
    count = std::min(each, extent - begin);
  }
  Shape start, shape;
  for (int i = 0; i < spec.shape.num_dims(); ++i) {
    start.push_back(i == cut ? begin : 0);
    shape.push_back(i == cut ? count : spec.shape[i]);
  }
  block.start = start;
  block.shape = shape;
  return block;
}

Parameter& ParameterRegistry::declare(ParameterSpec spec) {
  std::vector<ParameterSpec> specs;
  specs.push_back(std::move(spec));
  return *declare_stack(std::move(specs)).parameters[0];
}

ParameterStack& ParameterRegistry::declare_stack(std::vector<ParameterSpec> specs) {
  CHECK(!specs.empty(), "an empty stack of parameters");
  ParameterStack& stack = stacks_.emplace_back();
  for (ParameterSpec& spec : specs) {
    CHECK(find(spec.name) == nullptr, "parameter ", spec.name, " is declared twice");
    CHECK(specs.size() == 1 || (spec.shape.num_dims() >= 2 &&
                                spec.shape[spec.shape.num_dims() - 1] == specs[0].shape[specs[0].shape.num_dims() - 1]),
          "parameter ", spec.name, " ", spec.shape.str(), " does not fit the width of its stack");
    stack.parameters.push_back(&parameters_.emplace_back());
    Parameter& parameter = *stack.parameters.back();
    parameter.block = tensor_block(spec, share_);
    parameter.shard = row_shard(parameter.block.shape[0], replica_);
    parameter.spec = std::move(spec);
    by_name_.emplace(parameter.spec.name, &parameter);
  }
  return stack;
}

void ParameterRegistry::bind(DType dtype, ParameterUse use, Arena& parameters, Arena& gradients, Arena& optimizer) {
  const auto cut = [](const Tensor& whole, const Parameter& parameter, int64_t row) {
    return whole.rows(row, parameter.block.shape[0]).view(parameter.block.shape);
  };
  for (ParameterStack& stack : stacks_) {
    const Shape& first = stack.parameters[0]->block.shape;
    int64_t rows = 0;
    for (const Parameter* parameter : stack.parameters) rows += parameter->block.shape[0];
    Shape shape = {rows};
    for (int i = 1; i < first.num_dims(); ++i) shape.push_back(first[i]);
    const bool with_grad = use != ParameterUse::kInference;
    const bool with_moments = use == ParameterUse::kTraining;
    stack.value = parameters.allocate(dtype, shape);
    stack.grad = with_grad ? gradients.allocate(dtype, shape) : Tensor();
    int64_t row = 0;
    for (Parameter* parameter : stack.parameters) {
      parameter->value = cut(stack.value, *parameter, row);
      parameter->grad = with_grad ? cut(stack.grad, *parameter, row) : Tensor();
      Shape shard = {parameter->shard.count};
      for (int i = 1; i < parameter->block.shape.num_dims(); ++i) shard.push_back(parameter->block.shape[i]);
      parameter->adam_m = with_moments ? optimizer.allocate(dtype, shard) : Tensor();
      parameter->adam_v = with_moments ? optimizer.allocate(dtype, shard) : Tensor();
      row += parameter->block.shape[0];
    }
  }
}

double initial_value(const ParameterSpec& spec, uint64_t seed, int64_t global_index, double initializer_range) {
  const uint64_t stream = hash_of(spec.name);
  const auto index = static_cast<uint64_t>(global_index);
  switch (spec.init) {
    case Init::kNormal:
      return initializer_range * random_normal(seed, stream, index);
    case Init::kZeros:
      return 0.0;
    case Init::kOnes:
      return 1.0;
    case Init::kLogUniform1To16:
      return std::log(1.0 + 15.0 * random_uniform(seed, stream, index));
    case Init::kLogUniform0To16:
      return std::log(std::max(16.0 * random_uniform(seed, stream, index), 0.0101));
    case Init::kDtBias: {
      const double low = std::log(1e-3), high = std::log(1e-1);
      const double dt = std::max(std::exp(low + (high - low) * random_uniform(seed, stream, index)), 1e-4);
      return dt + std::log(-std::expm1(-dt));
    }
  }
  return 0.0;
}

void ParameterRegistry::initialize(uint64_t seed, double initializer_range,
                                   const std::function<void(int64_t elements)>& progress) {
  for (const Parameter& parameter : parameters_) {
    if (parameter.value.dtype() == DType::kF64) {
      fill_initial<double>(parameter, seed, initializer_range);
    } else {
      fill_initial<float>(parameter, seed, initializer_range);
    }
    if (progress) progress(parameter.value.numel());
  }
}

void ParameterRegistry::zero_gradients(Stream& stream) {
  for (ParameterStack& stack : stacks_) fill_zero(stream, stack.grad);
}

void ParameterRegistry::zero_optimizer(Stream& stream) {
  for (Parameter& parameter : parameters_) {
    fill_zero(stream, parameter.adam_m);
    fill_zero(stream, parameter.adam_v);
  }
}

Parameter* ParameterRegistry::find(const std::string& name) {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

int64_t ParameterRegistry::num_elements() const {
  int64_t count = 0;
  for (const Parameter& parameter : parameters_) count += parameter.spec.shape.numel();
  return count;
}

int64_t ParameterRegistry::num_product_elements() const {
  int64_t count = 0;
  for (const Parameter& parameter : parameters_)
    if (parameter.spec.in_product == InProduct::kYes) count += parameter.spec.shape.numel();
  return count;
}

std::string parameter_table(const ParameterRegistry& registry) {
  struct Row {
    std::string name;
    const ParameterSpec* spec;
    int64_t count;  // parameters of this row: the experts' share theirs
  };
  std::vector<Row> rows;
  std::unordered_map<std::string, size_t> row_of;
  for (const Parameter& parameter : registry.parameters()) {
    const std::string name = with_expert_as_star(parameter.spec.name);
    const auto [found, is_new] = row_of.emplace(name, rows.size());
    if (is_new) rows.push_back({name, &parameter.spec, 0});
    ++rows[found->second].count;
  }
  size_t width = 4;
  for (const Row& row : rows) width = std::max(width, row.name.size());
  std::string text = fmt::format("{:<{}}  {:<22} {:>15}  {:<18}  {}\n", "name", width, "shape", "count",
                                 "initial values", "weight decay");
  for (const Row& row : rows) {
    const ParameterSpec& spec = *row.spec;
    const std::string shape = row.count == 1 ? spec.shape.str() : fmt::format("{} x {}", row.count, spec.shape.str());
    text += fmt::format("{:<{}}  {:<22} {:>15}  {:<18}  {}\n", row.name, width, shape, row.count * spec.shape.numel(),
                        name_of(spec.init), spec.decay == WeightDecay::kYes ? "yes" : "no");
  }
  return text + fmt::format("{:<{}}  {:<22} {:>15}\n", "total", width, "", registry.num_elements());
}

}  // namespace palimpsest
