// Runs every reference case $PALIMPSEST_GOLDEN_DIR/ops/*.h5 (default: the copies in tests/golden) through every form
// of the delta rule that the build has: in f64 and f32 on the CPU, with PALIMPSEST_DEVICE=cuda in f32 and bf16. A line
// for each case and form names the worst tensor.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "tests/support/delta_rule_case.h"
#include "tests/support/h5_file.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using support::DeltaRuleCase;
using support::H5Array;
using support::H5File;
using support::NamedArrays;
using support::relative_error;

std::string golden_folder() {
  const char* folder = std::getenv("PALIMPSEST_GOLDEN_DIR");
  return folder != nullptr ? folder : PALIMPSEST_SOURCE_DIR "/tests/golden";
}

std::vector<std::string> golden_files() {
  std::vector<std::string> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(golden_folder() + "/ops", error))
    if (entry.path().extension() == ".h5") files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  return files;
}

// Largest norm of the difference over the norm of the reference.
double tolerance(DType dtype, const std::string& tensor, double beta_scale) {
  const bool parameter = tensor == "grad.A_log" || tensor == "grad.dt_bias";
  if (dtype == DType::kF64) return 1e-6;
  if (dtype == DType::kF32) return parameter ? 1e-4 : 2e-5;
  if (parameter) return 5e-2;
  if (tensor == "grad.beta_logit") return 3e-2;
  const bool doubled = beta_scale == 2 && (tensor.starts_with("grad.") || tensor == "final_state");
  return tensor == "grad.gate_logit" || doubled ? 2e-2 : 1e-2;
}

Device device_under_test() {
  const char* device = std::getenv("PALIMPSEST_DEVICE");
  return device != nullptr && std::string(device) == "cuda" ? Device::kCuda : Device::kCpu;
}

// ---- a case from its file ----

// A reference case: rows [B, T] as N = B*T tokens, each row cut into documents where doc_start says.
struct GoldenCase {
  DeltaRuleCase call;
  int64_t B = 0, T = 0;
  std::vector<int64_t> first_document, last_document;  // [B]
  std::vector<bool> keeps_initial_state;               // [B]: its first document starts from the row's state
  NamedArrays reference;                               // as run_delta_rule names them; states one a row
};

double required(const H5File& file, const std::string& path, const std::string& attribute) {
  const std::optional<double> value = file.number(attribute);
  CHECK(value.has_value(), path, ": attribute ", attribute, " is missing");
  return *value;
}

DeltaRuleOptions read_options(const H5File& file, const std::string& path) {
  DeltaRuleOptions options;
  const std::string decay = file.text("decay").value_or("(missing)"), gate = file.text("gate").value_or("none");
  CHECK(decay == "none" || decay == "scalar" || decay == "vector", path, ": attribute decay is ", decay);
  options.decay = decay == "none" ? Decay::kNone : decay == "scalar" ? Decay::kScalar : Decay::kVector;
  CHECK((gate == "none") == (decay == "none"), path, ": gate ", gate, " with decay ", decay);
  CHECK(gate == "none" || gate == "softplus" || gate == "bounded", path, ": attribute gate is ", gate);
  if (gate == "bounded") {
    options.gate = Gate::kBounded;
    options.gate_lower_bound = required(file, path, "gate_lower_bound");
  }
  options.delta_rule = required(file, path, "delta_rule") != 0 ? DeltaRule::kOn : DeltaRule::kOff;
  options.beta_scale = file.number("beta_scale").value_or(1.0);
  options.l2norm_qk = required(file, path, "l2norm_qk") != 0;
  options.l2norm_eps = file.number("l2norm_eps").value_or(1e-6);
  options.scale = required(file, path, "scale");
  return options;
}

// One state a row becomes one a document: `wanted[b]` is the document that takes row b's, the others get zeros.
std::vector<double> spread_states(const std::vector<double>& rows, const std::vector<int64_t>& documents_of_rows,
                                  const std::vector<bool>& taken, int64_t num_documents, int64_t state_size) {
  std::vector<double> states(static_cast<size_t>(num_documents * state_size), 0.0);
  for (size_t b = 0; b < documents_of_rows.size(); ++b)
    if (taken[b])
      std::copy_n(rows.begin() + static_cast<int64_t>(b) * state_size, state_size,
                  states.begin() + documents_of_rows[b] * state_size);
  return states;
}

std::vector<double> gather_states(const std::vector<double>& states, const std::vector<int64_t>& documents_of_rows,
                                  const std::vector<bool>& taken, int64_t state_size) {
  std::vector<double> rows(documents_of_rows.size() * static_cast<size_t>(state_size), 0.0);
  for (size_t b = 0; b < documents_of_rows.size(); ++b)
    if (taken[b])
      std::copy_n(states.begin() + documents_of_rows[b] * state_size, state_size,
                  rows.begin() + static_cast<int64_t>(b) * state_size);
  return rows;
}

