// The subcommands: each takes its arguments and returns the exit code. Log lines go to the console; errors are thrown.
// Those that take the ranks run on all of them, the others on one alone.
#pragma once

#include "launch/arguments.h"
#include "launch/ranks.h"
#include "trainer/config.h"
#include "trainer/console.h"

namespace palimpsest {

int run_command(const TextArguments& arguments, Console& console);
int run_command(const TrainArguments& arguments, Ranks& ranks, Console& console);
int run_command(const ExplainArguments& arguments, Console& console);
int run_command(const EvalArguments& arguments, Ranks& ranks, Console& console);
int run_command(const ScoreArguments& arguments, Ranks& ranks, Console& console);
int run_command(const GenerateArguments& arguments, Ranks& ranks, Console& console);
int run_command(const TokenizeArguments& arguments, Console& console);
int run_command(const InspectArguments& arguments, Console& console);
int run_command(const MergeArguments& arguments, Console& console);
int run_command(const ImportHfArguments& arguments, Console& console);
int run_command(const PlanArguments& arguments, Console& console);
int run_command(const ExportHfArguments& arguments, Console& console);
int run_command(const BenchTrainArguments& arguments, Ranks& ranks, Console& console);
int run_command(const BenchKernelsArguments& arguments, Console& console);

// The config with its overrides, checked and resolved for this machine.
Config load_resolved(const ConfigArguments& arguments);
// The same on every rank; throws on all of them unless config and build are equal everywhere.
Config load_resolved(const ConfigArguments& arguments, Ranks& ranks);

}  // namespace palimpsest
