// palimpsest: reads the command line, runs one subcommand, and turns what is thrown into one line and an exit code.
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <variant>

#include "kernels/check.h"
#include "kernels/linear.h"
#include "launch/arguments.h"
#include "launch/commands.h"
#include "launch/exit_code.h"
#include "parallel/mpi_session.h"
#include "trainer/trainer.h"

namespace palimpsest {

namespace {

// Ranks for now: what mpirun starts beyond one has no work.
void require_one_rank(const std::optional<MpiSession>& mpi) {
  if (!mpi || mpi->world_size() == 1) return;
  throw_user_error("started as ", mpi->world_size(),
                   " ranks, but one is supported so far: start it without mpirun, or with mpirun -n 1");
}

int run(int argc, char** argv, std::optional<MpiSession>& mpi) {
  const Arguments arguments = parse_arguments(argc, argv);
  // Without a launcher there is one rank, which needs no MPI and none of the time it takes to start.
  if (started_by_launcher()) mpi.emplace(&argc, &argv);
  require_one_rank(mpi);
  if (!std::holds_alternative<TextArguments>(arguments)) check_blas();
  // The text that `generate` writes has standard output to itself.
  Console console(std::holds_alternative<GenerateArguments>(arguments) ? stderr : stdout);
  return std::visit([&](const auto& named) { return run_command(named, console); }, arguments);
}

// One line on standard error, whatever the message; from the first rank alone, since all ranks meet the same error.
void print_error(const std::optional<MpiSession>& mpi, std::string message) {
  if (mpi && mpi->world_rank() != 0) return;
  for (char& c : message)
    if (c == '\n' || c == '\r') c = ' ';
  std::fprintf(stderr, "error: %s\n", message.c_str());
}

int run_and_report(int argc, char** argv) {
  std::optional<MpiSession> mpi;
  try {
    return run(argc, argv, mpi);
  } catch (const UserError& error) {
    print_error(mpi, error.what());
    return kExitUserError;
  } catch (const NonFiniteStop& error) {
    print_error(mpi, error.what());
    return kExitNonFinite;
  } catch (const std::exception& error) {
    print_error(mpi, error.what());
    return kExitFault;
  }
}

}  // namespace

}  // namespace palimpsest

int main(int argc, char** argv) {
  return palimpsest::run_and_report(argc, argv);
}
