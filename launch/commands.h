// The subcommands: each takes its arguments and returns the exit code. Log lines go to the console; errors are thrown.
#pragma once

#include "launch/arguments.h"
#include "trainer/config.h"
#include "trainer/console.h"

namespace palimpsest {

int run_command(const TextArguments& arguments, Console& console);
int run_command(const TrainArguments& arguments, Console& console);
int run_command(const ExplainArguments& arguments, Console& console);
int run_command(const EvalArguments& arguments, Console& console);
int run_command(const ScoreArguments& arguments, Console& console);
int run_command(const GenerateArguments& arguments, Console& console);
int run_command(const TokenizeArguments& arguments, Console& console);
int run_command(const InspectArguments& arguments, Console& console);
int run_command(const ImportHfArguments& arguments, Console& console);
int run_command(const BenchTrainArguments& arguments, Console& console);
int run_command(const BenchKernelsArguments& arguments, Console& console);

// The config with its overrides, checked and resolved for this machine.
Config load_resolved(const ConfigArguments& arguments);

}  // namespace palimpsest
