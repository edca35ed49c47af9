// Watchdog: ends the process when a collective does not finish in time, or fails, whatever it is stuck in. A job whose
// rank died, or whose network was cut, must not hang.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace palimpsest {

// Status of a process that ends because another rank failed, or a deadline passed; and because of a UserError.
inline constexpr int kStatusRankFailed = 3;
inline constexpr int kStatusUserError = 2;

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  // `expired` is called once, on the watchdog's thread, with one line that says which rank waited for what at which
  // step. The default prints the line and ends the process with status 3 at once: mpirun then ends the other ranks.
  Watchdog(int64_t rank, double timeout_s, std::function<void(const std::string&)> expired = {});
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // For the lines it prints.
  void set_step(int64_t step);

  // Watches from its construction to its end. `operation` ("all_reduce on axis data") must be a literal or outlive it.
  class Guard {
   public:
    Guard(Watchdog& watchdog, const char* operation, const std::string& axis);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Watchdog& watchdog_;
  };

  // Collectives that no call of this process waits in, such as a GPU's. The watchdog looks at them many times a second.
  class Source {
   public:
    virtual ~Source() = default;
    struct Oldest {
      const char* operation;    // a literal
      Clock::time_point since;  // it is the oldest that is not done
      std::string failure;      // why it never will be; empty while all is well
    };
    // Called on the watchdog's thread. None while nothing is under way.
    virtual std::optional<Oldest> oldest() = 0;
    virtual const std::string& axis_name() const = 0;
  };
  void add(Source& source);
  void remove(Source& source);  // it is not looked at any more when this returns

 private:
  void run();
  std::string line_of(const char* operation, const std::string& axis, const std::string& failure) const;
  std::string line_of_first_failure();

  const int64_t rank_;
  const std::chrono::duration<double> timeout_;
  std::function<void(const std::string&)> expired_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool stopping_ = false;
  int depth_ = 0;  // guards alive; the outermost one counts
  Clock::time_point deadline_;
  std::string operation_, axis_;
  std::vector<Source*> sources_;
  int64_t step_ = 0;

  std::thread thread_;  // last: starts when all else is there
};

}  // namespace palimpsest
