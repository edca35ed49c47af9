#include "tests/support/delta_rule_case.h"

#include <cstring>

#include "tests/support/tensors.h"

namespace palimpsest::support {

namespace {

void fill_with_nan(Arena& arena) {
  const Arena::Scope scope(arena);
  const Tensor all = arena.allocate(DType::kU8, {arena.capacity()});
  if (arena.capacity() > 0) std::memset(all.raw(), 0xff, static_cast<size_t>(arena.capacity()));
}

template <class T>
class Run {
 public:
  Run(const DeltaRuleCase& c, int64_t gap) : case_(c), gap_(gap) {}

  NamedArrays run() {
    const Documents documents(case_.offsets);
    const DeltaRuleInputs in = {.q = input("q"),
                                .k = input("k"),
                                .v = input("v"),
                                .beta_logit = input("beta_logit"),
                                .gate_logit = input("gate_logit"),
                                .A_log = input("A_log"),
                                .dt_bias = input("dt_bias"),
                                .initial_state = input("initial_state")};
    const Tensor d_o = input("grad_output"), d_final_state = input("grad_final_state");
    const DeltaRuleOutputs out = {.o = output("output"), .final_state = output("final_state")};
    const DeltaRuleGrads grads = {.dq = gradient("q"),
                                  .dk = gradient("k"),
                                  .dv = gradient("v"),
                                  .dbeta_logit = gradient("beta_logit"),
                                  .dgate_logit = gradient("gate_logit"),
                                  .dA_log = gradient("A_log"),
                                  .ddt_bias = gradient("dt_bias"),
                                  .d_initial_state = gradient("initial_state")};
    if (grads.dA_log.defined()) {
      fill(grads.dA_log, 0);  // accumulated
      fill(grads.ddt_bias, 0);
    }

    const auto call = [&](Arena& scratch, Arena& activations) {
      const DeltaRuleSaved saved =
          allocate_delta_rule_saved(activations, DTypeOf<T>::value, delta_rule_shape(in, documents), case_.options);
      Stream stream(Device::kCpu, scratch);
      delta_rule_forward(stream, out, saved, in, case_.options, documents);
      delta_rule_backward(stream, grads, d_o, d_final_state, saved, in, case_.options, documents);
    };
    Arena planned_scratch = Arena::planning("scratch", Device::kCpu);
    Arena planned_activations = Arena::planning("activations", Device::kCpu);
    call(planned_scratch, planned_activations);
    Arena scratch("scratch", Device::kCpu, planned_scratch.peak());
    Arena activations("activations", Device::kCpu, planned_activations.peak());
    fill_with_nan(scratch);
    fill_with_nan(activations);
    call(scratch, activations);
    CHECK(scratch.used() == 0, "the op left ", scratch.used(), " bytes of workspace");

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
  Tensor input(const std::string& name) {
    const auto found = case_.in.find(name);
    if (found == case_.in.end()) return {};
    const Tensor tensor = output(name);
    set_values(tensor, found->second);
    inputs_[name] = values_of(tensor);
    return tensor;
  }
  Tensor gradient(const std::string& name) { return case_.in.count(name) == 0 ? Tensor() : output("grad." + name); }
  Tensor output(const std::string& name) {
    const Shape shape = case_.shape_of(name);
    const bool over_tokens = name.find("A_log") == std::string::npos && name.find("dt_bias") == std::string::npos &&
                             name.find("_state") == std::string::npos;  // only these may have spaced rows
    return tensors_.emplace(name, OwnedTensor(DTypeOf<T>::value, shape, over_tokens ? gap_ : 0)).first->second;
  }

  const DeltaRuleCase& case_;
  int64_t gap_;
  std::map<std::string, OwnedTensor> tensors_;
  NamedArrays inputs_;  // as stored
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

NamedArrays run_delta_rule(const DeltaRuleCase& c, DType dtype, RowSpacing spacing) {
  const int64_t gap = spacing == RowSpacing::kGaps ? 5 : 0;
  if (dtype == DType::kF64) return Run<double>(c, gap).run();
  CHECK(dtype == DType::kF32, "delta rule cases run in f32 or f64, not ", name_of(dtype));
  return Run<float>(c, gap).run();
}

}  // namespace palimpsest::support
