// palimpsest: reads the command line, runs one subcommand, and turns what is thrown into one line and an exit code.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <type_traits>
#include <variant>

#include "kernels/check.h"
#include "kernels/linear.h"
#include "launch/arguments.h"
#include "launch/commands.h"
#include "launch/exit_code.h"
#include "launch/ranks.h"
#include "launch/report.h"
#include "parallel/agreement.h"
#include "parallel/mpi_session.h"
#include "trainer/signals.h"
#include "trainer/trainer.h"

namespace palimpsest {

namespace {

template <class Command>
concept RunsOnAllRanks = requires(const Command& command, Ranks& ranks, Console& console) {
  run_command(command, ranks, console);
};

// Whether standard output belongs to what the command makes: the text of `generate`, or a report by --json -.
bool needs_standard_output(const Arguments& arguments) {
  return std::visit(
      []<class Command>(const Command& command) {
        if constexpr (requires { command.json; }) {
          return is_standard_output(command.json);
        } else {
          return std::is_same_v<Command, GenerateArguments>;
        }
      },
      arguments);
}

// What saves and stops where a signal asks it to; all else ends at once.
bool is_training(const Arguments& arguments) {
  const auto* train = std::get_if<TrainArguments>(&arguments);
  return train != nullptr && !train->dry_run && train->print_key.empty();
}

int run(int argc, char** argv, Ranks& ranks, StopSignals& signals) {
  Arguments arguments;
  agree(ranks.world(), [&] {
    arguments = parse_arguments(argc, argv);
    if (!std::holds_alternative<TextArguments>(arguments)) check_blas();
  });
  if (!is_training(arguments)) signals.let_through();
  ConsoleOptions options;
  // Launchers give ranks a terminal of their own, whatever their output goes to.
  if (ranks.size() > 1)
    options.style = ranks.is_first() ? ConsoleOptions::Style::kPlain : ConsoleOptions::Style::kSilent;
  Console console(needs_standard_output(arguments) ? stderr : stdout, options);
  // A run outlives who reads its log.
  if (std::holds_alternative<TrainArguments>(arguments)) std::signal(SIGPIPE, SIG_IGN);
  const int status = std::visit(
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
  // What a training run made is in its folder; of the other commands the text may be all that there is.
  if (!std::holds_alternative<TrainArguments>(arguments)) {
    agree(ranks.world(), [&] {
      if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw_user_error("standard output cannot be written");
    });
  }
  return status;
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
  if (ranks.size() > 1) fail_job(ranks.rank(), error);
  return report_of_all(ranks, error, status);
}

int status_of(RanksFailed::Kind kind) {
  switch (kind) {
    case RanksFailed::Kind::kUserError:
      return kExitUserError;
    case RanksFailed::Kind::kFaultOfAll:
      return kExitFault;
    case RanksFailed::Kind::kFaultOfSome:
      break;
  }
  return kExitRankFailed;
}

// A file that is opened must not take the place of a standard stream that is closed: log lines would go into it.
void keep_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDWR);
  if (fd > STDERR_FILENO) ::close(fd);
}

int run_and_report(int argc, char** argv) {
  StopSignals signals;  // before MPI starts, which takes a while
  Ranks ranks(&argc, &argv);
  try {
    return run(argc, argv, ranks, signals);
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
  palimpsest::keep_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file at the limit of its size is an error of the write, which names it
  return palimpsest::run_and_report(argc, argv);
}
