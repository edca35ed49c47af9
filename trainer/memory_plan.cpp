#include "trainer/memory_plan.h"

#include <fmt/format.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "kernels/check.h"
#include "kernels/device.h"
#include "model/local_input.h"
#include "trainer/replica.h"

namespace palimpsest {

namespace {

// Tensors of this rank's part of a batch that nobody will read.
ModelInput rehearsal_input(Arena& arena, const Mesh& mesh, int64_t num_rows, int64_t row_length,
                           int64_t document_length) {
  const SequenceCut cut = cut_rows(mesh, num_rows, row_length);
  const int64_t rank = mesh.sequence().rank(), N = cut.num_tokens(rank);
  ModelInput input = {
      .tokens = arena.allocate(DType::kI32, {N}),
      .targets = arena.allocate(DType::kI32, {N}),
      .sequence = {.documents = Documents::rows(num_rows * row_length / document_length, document_length),
                   .positions = arena.allocate(DType::kI32, {N})}};
  if (cut.num_ranks() > 1) {
    auto [documents, crossings] = cut.part_of(rank, input.sequence.documents);
    input.sequence.documents = std::move(documents);
    input.sequence.crossings = std::move(crossings);
  }
  return input;
}

// A model's registry bound to planning arenas, and what it takes to run the model on them.
class Rehearsal {
 public:
  Rehearsal(ParameterRegistry& registry, ParameterUse use, Device device, const ActivationTypes& types,
            const Mesh& mesh)
      : regions_(Regions::planning(device)),
        stream_(device, regions_.scratch),
        values_(registry),
        context_{.stream = stream_,
                 .activations = regions_.activations,
                 .dtype = types.dtype,
                 .mesh = mesh,
                 .hooks = &values_,
                 .residual = types.residual} {
    registry.bind(parameter_dtype(types.dtype), use, regions_.parameters, regions_.gradients, regions_.optimizer);
  }
  Rehearsal(const Rehearsal&) = delete;
  Rehearsal& operator=(const Rehearsal&) = delete;

  Regions& regions() { return regions_; }
  const Context& context() const { return context_; }

 private:
  Regions regions_;
  Stream stream_;
  WholeValues values_;
  Context context_;
};

void rehearse_evaluation_batch(const LanguageModel& model, Context context, Arena& inputs, const BatchLimits& limits,
                               int64_t document_length) {
  if (limits.eval_rows == 0) return;
  Arena::Scope scope(context.activations);
  const Mesh& mesh = context.mesh;
  const DType dtype = parameter_dtype(context.dtype);
  const ModelInput input = rehearsal_input(inputs, mesh, limits.eval_rows, limits.row_length, document_length);
  const Tensor token_loss = context.activations.allocate(dtype, {limits.eval_rows * limits.row_length});
  context.activations.allocate(dtype, {mesh.data().size() * token_loss.numel()});  // of all data ranks
  if (mesh.sequence().size() == 1) {
    model.forward_loss(context, input, token_loss);
    return;
  }
  const Tensor own = context.activations.allocate(dtype, {input.tokens.dim(0)});
  model.forward_loss(context, input, own);
  gather_token_values(context, token_loss, own, cut_rows(mesh, limits.eval_rows, limits.row_length));
}

// The number behind "VmHWM:" and its like, in bytes.
int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (!line.starts_with(field)) continue;
    int64_t kib = 0;
    std::istringstream(line.substr(field.size())) >> kib;
    return kib * 1024;
  }
  return 0;
}

}  // namespace

Regions::Regions(Device device)
    : parameters(Arena::planning("parameters", device)),
      gradients(Arena::planning("gradients", device)),
      optimizer(Arena::planning("optimizer", device)),
      activations(Arena::planning("activations", device)),
      scratch(Arena::planning("scratch", device)) {}

Regions::Regions(Device device, const RegionBytes& bytes)
    : parameters("parameters", device, bytes.parameters),
      gradients("gradients", device, bytes.gradients),
      optimizer("optimizer", device, bytes.optimizer),
      activations("activations", device, bytes.activations),
      scratch("scratch", device, bytes.scratch) {}

Regions Regions::planning(Device device) {
  return Regions(device);
}

RegionBytes Regions::peaks() const {
  return {.parameters = parameters.peak(),
          .gradients = gradients.peak(),
          .optimizer = optimizer.peak(),
          .activations = activations.peak(),
          .scratch = scratch.peak()};
}

RegionBytes rehearse_training(const LanguageModel& model, ParameterRegistry& registry, Device device,
                              const ActivationTypes& types, const BatchLimits& limits, const TrainStepOptions& options,
                              const Mesh& mesh) {
  Rehearsal rehearsal(registry, ParameterUse::kTraining, device, types, mesh);
  TrainStep step(model, registry, rehearsal.context(), rehearsal.regions().optimizer, options);
  for (const int64_t document_length : {limits.row_length, int64_t{1}}) {
    Arena inputs = Arena::planning("inputs", Device::kCpu);
    step.begin(1);
    step.accumulate(rehearsal_input(inputs, mesh, limits.train_rows, limits.row_length, document_length),
                    MicroBatch::kLast);
    step.finish(0.0);
    rehearse_evaluation_batch(model, rehearsal.context(), inputs, limits, document_length);
  }
  return rehearsal.regions().peaks();
}

