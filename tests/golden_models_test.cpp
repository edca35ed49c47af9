// Runs whole models of the public implementations, from $PALIMPSEST_GOLDEN_DIR/models (default: the copies in
// tests/golden), through the form that training uses: logits, loss of every token, every gradient and the whole AdamW
// trajectory, in f32 and f64, or with PALIMPSEST_DEVICE=cuda in f32 and bf16. Tolerances stand in each folder's
// reference.json. A folder whose configuration is not supported is reported as "SKIPPED folder: field = value".
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/file_ops.h"
#include "data/safetensors.h"
#include "kernels/adamw.h"
#include "kernels/device.h"
#include "kernels/elementwise.h"
#include "model/language_model.h"
#include "trainer/hf_folder.h"
#include "trainer/hf_weights.h"

namespace palimpsest {
namespace {

std::string models_directory() {
  const char* root = std::getenv("PALIMPSEST_GOLDEN_DIR");
  return std::string(root ? root : PALIMPSEST_SOURCE_DIR "/tests/golden") + "/models";
}

std::vector<std::string> model_folders() {
  std::vector<std::string> folders;
  for (const std::string& name : list_directory(models_directory()))
    if (is_directory(models_directory() + "/" + name)) folders.push_back(name);
  return folders;
}

// norm(a - b) / norm(b), in f64; the norm of b counts as `least` at least.
double relative_error(const std::vector<double>& a, const std::vector<float>& b, double least = 1e-30) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, reference = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    reference += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(reference), least);
}

std::vector<double> to_doubles(const Tensor& there) {
  HostCopy copy(there);
  const Tensor& tensor = copy.fetch().tensor();
  std::vector<double> values(static_cast<size_t>(tensor.numel()));
  for (size_t i = 0; i < values.size(); ++i) {
    if (tensor.dtype() == DType::kF64)
      values[i] = tensor.data<double>()[i];
    else
      values[i] = tensor.dtype() == DType::kF32 ? tensor.data<float>()[i] : to_float(tensor.data<BF16>()[i]);
  }
  return values;
}

Device device_under_test() {
  const char* device = std::getenv("PALIMPSEST_DEVICE");
  return device != nullptr && std::string(device) == "cuda" ? Device::kCuda : Device::kCpu;
}

// A model with all its memory, sized by a rehearsal.
class ModelRun {
 public:
  ModelRun(const HfModel& hf, Device device, const ActivationTypes& types, int64_t rows, int64_t row_length)
      : device_(device), hf_(hf), types_(types), rows_(rows), row_length_(row_length), model_(hf.config, registry_) {
    fill_host_inputs();
    Arena parameters = Arena::planning("parameters", device_), gradients = Arena::planning("gradients", device_),
          optimizer = Arena::planning("optimizer", device_), activations = Arena::planning("activations", device_),
          scratch = Arena::planning("scratch", device_);
    registry_.bind(parameters_dtype(), ParameterUse::kTraining, parameters, gradients, optimizer);
    allocate_inputs(activations);
    Stream stream(device_, scratch);
    Context context = context_on(stream, activations);
    model_.forward_backward(context, input(), {}, loss_sum_, z_sum_);
    model_.forward_logits(context, input(), logits_);
    model_.forward_loss(context, input(), token_loss_);
    parameters_.emplace("parameters", device_, parameters.peak());
    gradients_.emplace("gradients", device_, gradients.peak());
    optimizer_.emplace("optimizer", device_, optimizer.peak());
    activations_.emplace("activations", device_, activations.peak());
    scratch_.emplace("scratch", device_, scratch.peak());
    registry_.bind(parameters_dtype(), ParameterUse::kTraining, *parameters_, *gradients_, *optimizer_);
    allocate_inputs(*activations_);
    stream_.emplace(device_, *scratch_);
    fill_zero(*stream_, control_);
    registry_.zero_optimizer(*stream_);
  }

