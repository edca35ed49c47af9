#include "model/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "kernels/device.h"
#include "kernels/elementwise.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

// No machine holds a model near these, and up to them nothing overflows.
constexpr int64_t kMostElements = int64_t{1} << 48;
constexpr size_t kMostTensors = size_t{1} << 22;

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

// The rows of a parameter, which begins at `row` of its stack, within rank * each, ... of the stack.
RowShard row_shard(int64_t row, int64_t rows, int64_t each, int64_t rank) {
  const int64_t begin = std::clamp<int64_t>(rank * each - row, 0, rows);
  const int64_t end = std::clamp<int64_t>((rank + 1) * each - row, 0, rows);
  return {.begin = begin, .count = end - begin};
}

// "model.layers.3.mlp.experts.17.up_proj.weight" -> "model.layers.3.mlp.experts.*.up_proj.weight"
std::string with_expert_as_star(const std::string& name) {
  constexpr std::string_view kMarker = ".experts.";
  const size_t at = name.find(kMarker);
  if (at == std::string::npos) return name;
  const size_t begin = at + kMarker.size();
  return name.substr(0, begin) + "*" + name.substr(std::min(name.size(), name.find('.', begin)));
}

// `rows` of a parameter's block, as a shape.
Shape with_rows(const Shape& block, int64_t rows) {
  Shape shape = {rows};
  for (int i = 1; i < block.num_dims(); ++i) shape.push_back(block[i]);
  return shape;
}