void cut_into_documents(GoldenCase& golden, const std::vector<double>* doc_start) {
  std::vector<int64_t>& offsets = golden.call.offsets;
  for (int64_t b = 0; b < golden.B; ++b) {
    const auto starts = [&](int64_t t) { return doc_start != nullptr && (*doc_start)[b * golden.T + t] != 0; };
    golden.first_document.push_back(static_cast<int64_t>(offsets.size()));
    golden.keeps_initial_state.push_back(golden.T == 0 || !starts(0));
    for (int64_t t = 0; t < golden.T || t == 0; ++t)
      if (t == 0 || starts(t)) offsets.push_back(b * golden.T + t);
    golden.last_document.push_back(static_cast<int64_t>(offsets.size()) - 1);
  }
  offsets.push_back(golden.B * golden.T);
}

GoldenCase read_case(const std::string& path) {
  const H5File file(path);
  GoldenCase golden;
  DeltaRuleCase& call = golden.call;
  call.options = read_options(file, path);
  const bool decay = call.options.decay != Decay::kNone, vector = call.options.decay == Decay::kVector;
  const bool delta = call.options.delta_rule == DeltaRule::kOn;

  std::map<std::string, H5Array> in;
  for (const std::string& name : file.names_in("in")) in[name] = file.dataset("in/" + name);
  for (const char* name : {"q", "v"})
    CHECK(in.count(name) != 0 && in[name].shape.size() == 4, path, ": in/", name, " [B, T, heads, size] is missing");
  golden.B = in["q"].shape[0];
  golden.T = in["q"].shape[1];
  call.H = in["q"].shape[2];
  call.K = in["q"].shape[3];
  call.HV = in["v"].shape[2];
  call.V = in["v"].shape[3];
  const int64_t B = golden.B, T = golden.T, H = call.H, HV = call.HV, K = call.K, V = call.V;

  const auto gate = vector ? std::vector<int64_t>{B, T, HV, K} : std::vector<int64_t>{B, T, HV};
  const auto bias = vector ? std::vector<int64_t>{HV, K} : std::vector<int64_t>{HV};
  struct Expected {
    std::vector<int64_t> shape;
    bool needed, allowed;
  };
  const std::map<std::string, Expected> expected = {
      {"q", {{B, T, H, K}, true, true}},
      {"k", {{B, T, H, K}, true, true}},
      {"v", {{B, T, HV, V}, true, true}},
      {"beta_logit", {{B, T, HV}, delta, delta}},
      {"gate_logit", {gate, decay, decay}},
      {"A_log", {{HV}, decay, decay}},
      {"dt_bias", {bias, decay, decay}},
      {"initial_state", {{B, HV, K, V}, false, true}},
      {"doc_start", {{B, T}, false, true}},
      {"grad_output", {{B, T, HV, V}, true, true}},
      {"grad_final_state", {{B, HV, K, V}, false, true}},
  };
  for (const auto& [name, tensor] : expected) {
    CHECK(!tensor.needed || in.count(name) != 0, path, ": in/", name, " is missing");
    if (in.count(name) == 0) continue;
    CHECK(tensor.allowed, path, ": in/", name, " does not belong to decay and delta_rule of this file");
    CHECK(in[name].shape == tensor.shape, path, ": in/", name, " has ", in[name].shape.size(),
          " dimensions or extents that differ from q and v");
  }
  for (const auto& [name, array] : in) CHECK(expected.count(name) != 0, path, ": unknown in/", name);

  cut_into_documents(golden, in.count("doc_start") != 0 ? &in["doc_start"].values : nullptr);
  const int64_t num_documents = call.num_documents(), state_size = HV * K * V;
  const std::vector<bool> every_row(static_cast<size_t>(B), true);
  for (const auto& [name, array] : in) {
    if (name == "doc_start") continue;
    if (name == "initial_state") {
      call.in[name] =
          spread_states(array.values, golden.first_document, golden.keeps_initial_state, num_documents, state_size);
    } else if (name == "grad_final_state") {
      call.in[name] = spread_states(array.values, golden.last_document, every_row, num_documents, state_size);
    } else {
      call.in[name] = array.values;
    }
  }

  for (const std::string& name : file.names_in("out")) golden.reference[name] = file.dataset("out/" + name).values;
  for (const std::string& name : file.names_in("grad"))
    golden.reference["grad." + name] = file.dataset("grad/" + name).values;
  CHECK(golden.reference.count("output") != 0, path, ": out/output is missing");
  for (const auto& [name, array] : in) {
    const bool differentiable = name != "doc_start" && name.rfind("grad_", 0) != 0;
    CHECK(!differentiable || golden.reference.count("grad." + name) != 0, path, ": grad/", name, " is missing");
  }
  return golden;
}

// ---- forms ----

