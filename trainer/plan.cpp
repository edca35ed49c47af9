#include "trainer/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <tuple>

#include "parallel/planned_mesh.h"
#include "trainer/json_object.h"
#include "trainer/workbench.h"

namespace palimpsest {

namespace {

struct Candidate {
  MeshShape mesh;
  int64_t zero;
};

std::vector<Candidate> candidates(const PlanRequest& request) {
  std::vector<MeshShape> shapes;
  if (request.layout) {
    shapes.push_back(resolve_mesh(*request.layout, request.ranks));
  } else {
    for (int64_t tensor = 1; tensor <= request.ranks; ++tensor)
      for (int64_t sequence = 1; request.ranks % tensor == 0 && sequence <= request.ranks / tensor; ++sequence)
        if (request.ranks / tensor % sequence == 0)
          shapes.push_back({.data = request.ranks / tensor / sequence, .sequence = sequence, .tensor = tensor});
  }
  std::vector<Candidate> all;
  for (const MeshShape& mesh : shapes)
    for (int64_t zero = 1; zero <= (mesh.data * mesh.sequence > 1 ? 3 : 1); ++zero) all.push_back({mesh, zero});
  return all;
}

std::string name_of(const MeshShape& mesh) {
  return fmt::format("{} x {} x {}", mesh.data, mesh.sequence, mesh.tensor);
}

// The first few.
std::string names_of(const std::vector<MeshShape>& layouts) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < std::min(kMost, layouts.size()); ++i) text += (text.empty() ? "" : ", ") + name_of(layouts[i]);
  return layouts.size() > kMost ? fmt::format("{} and {} more", text, layouts.size() - kMost) : text;
}

// Takes the larger of each.
void take_most(PlannedLayout& planned, const RegionBytes& regions, const SentBytes& sent) {
  const auto take = [](int64_t& most, int64_t value) { most = std::max(most, value); };
  take(planned.regions.parameters, regions.parameters);
  take(planned.regions.gradients, regions.gradients);
  take(planned.regions.optimizer, regions.optimizer);
  take(planned.regions.activations, regions.activations);
  take(planned.regions.scratch, regions.scratch);
  take(planned.sent.world, sent.world);
  take(planned.sent.replica, sent.replica);
  take(planned.sent.data, sent.data);
  take(planned.sent.sequence, sent.sequence);
  take(planned.sent.tensor, sent.tensor);
}

// Throws a UserError where the layout cannot run.
void rehearse_rank(PlannedLayout& planned, const Config& config, int64_t rank) {
  const std::unique_ptr<Mesh> mesh = planned_mesh(planned.mesh, rank);
  Workbench bench(config, *mesh);
  const int64_t rows = config.train.sequences_per_step / planned.mesh.data;
  const BatchLimits limits = {.train_rows = std::min(config.train.micro_batch, rows),
                              .eval_rows = config.data.eval.empty() ? 0 : config.train.micro_batch,
                              .row_length = config.data.sequence_length};
  const TrainStepOptions options = train_step_options(config);
  const RegionBytes regions = bench.rehearse_training(limits, options);
  const SentBytes sent = bench.rehearse_step_bytes(
      {.rows = rows, .micro_batch = config.train.micro_batch, .row_length = config.data.sequence_length}, options);
  take_most(planned, regions, sent);
}

int64_t cost_of(const PlannedLayout& planned, int64_t ranks_per_host) {
  // Groups are runs of neighbours: tensor ranks first, then sequence, then data.
  int64_t span = 1, between = 0, within = 0;
  const auto add = [&](int64_t size, int64_t bytes) {
    span *= size;
    (ranks_per_host % span == 0 ? within : between) += bytes;
  };
  add(planned.mesh.tensor, planned.sent.tensor);
  add(planned.mesh.sequence, planned.sent.sequence);
  add(planned.mesh.data, planned.sent.data + planned.sent.replica + planned.sent.world);
  return between + within / kHostLinkSpeed;
}

