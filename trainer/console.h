// What a person sees while the program works: log lines, progress bars, the progress of training. On a terminal the
// newest progress is redrawn in place, in colour; elsewhere it becomes an occasional plain line.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "trainer/metrics.h"

namespace palimpsest {

struct ConsoleOptions {
  enum class Style : uint8_t { kAuto, kPlain, kTerminal, kSilent };
  Style style = Style::kAuto;     // auto: a terminal if the stream is one; silent: writes nothing
  std::function<double()> clock;  // seconds since some moment; empty: the steady clock
};

// One for the process. Every function may be called from any thread.
class Console {
 public:
  explicit Console(std::FILE* stream = stderr, ConsoleOptions options = {});
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // A line, or several when the text has line ends.
  void info(std::string_view text);
  void warning(std::string_view text);  // "warning: ..."
  void error(std::string_view text);    // "error: ..."

  bool is_terminal() const;
  double seconds() const;  // of the clock

  // The line that stays last on a terminal, below every log line; empty removes it. Nothing elsewhere.
  void set_status(std::string_view line);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Progress of work that may take more than two seconds; shorter work leaves no trace. For one thread at a time.
class ProgressBar {
 public:
  enum class Unit : uint8_t { kItems, kBytes };
  // total 0: not known. `what` is what is done ("tokenize"), `item` what is counted ("rows"; nothing for bytes).
  ProgressBar(Console& console, std::string what, int64_t total, std::string item, Unit unit = Unit::kItems);
  ~ProgressBar();  // the closing line, with the time taken, if anything was shown
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(int64_t done);  // since the begin; cheap enough for a call per item
  void add(int64_t more) { update(done_ + more); }

 private:
  std::string amounts() const;  // "12/40 rows", "3.1/9.6 MB"
  std::string rate(double seconds) const;

  Console& console_;
  std::string what_, item_;
  int64_t total_;
  Unit unit_;
  int64_t done_ = 0;
  int64_t printed_ = 0;  // what the last plain line said
  double begin_;
  double last_line_, last_status_;
  bool shown_ = false;
};

// The progress line of training: step, loss, learning rate, tokens/s, mfu, time left.
class TrainingProgress {
 public:
  // last_step: the step that the run continues from, 0 at its begin.
  TrainingProgress(Console& console, int64_t last_step, int64_t total_steps);
  ~TrainingProgress();
  TrainingProgress(const TrainingProgress&) = delete;
  TrainingProgress& operator=(const TrainingProgress&) = delete;

  void update(const StepMetrics& metrics);

 private:
  Console& console_;
  int64_t first_step_;
  int64_t total_steps_;
  int64_t printed_step_;
  double begin_;
  double last_line_, last_status_;
};

// "8 s", "1:23", "2:01:05".
std::string duration_text(double seconds);

}  // namespace palimpsest