  // tokens [B, T+1]: inputs are columns 0..T-1, targets 1..T; each row is a document.
  void set_tokens(const int32_t* tokens) {
    for (int64_t b = 0; b < rows_; ++b) {
      for (int64_t t = 0; t < row_length_; ++t) {
        const int64_t at = b * row_length_ + t;
        tokens_[at] = tokens[b * (row_length_ + 1) + t];
        targets_[at] = tokens[b * (row_length_ + 1) + t + 1];
        positions_[at] = static_cast<int32_t>(t);
      }
    }
  }

  // Mean loss and the gradient norm before clipping of one pass; gradients are in the registry afterwards.
  struct StepResult {
    double loss, grad_norm;
  };
  StepResult forward_backward() {
    Context context = context_on(*stream_, *activations_);
    registry_.zero_gradients(*stream_);
    fill_zero(*stream_, loss_sum_);
    fill_zero(*stream_, z_sum_);
    const double num_targets = static_cast<double>(rows_ * row_length_);
    model_.forward_backward(context, input(), {.grad_scale = 1.0 / num_targets}, loss_sum_, z_sum_);
    fill_zero(*stream_, control_.rows(kNormSquared, 1));
    for (Parameter& parameter : registry_.parameters()) accumulate_norm_squared(*stream_, control_, parameter.grad);
    return {to_doubles(loss_sum_)[0] / num_targets, std::sqrt(to_doubles(control_)[kNormSquared])};
  }

  void optimizer_step(const nlohmann::json& reference) {
    prepare_step(*stream_, control_, reference.at("clip"));
    for (Parameter& parameter : registry_.parameters())
      adamw_step(*stream_, parameter.value, parameter.adam_m, parameter.adam_v, parameter.grad, control_,
                 {.lr = reference.at("lr"),
                  .beta1 = reference.at("betas").at(0),
                  .beta2 = reference.at("betas").at(1),
                  .eps = reference.at("eps"),
                  .weight_decay =
                      parameter.spec.decay == WeightDecay::kYes ? reference.at("weight_decay").get<double>() : 0.0});
  }

  std::vector<double> logits() {
    Context context = context_on(*stream_, *activations_);
    model_.forward_logits(context, input(), logits_);
    return to_doubles(logits_);
  }

  std::vector<double> token_loss() {
    Context context = context_on(*stream_, *activations_);
    model_.forward_loss(context, input(), token_loss_);
    return to_doubles(token_loss_);
  }

  ParameterRegistry& registry() { return registry_; }

