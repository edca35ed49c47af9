// Commands that look ahead: plan.
#include "launch/commands.h"
#include "launch/exit_code.h"
#include "launch/report.h"
#include "trainer/plan.h"

namespace palimpsest {

int run_command(const PlanArguments& arguments, Console& console) {
  PlanRequest request{.ranks = arguments.ranks, .ranks_per_host = arguments.ranks_per_host};
  if (!arguments.layout.empty())
    request.layout = {.data = arguments.layout[0], .sequence = arguments.layout[1], .tensor = arguments.layout[2]};
  if (arguments.memory_gib) request.max_bytes = static_cast<int64_t>(*arguments.memory_gib * (int64_t{1} << 30));
  check_report(arguments.json);
  const Plan plan = plan_layouts(load_resolved(arguments.config), request, console);
  console.info(to_text(plan, static_cast<size_t>(arguments.top)));
  write_report(arguments.json, to_json(plan));
  return kExitSuccess;
}

}  // namespace palimpsest
