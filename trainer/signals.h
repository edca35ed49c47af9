// Signals that ask a run to save and stop at the end of its step: SIGTERM, SIGINT and SIGUSR1.
#pragma once

#include <array>
#include <csignal>
#include <string>

namespace palimpsest {

std::string name_of_stop_signal(int signal);  // "USR1"

// Catches the signals for its lifetime, and gives back the old handlers; but USR1 is ignored from then on if one of
// them came, since a launcher may ask more than once, and must not kill a process that is about to end as asked. One at
// a time in a process. A second SIGINT is not caught: it ends the process at once.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The signal that came first since the construction, 0 when none did.
  int received() const;

 private:
  static constexpr std::array<int, 3> kSignals = {SIGTERM, SIGINT, SIGUSR1};
  std::array<struct sigaction, kSignals.size()> old_actions_ = {};
};

}  // namespace palimpsest