// initial_value, of the random stream that belongs to the parameter's name.
double drawn_value(Init init, uint64_t seed, uint64_t stream, uint64_t index, double initializer_range) {
  switch (init) {
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

// Fills `tensor`, which is rows of the parameter's block from `first_row` on.
template <class T>
void fill_initial(const Parameter& parameter, const Tensor& tensor, int64_t first_row, uint64_t seed,
                  double initializer_range) {
  T* values = tensor.data<T>();
  const ParameterSpec& spec = parameter.spec;
  const uint64_t stream = hash_of(spec.name);
  const int64_t first = first_row * tensor.row_size();
  const int64_t width = tensor.dim(-1);  // neighbours in the block are neighbours in the whole
  const int64_t count = width > 0 ? tensor.numel() / width : 0;
#pragma omp parallel for schedule(static)
  for (int64_t line = 0; line < count; ++line) {
    const int64_t begin = global_index(spec.shape, parameter.block, first + line * width);
    for (int64_t i = 0; i < width; ++i)
      values[line * width + i] =
          static_cast<T>(drawn_value(spec.init, seed, stream, static_cast<uint64_t>(begin + i), initializer_range));
  }
}

}  // namespace

ParameterSpec norm_weight(std::string name, int64_t size, TensorSplit split, NormWeight kind) {
  return {.name = std::move(name),
          .shape = {size},
          .init = kind == NormWeight::kOneCentred ? Init::kZeros : Init::kOnes,
          .decay = WeightDecay::kNo,
          .split = split,
          .in_product = InProduct::kNo};
}

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

ParameterRegistry::ParameterRegistry(TensorShare share, ReplicaShare replica) : share_(share), replica_(replica) {
  if (replica_.size == 1) replica_.zero = 1;
}

int64_t ParameterRegistry::begin_group(int64_t slot) {
  groups_.push_back({.slot = slot});
  return static_cast<int64_t>(groups_.size()) - 1;
}

Parameter& ParameterRegistry::declare(ParameterSpec spec) {
  std::vector<ParameterSpec> specs;
  specs.push_back(std::move(spec));
  return *declare_stack(std::move(specs)).parameters[0];
}

ParameterStack& ParameterRegistry::declare_stack(std::vector<ParameterSpec> specs) {
  CHECK(!specs.empty(), "an empty stack of parameters");
  if (groups_.empty()) begin_group(0);
  ParameterStack& stack = stacks_.emplace_back();
  groups_.back().stacks.push_back(&stack);
  for (ParameterSpec& spec : specs) {
    CHECK(find(spec.name) == nullptr, "parameter ", spec.name, " is declared twice");
    CHECK(specs.size() == 1 || (spec.shape.num_dims() >= 2 &&
                                spec.shape[spec.shape.num_dims() - 1] == specs[0].shape[specs[0].shape.num_dims() - 1]),
          "parameter ", spec.name, " ", spec.shape.str(), " does not fit the width of its stack");
    num_elements_ += spec.shape.numel();
    if (num_elements_ > kMostElements || parameters_.size() >= kMostTensors)
      throw_user_error("the model is too large: with ", spec.name, " it has ", parameters_.size() + 1, " tensors of ",
                       num_elements_, " numbers, must be at most ", kMostTensors, " of ", kMostElements);
    stack.parameters.push_back(&parameters_.emplace_back());
    Parameter& parameter = *stack.parameters.back();
    parameter.block = tensor_block(spec, share_);
    stack.rows += parameter.block.shape[0];
    parameter.spec = std::move(spec);
    by_name_.emplace(parameter.spec.name, &parameter);
  }
  // The shards of tensor ranks that hold copies must be the same rows.
  const auto& stacked = stack.parameters;
  if (std::any_of(stacked.begin(), stacked.end(),
                  [](const Parameter* parameter) { return parameter->block.copies > 1; }))
    for (const Parameter* parameter : stacked)
      CHECK(tensor_block(parameter->spec, {.rank = 0, .size = share_.size}).shape ==
                tensor_block(parameter->spec, {.rank = share_.size - 1, .size = share_.size}).shape,
            parameter->spec.name, " cannot be in a stack with copies: tensor ranks hold unlike parts of it");
  stack.each = (stack.rows + replica_.size - 1) / replica_.size;
  int64_t row = 0;
  for (Parameter* parameter : stack.parameters) {
    parameter->shard = row_shard(row, parameter->block.shape[0], stack.each, replica_.rank);
    row += parameter->block.shape[0];
  }
  return stack;
}

void ParameterRegistry::bind(DType dtype, ParameterUse use, Arena& parameters, Arena& gradients, Arena& optimizer) {
  for (ParameterStack& stack : stacks_) bind_own(stack, dtype, use, parameters, gradients, optimizer);
  int64_t num_slots = 0;
  for (const ParameterGroup& group : groups_) num_slots = std::max(num_slots, group.slot + 1);
  for (int64_t slot = 0; slot < num_slots; ++slot) bind_slot(slot, dtype, use, parameters, gradients);
  const auto cut = [](const Tensor& whole, const Shape& block, int64_t row, int64_t rows) {
    return whole.defined() ? whole.rows(rows > 0 ? row : 0, rows).view(with_rows(block, rows)) : Tensor();
  };
  for (ParameterStack& stack : stacks_) {
    stack.value = stack.operand = stack.whole_value.rows(0, stack.rows);
    stack.grad = stack.whole_grad.defined() ? stack.whole_grad.rows(0, stack.rows) : Tensor();
    int64_t row = 0;
    for (Parameter* parameter : stack.parameters) {
      const Shape& block = parameter->block.shape;
      const RowShard& shard = parameter->shard;
      const int64_t own_row = row + shard.begin - replica_.rank * stack.each;
      parameter->value = parameter->operand = cut(stack.value, block, row, block[0]);
      parameter->grad = cut(stack.grad, block, row, block[0]);
      parameter->value_shard = cut(stack.own_value, block, own_row, shard.count);
      parameter->grad_shard = cut(stack.own_grad, block, own_row, shard.count);
      row += block[0];
    }
  }
}

// What is a stack's own: the shards, and with a low level of zero the whole.
void ParameterRegistry::bind_own(ParameterStack& stack, DType dtype, ParameterUse use, Arena& parameters,
                                 Arena& gradients, Arena& optimizer) {
  const Shape& block = stack.parameters[0]->block.shape;
  const Shape whole = with_rows(block, stack.each * replica_.size), own = with_rows(block, stack.each);
  const auto allocate = [&](Arena& arena, bool sharded, Tensor& whole_tensor, Tensor& own_tensor) {
    whole_tensor = sharded ? Tensor() : arena.allocate(dtype, whole);
    own_tensor =
        sharded ? arena.allocate(dtype, own) : whole_tensor.rows(replica_.rank * stack.each, stack.each).view(own);
  };
  allocate(parameters, replica_.zero >= 3, stack.whole_value, stack.own_value);
  stack.whole_grad = stack.own_grad = stack.received = Tensor();
  if (use != ParameterUse::kInference) allocate(gradients, replica_.zero >= 2, stack.whole_grad, stack.own_grad);
  for (Parameter* parameter : stack.parameters) {
    const Shape shard = with_rows(parameter->block.shape, parameter->shard.count);
    const bool with_moments = use == ParameterUse::kTraining;
    parameter->adam_m = with_moments ? optimizer.allocate(dtype, shard) : Tensor();
    parameter->adam_v = with_moments ? optimizer.allocate(dtype, shard) : Tensor();
  }
}

// What the groups of a slot share: each begins where the slot begins.
void ParameterRegistry::bind_slot(int64_t slot, DType dtype, ParameterUse use, Arena& parameters, Arena& gradients) {
  const auto share = [&](Arena& arena, auto&& allocate) {
    const int64_t begin = arena.mark();
    int64_t end = begin;
    for (ParameterGroup& group : groups_) {
      if (group.slot != slot) continue;
      for (ParameterStack* stack : group.stacks) {
        const Shape& block = stack->parameters[0]->block.shape;
        allocate(*stack, with_rows(block, stack->each * replica_.size), with_rows(block, stack->each));
      }
      end = std::max(end, arena.mark());
      arena.release(begin);
    }
    if (end > begin) arena.allocate(DType::kU8, {end - begin});
  };
  if (replica_.zero >= 3)
    share(parameters, [&](ParameterStack& stack, const Shape& whole, const Shape&) {
      stack.whole_value = parameters.allocate(dtype, whole);
    });
  if (use == ParameterUse::kInference || replica_.size == 1) return;
  share(gradients, [&](ParameterStack& stack, const Shape& whole, const Shape& own) {
    if (replica_.zero >= 2) stack.whole_grad = gradients.allocate(dtype, whole);
    const bool in_place = replica_.zero < 2 && stack.whole_grad.device() == Device::kCuda;
    if (!in_place) stack.received = gradients.allocate(dtype, own);
  });
}

double initial_value(const ParameterSpec& spec, uint64_t seed, int64_t global_index, double initializer_range) {
  return drawn_value(spec.init, seed, hash_of(spec.name), static_cast<uint64_t>(global_index), initializer_range);
}

void ParameterRegistry::initialize(uint64_t seed, double initializer_range,
                                   const std::function<void(int64_t elements)>& progress) {
  for (const Parameter& parameter : parameters_) {
    const bool sharded = replica_.zero >= 3;
    const Tensor& tensor = sharded ? parameter.value_shard : parameter.value;
    const int64_t first_row = sharded ? parameter.shard.begin : 0;
    const HostCopy values(tensor);
    if (tensor.dtype() == DType::kF64) {
      fill_initial<double>(parameter, values.tensor(), first_row, seed, initializer_range);
    } else {
      fill_initial<float>(parameter, values.tensor(), first_row, seed, initializer_range);
    }
    values.store();
    if (progress) progress(tensor.numel());
  }
}

void ParameterRegistry::zero_gradients(Stream& stream) {
  if (stacks_.empty()) return;
  // They lie one behind the other, so that one call does.
  const auto gradient = [&](const ParameterStack& stack) {
    return replica_.zero >= 2 ? stack.own_grad : stack.whole_grad;
  };
  const Tensor first = gradient(stacks_.front()), last = gradient(stacks_.back());
  auto* begin = static_cast<std::byte*>(first.raw());
  const int64_t bytes = static_cast<std::byte*>(last.raw()) + last.bytes() - begin;
  fill_zero(stream, Tensor(begin, first.dtype(), {bytes / size_of(first.dtype())}, first.device()));
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
