#include "tests/support/delta_rule_case.h"

#include <cmath>

#include "kernels/random.h"
#include "tests/support/tensors.h"

namespace palimpsest::support {

namespace {

class Run {
 public:
  Run(const DeltaRuleCase& c, DType dtype, int64_t gap, Device device)
      : case_(c), dtype_(dtype), gap_(gap), device_(device) {}

  double loss() {
    make_inputs();
    for (const char* name : {"output", "final_state"}) make(name);
    run_in_planned_memory([&](Stream& stream, Arena& activations) { forward(stream, activations); });
    double sum = dot(argument("output"), argument("grad_output"));
    if (case_.in.count("grad_final_state") != 0) sum += dot(argument("final_state"), argument("grad_final_state"));
    return sum;
  }

  NamedArrays run() {
    make_inputs();
    for (const char* name : {"output", "final_state"}) make(name);
    for (const char* name : {"q", "k", "v", "beta_logit", "gate_logit", "A_log", "dt_bias", "initial_state"})
      if (case_.in.count(name) != 0) make(std::string("grad.") + name);
    for (const char* accumulated : {"grad.A_log", "grad.dt_bias"})
      if (tensors_.count(accumulated) != 0) fill(tensors_.at(accumulated), 0);

    run_in_planned_memory([&](Stream& stream, Arena& activations) {
      const DeltaRuleSaved saved = forward(stream, activations);
      const DeltaRuleGrads grads = {.dq = argument("grad.q"),
                                    .dk = argument("grad.k"),
                                    .dv = argument("grad.v"),
                                    .dbeta_logit = argument("grad.beta_logit"),
                                    .dgate_logit = argument("grad.gate_logit"),
                                    .dA_log = argument("grad.A_log"),
                                    .ddt_bias = argument("grad.dt_bias"),
                                    .d_initial_state = argument("grad.initial_state")};
      delta_rule_backward(stream, grads, argument("grad_output"), argument("grad_final_state"), saved, inputs(),
                          case_.options, documents_);
    });

    NamedArrays results;
    for (auto& [name, tensor] : tensors_) {
      CHECK(tensor.surroundings_untouched(), "memory around ", name, " changed");
      if (case_.in.count(name) == 0) {
        results[name] = values_of(tensor);
      } else {
        CHECK(values_of(tensor) == inputs_.at(name), "input ", name, " changed");
      }
    }
    return results;
  }

 private:
  DeltaRuleSaved forward(Stream& stream, Arena& activations) {
    const DeltaRuleInputs in = inputs();
    const DeltaRuleSaved saved =
        allocate_delta_rule_saved(activations, dtype_, delta_rule_shape(in, documents_), case_.options);
    delta_rule_forward(stream, {.o = argument("output"), .final_state = argument("final_state")}, saved, in,
                       case_.options, documents_);
    return saved;
  }

  // Once on planning arenas, then on arenas of just the size that planning found, filled with NaN. On a GPU the tensors
  // are copied there and back.
  template <class Call>
  void run_in_planned_memory(Call call) {
    Arena planned_scratch = Arena::planning("scratch", device_);
    Arena planned_activations = Arena::planning("activations", device_);
    Arena planned_tensors = Arena::planning("tensors", device_);
    Stream planning(device_, planned_scratch);
    place_tensors(planning, planned_tensors);
    call(planning, planned_activations);
    Arena scratch("scratch", device_, planned_scratch.peak());
    Arena activations("activations", device_, planned_activations.peak());
    Arena tensors("tensors", device_, planned_tensors.peak());
    Stream stream(device_, scratch);
    fill_with_nan(stream, scratch);
    fill_with_nan(stream, activations);
    place_tensors(stream, tensors);
    call(stream, activations);
    CHECK(scratch.used() == 0, "the op left ", scratch.used(), " bytes of workspace");
    if (device_ == Device::kCuda)
      for (auto& [name, tensor] : tensors_) tensor.copy_from(stream, placed_.at(name));
    placed_.clear();
  }