 private:
  Context context_on(Stream& stream, Arena& activations) const {
    return {.stream = stream, .activations = activations, .dtype = types_.dtype, .residual = types_.residual};
  }
  DType parameters_dtype() const { return types_.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  void fill_host_inputs() {
    for (std::vector<int32_t>* values : {&tokens_, &targets_, &positions_})
      values->resize(static_cast<size_t>(rows_ * row_length_));
  }
  void allocate_inputs(Arena& arena) {
    const int64_t N = rows_ * row_length_;
    loss_sum_ = arena.allocate(DType::kF64, {1});
    z_sum_ = arena.allocate(DType::kF64, {1});
    control_ = arena.allocate(DType::kF64, {kStepControlSize});
    logits_ = arena.allocate(types_.dtype, {N, hf_.config.vocab_size});
    token_loss_ = arena.allocate(parameters_dtype(), {N});
  }

  ModelInput input() {
    const auto view = [](std::vector<int32_t>& values) {
      return Tensor(values.data(), DType::kI32, {static_cast<int64_t>(values.size())});
    };
    return {.tokens = view(tokens_),
            .targets = view(targets_),
            .sequence = {.documents = Documents::rows(rows_, row_length_), .positions = view(positions_)}};
  }

  const Device device_;
  HfModel hf_;
  ActivationTypes types_;
  int64_t rows_, row_length_;
  ParameterRegistry registry_;
  LanguageModel model_;
  std::optional<Arena> parameters_, gradients_, optimizer_, activations_, scratch_;
  std::optional<Stream> stream_;
  std::vector<int32_t> tokens_, targets_, positions_;  // [rows * row_length], in host memory
  Tensor loss_sum_, z_sum_, control_, logits_, token_loss_;
};

std::vector<float> read_all(const SafetensorsFile& file, const std::string& name) {
  const SafeTensor& tensor = file.tensors().at(name);
  std::vector<float> values(static_cast<size_t>(tensor.numel()));
  read_as_f32(tensor, 0, values, name);
  return values;
}

// The experts of a layer are two stacks there: gate_up_proj [E, 2F, D], each expert's gate above its up, and
// down_proj [E, D, F]. `at` is the place of ".experts." in the name.
HfPlace expert_gradient_place(const MoeConfig& moe, const ParameterSpec& spec, size_t at) {
  const std::string stack = spec.name.substr(0, at) + ".experts.";
  const int64_t expert = std::stoll(spec.name.substr(stack.size())), rows = spec.shape[0];
  if (spec.name.ends_with("down_proj.weight"))
    return {.names = {stack + "down_proj"},
            .shape = {moe.num_experts * rows, spec.shape[1]},
            .rows = {{expert * rows, rows}}};
  const int64_t up = spec.name.ends_with("up_proj.weight") ? rows : 0;
  return {.names = {stack + "gate_up_proj"},
          .shape = {moe.num_experts * 2 * rows, spec.shape[1]},
          .rows = {{expert * 2 * rows + up, rows}}};
}

// Where the reference's gradient of a parameter lies. Its names are the in-memory ones of the public library, which for
// Kimi differ from the file's: one stacked convolution, and a sub-module for the decay.
HfPlace gradient_place(const HfModel& hf, const ParameterSpec& spec) {
  HfPlace place = hf_place(hf, spec);
  if (const size_t at = spec.name.find(".experts."); at != std::string::npos)
    return expert_gradient_place(hf.config.moe, spec, at);
  if (hf.family != HfFamily::kKimiLinear) return place;
  if (const size_t at = place.names[0].find(".block_sparse_moe."); at != std::string::npos)
    place.names[0].replace(at, 18, ".mlp.");
  std::string& name = place.names[0];
  for (const char* leaf : {"A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"})
    if (name.ends_with(std::string("self_attn.") + leaf))
      name.insert(name.size() - std::string(leaf).size(), "forget_gate.");
  const int64_t qk = hf.config.kda.num_heads * hf.config.kda.head_dim;
  const std::pair<const char*, int64_t> convolutions[] = {
      {"q_conv1d.weight", 0}, {"k_conv1d.weight", qk}, {"v_conv1d.weight", 2 * qk}};
  for (const auto& [leaf, start] : convolutions) {
    if (!name.ends_with(leaf)) continue;
    name = name.substr(0, name.size() - std::string(leaf).size()) + "conv1d.weight";
    place.shape = {3 * qk, 1, spec.shape[2]};
    place.rows = {{start, spec.shape[0]}};
  }
  return place;
}

// Limits of bf16, whose trajectories are not compared; those of the other types stand in the folders.
struct Bf16Limits {
  static constexpr double logits = 2e-2, token_loss = 5e-3, gradient = 5e-2;
  // Rounding turns near ties of a router: some tokens go through other experts, and gradients are not compared.
  static constexpr double logits_of_experts = 0.3, token_loss_of_experts = 5e-2;
  // A model may magnify any rounding: in qwen3_next_dense some heads read almost nothing at some tokens, and the norm
  // behind them divides by that. What bf16 allows is then found by computing: in f32 on the CPU, with nothing rounded
  // but the weights of the products (and the embedding, where the stream is bf16). A trainer in bf16 rounds three times
  // more on the way to the next product, by as much each time: the product's input, its result, and what the op behind
  // it makes of that. Four independent errors of a size come to twice one of them; more where the stream is rounded
  // again behind every branch, and for the gradient of one tensor, which a few tokens may move. What exceeds that is an
  // inaccuracy of a kernel.
  static double of_rounded_weights(DType residual) { return residual == DType::kBF16 ? 2.5 : 2.0; }
  static constexpr double gradient_of_rounded_weights = 3.0;
};

// A folder of the public library: a model and what it gives.
struct Golden {
  explicit Golden(const std::string& folder)
      : source(folder),
        reference(nlohmann::json::parse(read_whole_file(folder + "/reference.json"))),
        values(folder + "/reference.safetensors"),
        tokens(read_as_i32(values.tensors().at("tokens"), "tokens")),
        steps(token_shape()[0]),
        rows(token_shape()[1]),
        row_length(token_shape()[2] - 1) {}
  const std::vector<int64_t>& token_shape() const { return values.tensors().at("tokens").shape; }

