// Signals that ask a run to save and stop at the end of its step: SIGTERM, SIGINT and SIGUSR1. The program catches them
// from its first line on, so that none ends it in the middle of its start.
#pragma once

#include <array>
#include <csignal>
#include <string>

namespace palimpsest {

std::string name_of_stop_signal(int signal);  // "USR1"

// Catches the signals for its lifetime, and gives back the old handlers; but USR1 is ignored from then on if one of
// them came, since a launcher may ask more than once, and must not kill a process that is about to end as asked. One
// made while another lives only tells what that one catches. A second SIGINT is not caught: it ends the process at
// once.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The signal that came first since the catching began, 0 when none did.
  int received() const;
  // Ends the catching: the old handlers are back, and what came acts as it would have.
  void let_through();

 private:
  void give_back_handlers();

  static constexpr std::array<int, 3> kSignals = {SIGTERM, SIGINT, SIGUSR1};
  std::array<struct sigaction, kSignals.size()> old_actions_ = {};
  bool catches_ = false;
};

}  // namespace palimpsest