  void place_tensors(const Stream& stream, Arena& arena) {
    if (device_ == Device::kCuda)
      for (const auto& [name, tensor] : tensors_) placed_[name] = tensor.copy_to(stream, arena);
  }

  DeltaRuleInputs inputs() {
    DeltaRuleInputs in = delta_rule_inputs([&](const char* name) { return argument(name); });
    in.initial_state = argument("initial_state");
    return in;
  }
  // What the op is given; absent when it was not made.
  Tensor argument(const std::string& name) const {
    if (tensors_.count(name) == 0) return {};
    const auto placed = placed_.find(name);
    return placed != placed_.end() ? placed->second : tensors_.at(name).tensor();
  }
  void make_inputs() {
    for (const auto& [name, values] : case_.in) {
      make(name);
      set_values(tensors_.at(name), values);
      inputs_[name] = values_of(tensors_.at(name));
    }
  }
  void make(const std::string& name) {
    const bool over_tokens = name.find("A_log") == std::string::npos && name.find("dt_bias") == std::string::npos &&
                             name.find("_state") == std::string::npos;
    // Only these may have spaced rows; the others are f32 beside bf16.
    const DType dtype = over_tokens || dtype_ != DType::kBF16 ? dtype_ : DType::kF32;
    tensors_.emplace(name, OwnedTensor(dtype, case_.shape_of(name), over_tokens ? gap_ : 0));
  }