PlannedLayout plan_layout(Config config, const Candidate& candidate, int64_t ranks_per_host) {
  MeshShape mesh = candidate.mesh;
  mesh.layout = config.parallel.sequence_layout;
  config.parallel.data = mesh.data;
  config.parallel.sequence = mesh.sequence;
  config.parallel.tensor = mesh.tensor;
  config.parallel.zero = candidate.zero;
  validate(config);
  if (config.train.sequences_per_step % mesh.data != 0)
    throw_user_error("data must divide train.sequences_per_step = ", config.train.sequences_per_step);
  PlannedLayout planned{.mesh = mesh, .zero = candidate.zero};
  // The first rank has the largest shards. One in the middle has neighbours on both sides, and the last sequence rank
  // sends most in a zig-zag.
  rehearse_rank(planned, config, 0);
  const int64_t middle = (mesh.data / 2 * mesh.sequence + mesh.sequence / 2) * mesh.tensor + mesh.tensor / 2;
  if (mesh.sequence > 2) rehearse_rank(planned, config, middle);
  if (mesh.sequence > 1) rehearse_rank(planned, config, (mesh.sequence - 1) * mesh.tensor);
  planned.cost = cost_of(planned, ranks_per_host);
  return planned;
}

double in_gib(int64_t bytes) {
  return static_cast<double>(bytes) / (int64_t{1} << 30);
}

// GiB say nothing of small models.
struct Unit {
  const char* name;
  double bytes;
};
Unit unit_of(const Plan& plan) {
  int64_t most = 0;
  for (const PlannedLayout& layout : plan.layouts) most = std::max(most, layout.regions.total());
  return most < int64_t{1} << 30 ? Unit{"MiB", 1 << 20} : Unit{"GiB", 1 << 30};
}

}  // namespace

Plan plan_layouts(const Config& config, const PlanRequest& request, Console& console) {
  Plan plan{.request = request};
  const std::vector<Candidate> all = candidates(request);
  const auto count = static_cast<int64_t>(all.size());
  ProgressBar progress(console, "plan", count, "layouts");
  struct Outcome {
    std::optional<PlannedLayout> planned;
    std::string refused;  // why not
  };
  std::vector<Outcome> outcomes(all.size());
  std::exception_ptr fault;
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < count; ++i) {
    try {
      outcomes[i].planned = plan_layout(config, all[i], request.ranks_per_host);
    } catch (const UserError& error) {
      outcomes[i].refused = error.what();
    } catch (...) {
#pragma omp critical(plan_fault)
      fault = std::current_exception();
    }
#pragma omp critical(plan_progress)
    progress.add(1);
  }
  if (fault) std::rethrow_exception(fault);
  std::map<std::string, std::vector<MeshShape>> refused;  // reason -> layouts
  for (size_t i = 0; i < all.size(); ++i) {
    if (!outcomes[i].planned) {
      std::vector<MeshShape>& layouts = refused[outcomes[i].refused];
      if (layouts.empty() || name_of(layouts.back()) != name_of(all[i].mesh)) layouts.push_back(all[i].mesh);
      continue;
    }
    const PlannedLayout& planned = *outcomes[i].planned;
    const int64_t bytes = planned.regions.total();
    plan.least_bytes = plan.least_bytes == 0 ? bytes : std::min(plan.least_bytes, bytes);
    if (request.max_bytes && bytes > *request.max_bytes) {
      ++plan.too_large;
    } else {
      plan.layouts.push_back(planned);
    }
  }
  for (const auto& [reason, layouts] : refused)
    plan.refused.push_back(fmt::format("{}: {}", names_of(layouts), reason));
  std::sort(plan.layouts.begin(), plan.layouts.end(), [](const PlannedLayout& a, const PlannedLayout& b) {
    const auto key = [](const PlannedLayout& layout) {
      return std::tuple(layout.cost, layout.regions.total(), layout.mesh.tensor, layout.mesh.sequence, layout.zero);
    };
    return key(a) < key(b);
  });
  if (plan.layouts.empty() && plan.too_large == 0)
    throw_user_error("no layout of ", request.ranks, " ranks can run: ", plan.refused.at(0));
  return plan;
}