struct Form {
  DeltaForm form;
  int64_t chunk_size;
  SaveLevel save_level;
  std::string name() const {
    return form == DeltaForm::kRecurrence
               ? "recurrence"
               : fmt::format("chunkwise C={} save={}", chunk_size, static_cast<int>(save_level));
  }
};

std::vector<Form> all_forms() {
  std::vector<Form> forms = {{DeltaForm::kRecurrence, 64, SaveLevel::kNothing}};
  for (const int64_t chunk_size : {16, 32, 64})
    for (const SaveLevel level : {SaveLevel::kNothing, SaveLevel::kMatrices, SaveLevel::kAll})
      forms.push_back({DeltaForm::kChunkwise, chunk_size, level});
  return forms;
}

// What all cases together came to.
struct Tally {
  std::set<std::string> files;
  int comparisons = 0, skipped = 0, failed = 0;
  std::map<DType, std::pair<double, std::string>> worst;  // error over limit, and where
};

void compare(const std::string& label, const GoldenCase& golden, DType dtype, NamedArrays results, Tally& tally) {
  const int64_t state_size = golden.call.HV * golden.call.K * golden.call.V;
  results["final_state"] =
      gather_states(results.at("final_state"), golden.last_document, std::vector<bool>(golden.B, true), state_size);
  if (results.count("grad.initial_state") != 0)
    results["grad.initial_state"] =
        gather_states(results["grad.initial_state"], golden.first_document, golden.keeps_initial_state, state_size);
  double worst = -1;
  std::string worst_name;
  bool failed = false;
  for (const auto& [name, reference] : golden.reference) {
    ASSERT_EQ(results.count(name), 1U) << label << ": the op gives no " << name;
    const double limit = tolerance(dtype, name, golden.call.options.beta_scale),
                 error = relative_error(results[name], reference);
    EXPECT_LE(error, limit) << label << ": " << name;
    const double share = std::isfinite(error) ? error / limit : HUGE_VAL;
    failed |= !(share <= 1);
    if (share > worst) {
      worst = share;
      worst_name = fmt::format("{} {:.2e}, limit {:.0e}", name, error, limit);
    }
  }
  fmt::print("{:<62} {} {}\n", label, failed ? "FAILED" : "ok    ", worst_name);
  tally.comparisons += 1;
  tally.failed += failed ? 1 : 0;
  auto& overall = tally.worst[dtype];
  if (worst >= overall.first) overall = {worst, label + ": " + worst_name};
}

class GoldenOps : public ::testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  static void TearDownTestSuite() {
    fmt::print("golden ops: {} files, {} comparisons of a case with a form, {} failed, {} skipped\n",
               tally_.files.size(), tally_.comparisons, tally_.failed, tally_.skipped);
    for (const auto& [dtype, worst] : tally_.worst)
      fmt::print("golden ops: {}: worst error is {:.2e} of its limit ({})\n", name_of(dtype), worst.first,
                 worst.second);
  }
  inline static Tally tally_;
};

TEST_P(GoldenOps, EveryFormReproducesTheReference) {
  const auto& [path, dtype] = GetParam();
  const Device device = device_under_test();
  if (device == Device::kCuda && !support::has_gpu()) GTEST_SKIP() << "there is no GPU that this build can use";
  const GoldenCase golden = read_case(path);
  tally_.files.insert(path);
  for (const Form& form : all_forms()) {
    const std::string label =
        fmt::format("{} {} {}", std::filesystem::path(path).stem().string(), name_of(dtype), form.name());
    GoldenCase variant = golden;
    variant.call.options.form = form.form;
    variant.call.options.chunk_size = form.chunk_size;
    variant.call.options.save_level = form.save_level;
    NamedArrays results;
    try {
      results = run_delta_rule(variant.call, dtype,
                               dtype == DType::kF32 ? support::RowSpacing::kGaps : support::RowSpacing::kNone, device);
    } catch (const UserError& unsupported) {
      fmt::print("{:<62} SKIPPED: {}\n", label, unsupported.what());
      tally_.skipped += 1;
      continue;
    }
    compare(label, variant, dtype, std::move(results), tally_);
  }
}

TEST(GoldenOpsFolder, HoldsCases) {
  EXPECT_FALSE(golden_files().empty()) << "no *.h5 in " << golden_folder() << "/ops";
}

INSTANTIATE_TEST_SUITE_P(Files, GoldenOps,
                         ::testing::Combine(::testing::ValuesIn(golden_files()),
                                            ::testing::Values(device_under_test() == Device::kCuda ? DType::kBF16
                                                                                                   : DType::kF64,
                                                              DType::kF32)),
                         [](const auto& info) {
                           std::string name = std::filesystem::path(std::get<0>(info.param)).stem().string();
                           std::replace_if(
                               name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                           return name + "_" + name_of(std::get<1>(info.param));
                         });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenOps);

}  // namespace
}  // namespace palimpsest