RegionBytes rehearse_evaluation(const LanguageModel& model, ParameterRegistry& registry, Device device,
                                const ActivationTypes& types, const BatchLimits& limits, const Mesh& mesh) {
  Rehearsal rehearsal(registry, ParameterUse::kInference, device, types, mesh);
  for (const int64_t document_length : {limits.row_length, int64_t{1}}) {
    Arena inputs = Arena::planning("inputs", Device::kCpu);
    rehearse_evaluation_batch(model, rehearsal.context(), inputs, limits, document_length);
  }
  return rehearsal.regions().peaks();
}

SentBytes rehearse_step_bytes(const LanguageModel& model, ParameterRegistry& registry, Device device,
                              const ActivationTypes& types, const StepRows& rows, const TrainStepOptions& options,
                              const Mesh& mesh) {
  Rehearsal rehearsal(registry, ParameterUse::kTraining, device, types, mesh);
  TrainStep step(model, registry, rehearsal.context(), rehearsal.regions().optimizer, options);
  SentBytes sum;
  const auto count = [&](int64_t times, auto&& body) {
    const SentBytes before = mesh.bytes_sent();
    body();
    sum += (mesh.bytes_sent() - before) * times;
  };
  const int64_t num_micro_batches = (rows.rows + rows.micro_batch - 1) / rows.micro_batch;
  const int64_t last_rows = rows.rows - (num_micro_batches - 1) * rows.micro_batch;
  const auto count_micro_batch = [&](int64_t times, int64_t num_rows, MicroBatch place) {
    if (times == 0) return;
    Arena inputs = Arena::planning("inputs", device);
    count(times,
          [&] { step.accumulate(rehearsal_input(inputs, mesh, num_rows, rows.row_length, rows.row_length), place); });
  };
  // The second step: what the first leaves behind counts for it. Micro-batches in the middle are alike.
  for (int i = 0; i < 2; ++i) {
    sum = {};
    count(1, [&] { step.begin(1); });
    if (num_micro_batches > 1) count_micro_batch(1, rows.micro_batch, MicroBatch::kInner);
    count_micro_batch(std::max<int64_t>(num_micro_batches - 2, 0), rows.micro_batch, MicroBatch::kInner);
    count_micro_batch(1, last_rows, MicroBatch::kLast);
    count(1, [&] { step.finish(0.0); });
  }
  return sum;
}

std::string to_text(const SentBytes& bytes) {
  std::string text;
  bytes.for_each_axis([&](const char* axis, int64_t count) { text += fmt::format("  {:<22} {:>16}\n", axis, count); });
  return text;
}

int64_t MemoryPlan::total() const {
  int64_t bytes = regions.total();
  for (const MemoryItem& item : others) bytes += item.bytes;
  return bytes;
}

void MemoryPlan::add_copies(const Mesh& mesh) {
  if (mesh.workspace_bytes() > 0) others.push_back({"copies between GPUs", mesh.workspace_bytes()});
}

std::string to_text(const MemoryPlan& plan) {
  std::vector<MemoryItem> items = {{"parameters", plan.regions.parameters},
                                   {"gradients", plan.regions.gradients},
                                   {"optimizer", plan.regions.optimizer},
                                   {"activations", plan.regions.activations},
                                   {"scratch", plan.regions.scratch}};
  items.insert(items.end(), plan.others.begin(), plan.others.end());
  items.push_back({"total", plan.total()});
  std::string text;
  for (const MemoryItem& item : items)
    text += fmt::format("  {:<22} {:>12}\n", item.name, fmt::format("{:.1f} MiB", in_mib(item.bytes)));
  return text;
}

double in_mib(int64_t bytes) {
  return static_cast<double>(bytes) / (1 << 20);
}

void check_machine_memory(const MemoryPlan& plan) {
  struct sysinfo info = {};
  CHECK(::sysinfo(&info) == 0, "sysinfo: ", std::strerror(errno));
  const double machine = (static_cast<double>(info.totalram) + static_cast<double>(info.totalswap)) * info.mem_unit;
  for (const MemoryItem& item : plan.others)
    if (static_cast<double>(item.bytes) > machine)
      throw_user_error("out of memory: '", item.name, "' needs ", item.bytes >> 20, " MiB, this machine has ",
                       static_cast<int64_t>(machine) >> 20,
                       "; a smaller train.sequences_per_step, data.sequence_length or model needs less");
}

int64_t peak_resident_bytes() {
  return status_bytes("VmHWM:");
}

int64_t memory_in_use(Device device) {
  if (device == Device::kCpu) return peak_resident_bytes();
  const GpuProperties gpu = gpu_properties();
  return gpu.memory_bytes - gpu.free_bytes;
}

int64_t current_resident_bytes() {
  return status_bytes("VmRSS:");
}

}  // namespace palimpsest
