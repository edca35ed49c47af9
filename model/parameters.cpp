#include "model/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
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

template <class T>
void fill_initial(const Parameter& parameter, uint64_t seed, double initializer_range) {
  T* values = parameter.value.data<T>();
  const int64_t count = parameter.value.numel();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i)
    values[i] = static_cast<T>(initial_value(parameter.spec, seed, i, initializer_range));
}

}  // namespace

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
    stack.parameters.back()->spec = std::move(spec);
  }
  return stack;
}

void ParameterRegistry::bind(DType dtype, ParameterUse use, Arena& parameters, Arena& gradients, Arena& optimizer) {
  const auto cut = [](const Tensor& whole, const Parameter& parameter, int64_t row) {
    return whole.rows(row, parameter.spec.shape[0]).view(parameter.spec.shape);
  };
  for (ParameterStack& stack : stacks_) {
    Shape shape = stack.parameters[0]->spec.shape;
    if (stack.parameters.size() > 1) {
      Shape stacked = {0};
      int64_t rows = 0;
      for (const Parameter* parameter : stack.parameters) rows += parameter->spec.shape[0];
      stacked = {rows};
      for (int i = 1; i < shape.num_dims(); ++i) stacked.push_back(shape[i]);
      shape = stacked;
    }
    const bool with_grad = use != ParameterUse::kInference;
    const bool with_moments = use == ParameterUse::kTraining;
    stack.value = parameters.allocate(dtype, shape);
    stack.grad = with_grad ? gradients.allocate(dtype, shape) : Tensor();
    const Tensor m = with_moments ? optimizer.allocate(dtype, shape) : Tensor();
    const Tensor v = with_moments ? optimizer.allocate(dtype, shape) : Tensor();
    int64_t row = 0;
    for (Parameter* parameter : stack.parameters) {
      parameter->value = cut(stack.value, *parameter, row);
      parameter->grad = with_grad ? cut(stack.grad, *parameter, row) : Tensor();
      parameter->adam_m = with_moments ? cut(m, *parameter, row) : Tensor();
      parameter->adam_v = with_moments ? cut(v, *parameter, row) : Tensor();
      row += parameter->spec.shape[0];
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

void ParameterRegistry::initialize(uint64_t seed, double initializer_range) {
  for (const Parameter& parameter : parameters_) {
    if (parameter.value.dtype() == DType::kF64) {
      fill_initial<double>(parameter, seed, initializer_range);
    } else {
      fill_initial<float>(parameter, seed, initializer_range);
    }
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
  for (Parameter& parameter : parameters_)
    if (parameter.spec.name == name) return &parameter;
  return nullptr;
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
  size_t width = 4;
  for (const Parameter& parameter : registry.parameters()) width = std::max(width, parameter.spec.name.size());
  std::string text = fmt::format("{:<{}}  {:<16} {:>12}  {:<18}  {}\n", "name", width, "shape", "count",
                                 "initial values", "weight decay");
  for (const Parameter& parameter : registry.parameters()) {
    const ParameterSpec& spec = parameter.spec;
    text += fmt::format("{:<{}}  {:<16} {:>12}  {:<18}  {}\n", spec.name, width, spec.shape.str(), spec.shape.numel(),
                        name_of(spec.init), spec.decay == WeightDecay::kYes ? "yes" : "no");
  }
  return text + fmt::format("{:<{}}  {:<16} {:>12}\n", "total", width, "", registry.num_elements());
}

}  // namespace palimpsest