std::string to_text(const Plan& plan, size_t most) {
  const Unit unit = unit_of(plan);
  const auto in_unit = [&](int64_t bytes) { return static_cast<double>(bytes) / unit.bytes; };
  std::string text = fmt::format(
      "{} ranks, {} on a host. Memory of a rank and what it sends in a step, in {}; layouts are data x sequence x "
      "tensor.\n"
      "Best first: the fewest bytes between hosts, a byte within a host counting as 1/{} of one; then the least "
      "memory.\n",
      plan.request.ranks, plan.request.ranks_per_host, unit.name, kHostLinkSpeed);
  text += fmt::format("{:<16} {:>4} {:>10} {:>9} {:>9} {:>11} {:>8} {:>9}   {:>9} {:>9} {:>9} {:>9}\n", "layout",
                      "zero", "parameters", "gradients", "optimizer", "activations", "scratch", "memory", "replica",
                      "sequence", "tensor", "cost");
  for (size_t i = 0; i < std::min(most, plan.layouts.size()); ++i) {
    const PlannedLayout& layout = plan.layouts[i];
    const RegionBytes& regions = layout.regions;
    text += fmt::format(
        "{:<16} {:>4} {:>10.2f} {:>9.2f} {:>9.2f} {:>11.2f} {:>8.2f} {:>9.2f}   {:>9.3f} {:>9.3f} {:>9.3f} {:>9.3f}\n",
        name_of(layout.mesh), layout.zero, in_unit(regions.parameters), in_unit(regions.gradients),
        in_unit(regions.optimizer), in_unit(regions.activations), in_unit(regions.scratch), in_unit(regions.total()),
        in_unit(layout.sent.replica + layout.sent.data + layout.sent.world), in_unit(layout.sent.sequence),
        in_unit(layout.sent.tensor), in_unit(layout.cost));
  }
  if (plan.layouts.size() > most) text += fmt::format("and {} more\n", plan.layouts.size() - most);
  if (plan.too_large > 0)
    text += fmt::format("{} layouts need more than {:.1f} GiB a rank; the least that any needs is {:.2f} GiB\n",
                        plan.too_large, in_gib(*plan.request.max_bytes), in_gib(plan.least_bytes));
  constexpr size_t kMostReasons = 8;
  for (size_t i = 0; i < std::min(kMostReasons, plan.refused.size()); ++i)
    text += "cannot run: " + plan.refused[i] + "\n";
  if (plan.refused.size() > kMostReasons)
    text += fmt::format("and {} reasons more\n", plan.refused.size() - kMostReasons);
  return text;
}

std::string to_json(const Plan& plan) {
  std::vector<JsonObject> layouts;
  for (const PlannedLayout& layout : plan.layouts) {
    const RegionBytes& regions = layout.regions;
    JsonObject memory, sent;
    memory.add("parameters", regions.parameters)
        .add("gradients", regions.gradients)
        .add("optimizer", regions.optimizer)
        .add("activations", regions.activations)
        .add("scratch", regions.scratch)
        .add("total", regions.total());
    sent.add("replica", layout.sent.replica)
        .add("data", layout.sent.data)
        .add("sequence", layout.sent.sequence)
        .add("tensor", layout.sent.tensor)
        .add("world", layout.sent.world);
    layouts.push_back(JsonObject()
                          .add("data", layout.mesh.data)
                          .add("sequence", layout.mesh.sequence)
                          .add("tensor", layout.mesh.tensor)
                          .add("zero", layout.zero)
                          .add("memory_bytes", memory)
                          .add("sent_bytes", sent)
                          .add("cost", layout.cost));
  }
  return JsonObject()
      .add("ranks", plan.request.ranks)
      .add("ranks_per_host", plan.request.ranks_per_host)
      .add("too_large", plan.too_large)
      .add("layouts", layouts)
      .text();
}

}  // namespace palimpsest
