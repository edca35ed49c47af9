// What a run on many ranks would need, before anybody asks for them: memory of a rank by region and the bytes it sends
// in a step, by axis. Both come from a rehearsal of one rank of the layout, so they hold to the byte; nothing is
// allocated or sent, and no data is needed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/mesh.h"
#include "trainer/config.h"
#include "trainer/console.h"
#include "trainer/memory_plan.h"

namespace palimpsest {

struct PlanRequest {
  int64_t ranks = 1;
  std::optional<MeshShape> layout;   // none: every layout of these ranks
  int64_t ranks_per_host = 8;        // neighbours in rank, with fast links between them
  std::optional<int64_t> max_bytes;  // of memory a rank; none: any
};

struct PlannedLayout {
  MeshShape mesh;
  int64_t zero = 1;
  RegionBytes regions;  // of the rank that needs most of each
  SentBytes sent;       // in one step, by the rank that sends most
  int64_t cost = 0;     // bytes between hosts + bytes within a host / kHostLinkSpeed
};

// How much faster links within a host are taken to be: 900 GB/s of NVLink beside 100 GB/s of network, both ways.
constexpr int64_t kHostLinkSpeed = 9;

struct Plan {
  PlanRequest request;
  std::vector<PlannedLayout> layouts;  // that fit, the lowest cost first, then the least memory
  int64_t too_large = 0;               // layouts that need more than max_bytes
  int64_t least_bytes = 0;             // the least memory that any layout needs
  std::vector<std::string> refused;    // layouts that cannot run, each with the reason, each reason once
};

// `config` is resolved; its `parallel` is not looked at. Throws a UserError when no layout can run.
Plan plan_layouts(const Config& config, const PlanRequest& request, Console& console);
// The best `most` layouts as a table.
std::string to_text(const Plan& plan, size_t most);
std::string to_json(const Plan& plan);

}  // namespace palimpsest
