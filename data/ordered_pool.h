// A pool of threads that works on inputs in parallel and gives the outputs back in the order of the inputs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/check.h"

namespace palimpsest {

template <class Input, class Output>
class OrderedPool {
 public:
  // `work` is called from all threads at once.
  OrderedPool(int num_threads, std::function<Output(Input)> work) : work_(std::move(work)) {
    try {
      for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
    } catch (const std::system_error& error) {
      const size_t started = threads_.size();
      stop();
      throw_user_error("only ", started, " of ", num_threads, " threads could be started: ", error.code().message());
    }
  }
  // Drops the inputs that nobody has started on.
  ~OrderedPool() { stop(); }
  OrderedPool(const OrderedPool&) = delete;
  OrderedPool& operator=(const OrderedPool&) = delete;

  size_t num_pending() const { return jobs_.size(); }  // inputs whose outputs were not taken; for the caller's thread

  void push(Input input) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back({std::move(input), {}, {}, {}});
    }
    changed_.notify_all();
  }

  // The output of the oldest input. Throws what work threw on it.
  Output pop() {
    std::unique_lock lock(mutex_);
    CHECK(!jobs_.empty(), "nothing was pushed");
    Job& oldest = jobs_.front();
    changed_.wait(lock, [&] { return oldest.output || !oldest.user_error.empty() || !oldest.error.empty(); });
    if (!oldest.user_error.empty()) throw UserError(oldest.user_error);
    if (!oldest.error.empty()) throw Error(oldest.error);
    Output output = std::move(*oldest.output);
    jobs_.pop_front();
    --next_;
    return output;
  }

 private:
  struct Job {
    Input input;
    std::optional<Output> output;
    std::string user_error;  // errors travel as text
    std::string error;
  };

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stop_ || next_ < jobs_.size(); });
      if (stop_) return;
      Job& job = jobs_[next_++];  // stays where it is while others are added and taken at the ends
      Input input = std::move(job.input);
      lock.unlock();
      std::optional<Output> output;
      std::string user_error, error;
      try {
        output = work_(std::move(input));
      } catch (const UserError& failure) {
        user_error = failure.what();
      } catch (const std::exception& failure) {
        error = failure.what();
      }
      lock.lock();
      job.output = std::move(output);
      job.user_error = std::move(user_error);
      job.error = std::move(error);
      changed_.notify_all();
    }
  }

  std::function<Output(Input)> work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // in order; changed by the caller's thread alone, under the lock
  size_t next_ = 0;       // the first job that nobody has started on
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace palimpsest
