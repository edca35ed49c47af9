#include "parallel/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace palimpsest {

namespace {

void print_and_exit(const std::string& line) {
  std::fprintf(stderr, "error: %s\n", line.c_str());
  std::fflush(stderr);
  _exit(kStatusRankFailed);
}

constexpr std::chrono::milliseconds kBetweenLooks{100};

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

void Watchdog::add(Source& source) {
  {
    const std::lock_guard lock(mutex_);
    sources_.push_back(&source);
  }
  changed_.notify_all();
}

void Watchdog::remove(Source& source) {
  const std::lock_guard lock(mutex_);
  std::erase(sources_, &source);
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (depth_ == 0 && sources_.empty()) {
      changed_.wait(lock);
      continue;
    }
    Clock::time_point wake = Clock::now() + kBetweenLooks;
    if (depth_ > 0) wake = sources_.empty() ? deadline_ : std::min(wake, deadline_);
    changed_.wait_until(lock, wake);
    if (stopping_) return;
    const std::string line = line_of_first_failure();
    if (line.empty()) continue;
    depth_ = 0;
    sources_.clear();
    lock.unlock();
    expired_(line);
    lock.lock();
  }
}

std::string Watchdog::line_of(const char* operation, const std::string& axis, const std::string& failure) const {
  const std::string what =
      "rank " + std::to_string(rank_) + ": " + operation + " on axis " + axis + " at step " + std::to_string(step_);
  if (!failure.empty()) return what + " failed: " + failure;
  return what + " did not finish within parallel.timeout_s = " + seconds_text(timeout_.count()) +
         " s: another rank has failed, or is slower than that";
}

std::string Watchdog::line_of_first_failure() {
  const Clock::time_point now = Clock::now();
  if (depth_ > 0 && now >= deadline_) return line_of(operation_.c_str(), axis_, {});
  for (Source* source : sources_) {
    const std::optional<Source::Oldest> oldest = source->oldest();
    if (oldest && (!oldest->failure.empty() || now - oldest->since >= timeout_))
      return line_of(oldest->operation, source->axis_name(), oldest->failure);
  }
  return {};
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
