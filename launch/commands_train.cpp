// Commands around training itself: train, with --dry-run, --print and --explain; and how all commands load their
// config.
#include <cstdio>

#include "kernels/device.h"
#include "launch/commands.h"
#include "launch/exit_code.h"
#include "launch/version.h"
#include "parallel/agreement.h"
#include "trainer/config_fields.h"
#include "trainer/run_setup.h"
#include "trainer/trainer.h"

namespace palimpsest {

namespace {

void print_field(const Config& config, const std::string& key) {
  for (const ConfigField& field : list_fields(config)) {
    if (field.key != key || field.is_section) continue;
    std::puts(field.value.c_str());
    return;
  }
  throw_user_error("--print ", key, ": no such field; palimpsest train --explain lists them");
}

}  // namespace

Config load_resolved(const ConfigArguments& arguments) {
  return resolve(load_config(arguments.path, arguments.overrides), num_gpus() > 0);
}

Config load_resolved(const ConfigArguments& arguments, Ranks& ranks) {
  Config config;
  agree(ranks.world(), [&] { config = load_resolved(arguments); });
  std::vector<RankItem> items = {{"the build", git_hash()}};
  for (const ConfigField& field : list_fields(config))
    if (!field.is_section) items.push_back({field.key, field.value});
  check_same_on_ranks(ranks.world(), items);
  return config;
}

int run_command(const TrainArguments& arguments, Ranks& ranks, Console& console) {
  const Config config = load_resolved(arguments.config, ranks);
  if (!arguments.print_key.empty()) {
    if (ranks.is_first()) print_field(config, arguments.print_key);
    return kExitSuccess;
  }
  agree(ranks.world(), [&] {
    try {
      validate_for_training(config);
    } catch (const UserError& error) {  // what is missing has no line, but a file
      throw_user_error(arguments.config.path, ": ", error.what());
    }
  });
  const Mesh& mesh = ranks.lay_out(config, console);
  if (arguments.dry_run) {
    dry_run(config, mesh, console);
  } else {
    train(config, mesh, git_hash(), console);
  }
  return kExitSuccess;
}

int run_command(const TextArguments& arguments, Console&) {
  std::fputs(arguments.text.c_str(), stdout);
  return kExitSuccess;
}

int run_command(const ExplainArguments&, Console&) {
  std::fputs(explain_config().c_str(), stdout);
  return kExitSuccess;
}

}  // namespace palimpsest
