// palimpsest: reads the command line, runs one subcommand, and turns what is thrown into one line and an exit code.
#include <cstdio>
#include <exception>
#include <string>
#include <variant>

#include "kernels/check.h"
#include "kernels/linear.h"
#include "launch/arguments.h"
#include "launch/commands.h"
#include "launch/exit_code.h"
#include "launch/ranks.h"
#include "parallel/agreement.h"
#include "parallel/mpi_session.h"
#include "trainer/trainer.h"

namespace palimpsest {

namespace {

template <class Command>
concept RunsOnAllRanks = requires(const Command& command, Ranks& ranks, Console& console) {
  run_command(command, ranks, console);
};

int run(int argc, char** argv, Ranks& ranks) {
  Arguments arguments;
  agree(ranks.world(), [&] {
    arguments = parse_arguments(argc, argv);
    if (!std::holds_alternative<TextArguments>(arguments)) check_blas();
  });
  ConsoleOptions options;
  // Launchers give ranks a terminal of their own, whatever their output goes to.
  if (ranks.size() > 1)
    options.style = ranks.is_first() ? ConsoleOptions::Style::kPlain : ConsoleOptions::Style::kSilent;
  // The text that `generate` writes has standard output to itself.
  Console console(std::holds_alternative<GenerateArguments>(arguments) ? stderr : stdout, options);
  return std::visit(
      [&]<class Command>(const Command& command) {
        if constexpr (RunsOnAllRanks<Command>) {
          return run_command(command, ranks, console);
        } else {
          agree(ranks.world(), [&] {
            if (ranks.size() > 1)
              throw_user_error("this command runs as one rank, not as ", ranks.size(), "; start it without mpirun");
          });
          return run_command(command, console);
        }
      },
      arguments);
}

std::string one_line(std::string message) {
  for (char& c : message)
    if (c == '\n' || c == '\r') c = ' ';
  return message;
}

// What all ranks know is printed by the first one, and every rank returns.
int report_of_all(const Ranks& ranks, const std::exception& error, int status) {
  if (ranks.is_first()) std::fprintf(stderr, "error: %s\n", one_line(error.what()).c_str());
  return status;
}

// What one rank alone knows ends the job.
int report(const Ranks& ranks, const std::exception& error, int status) {
  if (ranks.size() > 1) fail_job(ranks.rank(), one_line(error.what()));
  return report_of_all(ranks, error, status);
}

int status_of(RanksFailed::Kind kind) {
  switch (kind) {
    case RanksFailed::Kind::kUserErrorOfAll:
      return kExitUserError;
    case RanksFailed::Kind::kFaultOfAll:
      return kExitFault;
    case RanksFailed::Kind::kOfSome:
      break;
  }
  return kExitRankFailed;
}

int run_and_report(int argc, char** argv) {
  Ranks ranks(&argc, &argv);
  try {
    return run(argc, argv, ranks);
  } catch (const RanksFailed& error) {
    return report_of_all(ranks, error, status_of(error.kind()));
  } catch (const NonFiniteStop& error) {
    return report_of_all(ranks, error, kExitNonFinite);
  } catch (const UserError& error) {
    return report(ranks, error, kExitUserError);
  } catch (const std::exception& error) {
    return report(ranks, error, kExitFault);
  }
}

}  // namespace

}  // namespace palimpsest

int main(int argc, char** argv) {
  return palimpsest::run_and_report(argc, argv);
}