  const DeltaRuleCase& case_;
  const Documents documents_{case_.offsets};
  DType dtype_;
  int64_t gap_;
  Device device_;
  std::map<std::string, OwnedTensor> tensors_;  // in host memory
  std::map<std::string, Tensor> placed_;        // on the GPU
  NamedArrays inputs_;                          // as stored
};

}  // namespace

Shape DeltaRuleCase::shape_of(const std::string& name) const {
  const std::string base = name.rfind("grad.", 0) == 0 ? name.substr(5) : name;
  const bool vector = options.decay == Decay::kVector;
  const int64_t N = num_tokens();
  if (base == "q" || base == "k") return {N, H, K};
  if (base == "v" || base == "output" || base == "grad_output") return {N, HV, V};
  if (base == "beta_logit") return {N, HV};
  if (base == "gate_logit") return vector ? Shape{N, HV, K} : Shape{N, HV};
  if (base == "A_log") return {HV};
  if (base == "dt_bias") return vector ? Shape{HV, K} : Shape{HV};
  CHECK(base == "initial_state" || base == "final_state" || base == "grad_final_state", "no tensor is named ", name);
  return {num_documents(), HV, K, V};
}

NamedArrays run_delta_rule(const DeltaRuleCase& c, DType dtype, RowSpacing spacing, Device device) {
  return Run(c, dtype, spacing == RowSpacing::kGaps ? 5 : 0, device).run();
}

double delta_rule_loss(const DeltaRuleCase& c) {
  return Run(c, DType::kF64, 0, Device::kCpu).loss();
}

NamedArrays plain_delta_rule(const DeltaRuleCase& c) {
  const DeltaRuleOptions& op = c.options;
  const int64_t H = c.H, HV = c.HV, K = c.K, V = c.V;
  const bool vector = op.decay == Decay::kVector;
  const auto value = [&](const std::string& name, int64_t i) { return c.in.at(name)[static_cast<size_t>(i)]; };
  const auto normalised = [&](const std::string& name, int64_t t, int64_t head) {
    std::vector<double> x;
    double sum = 0;
    for (int64_t i = 0; i < K; ++i) {
      x.push_back(value(name, (t * H + head) * K + i));
      sum += x.back() * x.back();
    }
    if (op.l2norm_qk)
      for (double& element : x) element /= std::sqrt(sum + op.l2norm_eps);
    return x;
  };
  const auto log_decay = [&](int64_t t, int64_t head, int64_t i) {
    if (op.decay == Decay::kNone) return 0.0;
    if (op.gate == Gate::kFixed) return std::log(1 - std::pow(2.0, -5.0 - static_cast<double>(head)));
    const int64_t channel = vector ? head * K + i : head;
    const double y = value("gate_logit", t * (vector ? HV * K : HV) + channel) + value("dt_bias", channel);
    const double rate = std::exp(value("A_log", head));
    if (op.gate == Gate::kBounded) return op.gate_lower_bound / (1 + std::exp(-rate * y));
    return -rate * (y > 30 ? y : std::log1p(std::exp(y)));
  };
  NamedArrays out;
  out["output"].resize(static_cast<size_t>(c.num_tokens() * HV * V));
  for (int64_t document = 0; document < c.num_documents(); ++document) {
    for (int64_t head = 0; head < HV; ++head) {
      std::vector<double> state(static_cast<size_t>(K * V), 0.0);
      if (c.in.count("initial_state") != 0)
        for (int64_t i = 0; i < K * V; ++i) state[i] = value("initial_state", (document * HV + head) * K * V + i);
      for (int64_t t = c.offsets[document]; t < c.offsets[document + 1]; ++t) {
        const std::vector<double> q = normalised("q", t, head / (HV / H)), k = normalised("k", t, head / (HV / H));
        const double beta =
            op.delta_rule == DeltaRule::kOn ? op.beta_scale / (1 + std::exp(-value("beta_logit", t * HV + head))) : 1.0;
        for (int64_t i = 0; i < K; ++i) {
          const double decay = std::exp(log_decay(t, head, i));
          for (int64_t j = 0; j < V; ++j) state[i * V + j] *= decay;
        }
        for (int64_t j = 0; j < V; ++j) {
          double error = value("v", (t * HV + head) * V + j);
          if (op.delta_rule == DeltaRule::kOn)
            for (int64_t i = 0; i < K; ++i) error -= state[i * V + j] * k[i];
          double read = 0;
          for (int64_t i = 0; i < K; ++i) {
            state[i * V + j] += beta * k[i] * error;
            read += state[i * V + j] * q[i];
          }
          out["output"][(t * HV + head) * V + j] = op.scale * read;
        }
      }
      out["final_state"].insert(out["final_state"].end(), state.begin(), state.end());
    }
  }
  return out;
}

DeltaRuleCase random_delta_rule_case(const DeltaRuleOptions& options, int64_t H, int64_t HV, int64_t K, int64_t V,
                                     std::vector<int64_t> offsets, uint64_t seed) {
  DeltaRuleCase c{.options = options, .H = H, .HV = HV, .K = K, .V = V, .offsets = std::move(offsets), .in = {}};
  std::vector<std::string> names = {"q", "k", "v", "initial_state", "grad_output", "grad_final_state"};
  if (options.delta_rule == DeltaRule::kOn) names.emplace_back("beta_logit");
  if (options.decay != Decay::kNone && options.gate != Gate::kFixed)
    names.insert(names.end(), {"gate_logit", "A_log", "dt_bias"});
  for (const std::string& name : names) {
    std::vector<double>& values = c.in[name];
    values.resize(static_cast<size_t>(c.shape_of(name).numel()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = random_normal(seed, hash_of(name), i);
      if (name == "A_log") values[i] = std::tanh(values[i]) * std::log(2.0);
    }
  }
  return c;
}

double logit_of_gate(double g) {
  return g < -30 ? -g : std::log(std::expm1(-g));
}

::testing::AssertionResult all_close(const NamedArrays& got, const NamedArrays& reference, double tolerance,
                                     double parameter_tolerance) {
  for (const auto& [name, expected] : reference) {
    const auto found = got.find(name);
    if (found == got.end()) return ::testing::AssertionFailure() << "no " << name;
    const bool parameter = name == "grad.A_log" || name == "grad.dt_bias";
    auto result = is_close(found->second, expected, parameter ? parameter_tolerance : tolerance);
    if (!result) return ::testing::AssertionFailure() << name << ": " << result.message();
  }
  return ::testing::AssertionSuccess();
}

std::vector<double> token_range(const std::vector<double>& array, int64_t num_tokens, int64_t begin, int64_t end) {
  const int64_t row = static_cast<int64_t>(array.size()) / num_tokens;
  return {array.begin() + begin * row, array.begin() + end * row};
}

}  // namespace palimpsest::support
