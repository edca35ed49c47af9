#include "trainer/signals.h"

#include <atomic>
#include <cerrno>
#include <cstring>

#include "kernels/check.h"

namespace palimpsest {

namespace {

// A handler is given nothing but the number, so these two must be reached without an object.
std::atomic<int> first_signal = 0;
std::atomic<bool> is_catching = false;
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler must not wait");

void set_action(int signal, const struct sigaction& action, struct sigaction* old_action) {
  CHECK(sigaction(signal, &action, old_action) == 0, "signal ", signal, ": ", std::strerror(errno));
}

extern "C" void note_signal(int signal) {
  int none = 0;
  first_signal.compare_exchange_strong(none, signal);
  if (signal != SIGINT) return;
  const int saved_errno = errno;
  struct sigaction end_at_once = {};
  end_at_once.sa_handler = SIG_DFL;
  sigaction(SIGINT, &end_at_once, nullptr);  // cannot fail with these arguments, and nobody could be told
  errno = saved_errno;
}

}  // namespace

std::string name_of_stop_signal(int signal) {
  switch (signal) {
    case SIGTERM:
      return "TERM";
    case SIGINT:
      return "INT";
    case SIGUSR1:
      return "USR1";
    default:
      return std::to_string(signal);
  }
}

StopSignals::StopSignals() : catches_(!is_catching.exchange(true)) {
  if (!catches_) return;
  first_signal = 0;
  struct sigaction action = {};
  action.sa_handler = &note_signal;
  action.sa_flags = SA_RESTART;  // reads and writes that the signal interrupts go on
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) set_action(kSignals[i], action, &old_actions_[i]);
}

StopSignals::~StopSignals() {
  if (first_signal != 0) old_actions_.back().sa_handler = SIG_IGN;
  static_assert(kSignals.back() == SIGUSR1);
  give_back_handlers();
}

void StopSignals::give_back_handlers() {
  if (!catches_) return;
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &old_actions_[i], nullptr);
  catches_ = false;
  is_catching = false;
}

void StopSignals::let_through() {
  if (!catches_) return;
  give_back_handlers();
  if (const int signal = first_signal; signal != 0) std::raise(signal);
}

int StopSignals::received() const {
  return first_signal;
}

}  // namespace palimpsest