  const HfModel& model() const { return source.model; }
  const nlohmann::json& tolerance() const { return reference.at("tolerance"); }
  double gradient_limit(const std::string& name, double least) const {
    double limit = least;
    if (tolerance().contains("gradient_where_name_contains"))
      for (const auto& [part, looser] : tolerance().at("gradient_where_name_contains").items())
        if (name.find(part) != std::string::npos) limit = std::max(limit, looser.get<double>());
    return limit;
  }

  // The model with the folder's weights, and the first step's tokens.
  std::unique_ptr<ModelRun> start(Device device, const ActivationTypes& types) const {
    auto run = std::make_unique<ModelRun>(model(), device, types, rows, row_length);
    const HfWeights weights(source.tensors, model(), run->registry());
    for (const std::string& name : weights.unknown())  // the library writes a shared expert of size 0
      EXPECT_EQ(source.tensors.find(name)->numel(), 0) << name;
    for (const CheckpointBlock& block : wanted_blocks(run->registry(), CheckpointContent::kWeights))
      weights.read(block);
    run->set_tokens(tokens.data());
    return run;
  }

  HfFolder source;
  nlohmann::json reference;
  SafetensorsFile values;
  std::vector<int32_t> tokens;  // [steps, rows, row_length + 1]
  int64_t steps, rows, row_length;
};

struct Gradient {
  std::string name;  // in the reference
  double error, limit;
};

// Every gradient of the mean token loss; `least` is the limit of one for which the folder has no looser.
std::vector<Gradient> compare_gradients(ModelRun& run, const Golden& golden, double least) {
  // Of a gradient that is zero by its formula (a router of one expert, renormalized) both sides hold rounding noise.
  const double noise = 1e-8 * run.forward_backward().grad_norm;
  size_t gradients_left = 0;
  for (const auto& [name, tensor] : golden.values.tensors())
    gradients_left += name.starts_with("grad.") ? tensor.bytes.size() / 4 : 0;
  std::vector<Gradient> gradients;
  for (const Parameter& parameter : run.registry().parameters()) {
    if (parameter.spec.name.ends_with("e_score_correction_bias")) continue;  // has no gradient and is not trained
    const HfPlace place = gradient_place(golden.model(), parameter.spec);
    const std::string name = "grad." + place.names[0];
    if (golden.values.tensors().count(name) == 0) {
      ADD_FAILURE() << name << " is not in the reference";
      continue;
    }
    std::vector<float> expected(static_cast<size_t>(parameter.grad.numel()));
    read_hf_elements(golden.values.tensors().at(name), place, 0, expected, name);
    gradients_left -= expected.size();
    const double limit = golden.gradient_limit(name, least);
    gradients.push_back({name, relative_error(to_doubles(parameter.grad), expected, noise / limit), limit});
  }
  EXPECT_EQ(gradients_left, 0u) << "elements of reference gradients that no parameter has";
  return gradients;
}

// What rounding the weights to bf16 alone does to a model in f32: the root of the mean squared error over several
// roundings, each with as many bits on a grid of its own.
struct RoundedWeights {
  RoundedWeights(const Golden& golden, DType residual) {
    constexpr int kGrids = 8;
    const auto add = [](double& sum, double error) { sum += error * error / kGrids; };
    for (int grid = 0; grid < kGrids; ++grid) {
      const std::unique_ptr<ModelRun> run = golden.start(Device::kCpu, DType::kF32);
      for (const Parameter& parameter : run->registry().parameters()) {
        const bool is_embedding = parameter.spec.name == "model.embed_tokens.weight";
        if (parameter.spec.in_product == InProduct::kYes || (is_embedding && residual == DType::kBF16))
          round(parameter.value, std::exp2(static_cast<float>(grid) / kGrids));
      }
      add(logits, relative_error(run->logits(), read_all(golden.values, "logits")));
      add(token_loss, relative_error(run->token_loss(), read_all(golden.values, "token_loss")));
      const std::vector<Gradient> of_grid = compare_gradients(*run, golden, Bf16Limits::gradient);
      gradients.resize(of_grid.size());
      for (size_t i = 0; i < of_grid.size(); ++i) add(gradients[i], of_grid[i].error);
    }
    for (double* sum : {&logits, &token_loss}) *sum = std::sqrt(*sum);
    for (double& sum : gradients) sum = std::sqrt(sum);
  }
  // Numbers whose product with `scale`, between 1 and 2, bf16 holds.
  static void round(const Tensor& weight, float scale) {
    for (int64_t n = 0; n < weight.dim(0); ++n) {
      float* row = weight.data<float>() + n * weight.row_stride();
      for (int64_t i = 0; i < weight.numel() / weight.dim(0); ++i) row[i] = to_float(to_bf16(row[i] * scale)) / scale;
    }
  }
  double logits = 0, token_loss = 0;
  std::vector<double> gradients;  // in the order of compare_gradients
};

struct Case {
  std::string folder;
  ActivationTypes types;
  std::string type_name() const {
    const std::string name = name_of(types.dtype);
    return types.residual == types.dtype ? name : name + " beside " + name_of(types.residual);
  }
};

class GoldenModels : public testing::TestWithParam<Case> {
 protected:
  void check(const char* what, double error, double limit) {
    std::printf("%-20s %s %-52s %.2e (limit %.1e)\n", GetParam().folder.c_str(), GetParam().type_name().c_str(), what,
                error, limit);
    EXPECT_LE(error, limit) << what;
    EXPECT_FALSE(std::isnan(error)) << what;
  }
};

TEST_P(GoldenModels, MatchesThePublicImplementation) {
  const Device device = device_under_test();
  if (device == Device::kCuda && num_gpus() == 0) GTEST_SKIP() << "there is no GPU that this build can use";
  const ActivationTypes& types = GetParam().types;
  const bool rounds = types.dtype == DType::kBF16;
  const std::string folder = models_directory() + "/" + GetParam().folder;
  try {
    read_hf_config(read_whole_file(folder + "/config.json"), GetParam().folder);
  } catch (const UserError& error) {
    std::printf("SKIPPED %s\n", error.what());
    GTEST_SKIP() << error.what();
  }
  const Golden golden(folder);
  const nlohmann::json &reference = golden.reference, &tolerance = golden.tolerance();
  const SafetensorsFile& values = golden.values;
  const std::unique_ptr<ModelRun> owned_run = golden.start(device, types);
  ModelRun& run = *owned_run;
  const bool turns = rounds && golden.model().config.moe.num_experts > 0;
  std::optional<RoundedWeights> rounded;
  if (rounds && !turns) rounded.emplace(golden, types.residual);
  const auto limit = [&](const char* what, double of_experts, double of_bf16, double error_of_rounded) {
    if (!rounds) return tolerance.at(what).get<double>();
    return turns ? of_experts : std::max(of_bf16, Bf16Limits::of_rounded_weights(types.residual) * error_of_rounded);
  };
  check("logits", relative_error(run.logits(), read_all(values, "logits")),
        limit("logits", Bf16Limits::logits_of_experts, Bf16Limits::logits, rounded ? rounded->logits : 0));
  check("token_loss", relative_error(run.token_loss(), read_all(values, "token_loss")),
        limit("token_loss", Bf16Limits::token_loss_of_experts, Bf16Limits::token_loss,
              rounded ? rounded->token_loss : 0));
  if (turns) return;

  std::vector<Gradient> gradients =
      compare_gradients(run, golden, rounds ? Bf16Limits::gradient : tolerance.at("gradient").get<double>());
  double worst = 0;
  std::string worst_name;
  for (size_t i = 0; i < gradients.size(); ++i) {
    auto& [name, error, gradient_limit] = gradients[i];
    if (rounds && (name.ends_with("A_log") || name.ends_with("dt_bias"))) continue;
    if (rounded)
      gradient_limit = std::max(gradient_limit, Bf16Limits::gradient_of_rounded_weights * rounded->gradients.at(i));
    EXPECT_LE(error, gradient_limit) << name;
    EXPECT_FALSE(std::isnan(error)) << name;
    if (error / gradient_limit > worst) {
      worst = error / gradient_limit;
      worst_name = name;
    }
  }
  check(("worst gradient, over its limit: " + worst_name).c_str(), worst, 1.0);

  if (rounds) return;

  // The whole trajectory: loss and norm before each update.
  const std::vector<float> losses = read_all(values, "trajectory_loss");
  const std::vector<float> norms = read_all(values, "trajectory_grad_norm");
  double worst_loss = 0, worst_norm = 0;
  for (int64_t step = 0; step < golden.steps; ++step) {
    const auto i = static_cast<size_t>(step);
    run.set_tokens(golden.tokens.data() + step * golden.rows * (golden.row_length + 1));
    const auto [loss, norm] = run.forward_backward();
    run.optimizer_step(reference);
    worst_loss =
        std::max(worst_loss, std::abs(loss - losses[i]) / tolerance.at("trajectory_loss_absolute").at(i).get<double>());
    worst_norm = std::max(worst_norm, std::abs(norm - norms[i]) / norms[i] /
                                          tolerance.at("trajectory_grad_norm_relative").at(i).get<double>());
  }
  check("trajectory loss, over its limit", worst_loss, 1.0);
  check("trajectory gradient norm, over its limit", worst_norm, 1.0);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const bool cuda = device_under_test() == Device::kCuda;
  for (const std::string& folder : model_folders())
    for (const ActivationTypes& types :
         cuda ? std::vector<ActivationTypes>{DType::kF32, DType::kBF16, {DType::kBF16, DType::kF32}}
              : std::vector<ActivationTypes>{DType::kF32, DType::kF64, {DType::kF32, DType::kF64}})
      cases.push_back({folder, types});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(AllFolders, GoldenModels, testing::ValuesIn(all_cases()), [](const auto& info) {
  std::string name = info.param.folder + "_" + info.param.type_name();
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
  return name;
});

// Rounding reaches every model, and no limit that follows from it is of another size than the stated one.
TEST(GoldenModelsFolder, RoundedWeightsWidenNoLimitFourfold) {
  for (const std::string& name : model_folders()) {
    const std::string folder = models_directory() + "/" + name;
    if (read_hf_config(read_whole_file(folder + "/config.json"), name).config.moe.num_experts > 0) continue;
    const Golden golden(folder);
    const RoundedWeights narrow_stream(golden, DType::kBF16), rounded(golden, DType::kF32);
    std::printf("%-20s rounded weights: logits %.2e, token loss %.2e; with a rounded embedding %.2e, %.2e\n",
                name.c_str(), rounded.logits, rounded.token_loss, narrow_stream.logits, narrow_stream.token_loss);
    EXPECT_GT(rounded.logits, 1e-3) << name;
    EXPECT_GE(narrow_stream.logits, rounded.logits) << name;  // equal where the embedding is the head too
    const double factor = Bf16Limits::of_rounded_weights(DType::kBF16);
    EXPECT_LT(factor * narrow_stream.logits, 4 * Bf16Limits::logits) << name;
    EXPECT_LT(factor * narrow_stream.token_loss, 4 * Bf16Limits::token_loss) << name;
  }
}

TEST(GoldenModelsFolder, HoldsModels) {
  EXPECT_FALSE(model_folders().empty()) << models_directory();
}

}  // namespace
}  // namespace palimpsest
