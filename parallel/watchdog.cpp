#include "parallel/watchdog.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace palimpsest {

namespace {

void print_and_exit(const std::string& line) {
  std::fprintf(stderr, "error: %s\n", line.c_str());
  std::fflush(stderr);
  _exit(kStatusRankFailed);
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", seconds);
  return text;
}

}  // namespace

Watchdog::Watchdog(int64_t rank, double timeout_s, std::function<void(const std::string&)> expired)
    : rank_(rank),
      timeout_(timeout_s),
      expired_(expired ? std::move(expired) : print_and_exit),
      thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watchdog::set_step(int64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (depth_ == 0) {
      changed_.wait(lock);
      continue;
    }
    const Clock::time_point deadline = deadline_;
    changed_.wait_until(lock, deadline);
    if (stopping_ || depth_ == 0 || deadline_ != deadline || Clock::now() < deadline) continue;
    const std::string line = "rank " + std::to_string(rank_) + ": " + operation_ + " on axis " + axis_ + " at step " +
                             std::to_string(step_) +
                             " did not finish within parallel.timeout_s = " + seconds_text(timeout_.count()) +
                             " s: another rank has failed, or is slower than that";
    depth_ = 0;
    lock.unlock();
    expired_(line);
    lock.lock();
  }
}

Watchdog::Guard::Guard(Watchdog& watchdog, const char* operation, const std::string& axis) : watchdog_(watchdog) {
  {
    const std::lock_guard lock(watchdog.mutex_);
    if (watchdog.depth_++ > 0) return;
    watchdog.deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(watchdog.timeout_);
    watchdog.operation_ = operation;
    watchdog.axis_ = axis;
  }
  watchdog.changed_.notify_all();
}

Watchdog::Guard::~Guard() {
  const std::lock_guard lock(watchdog_.mutex_);
  if (watchdog_.depth_ > 0) watchdog_.depth_ -= 1;
}

}  // namespace palimpsest
