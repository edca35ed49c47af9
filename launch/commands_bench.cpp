// Commands that measure: bench train, bench kernels.
#include "launch/commands.h"
#include "launch/exit_code.h"
#include "launch/report.h"
#include "parallel/agreement.h"
#include "trainer/bench.h"

namespace palimpsest {

int run_command(const BenchTrainArguments& arguments, Ranks& ranks, Console& console) {
  const Config config = load_resolved(arguments.config, ranks);
  const Mesh& mesh = ranks.lay_out(config, console);
  agree(mesh.world(), [&] {
    if (ranks.is_first()) check_report(arguments.json);
  });
  const TrainBench bench = bench_train(config, mesh, arguments.steps, console);
  console.info(to_text(bench));
  agree(mesh.world(), [&] {
    if (ranks.is_first()) write_report(arguments.json, to_json(bench));
  });
  return kExitSuccess;
}

int run_command(const BenchKernelsArguments& arguments, Console& console) {
  check_report(arguments.json);
  const std::vector<KernelBench> benches = bench_kernels(
      load_resolved(arguments.config), {.seconds_an_op = arguments.seconds, .only = arguments.only}, console);
  console.info(to_text(benches));
  write_report(arguments.json, to_json(benches));
  return kExitSuccess;
}

}  // namespace palimpsest
