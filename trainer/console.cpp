#include "trainer/console.h"

#include <fmt/format.h>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <utility>

namespace palimpsest {

namespace {

constexpr double kSecondsBeforeShown = 2.0;
constexpr double kSecondsBetweenLines = 10.0;   // plain lines
constexpr double kSecondsBetweenRedraws = 0.1;  // of a terminal's last line
constexpr int64_t kLinesPerRun = 20;            // steps make a plain line at least this often

// Writes log lines above the status line.
class StreamSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  StreamSink(std::FILE* stream, bool is_terminal) : stream_(stream), is_terminal_(is_terminal) { set_pattern_("%v"); }
  void set_status(std::string_view line) {
    if (!is_terminal_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    status_ = line;
    put(kEraseLine + status_);
    std::fflush(stream_);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    std::string text = label(message.level) + std::string(line.data(), line.size());
    if (is_terminal_ && !status_.empty()) text = kEraseLine + text + status_;
    put(text);
    std::fflush(stream_);
  }
  void flush_() override { std::fflush(stream_); }

 private:
  std::string label(spdlog::level::level_enum level) const {
    if (level == spdlog::level::warn) return is_terminal_ ? "\x1b[33mwarning:\x1b[0m " : "warning: ";
    if (level == spdlog::level::err) return is_terminal_ ? "\x1b[31merror:\x1b[0m " : "error: ";
    return "";
  }
  // A console that cannot be written to is no reason to end a run.
  void put(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stream_); }

  static inline const std::string kEraseLine = "\r\x1b[K";
  std::FILE* stream_;
  bool is_terminal_;
  std::string status_;
};

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// 1234567 as "1,234,567".
std::string grouped(int64_t value) {
  const std::string digits = fmt::format("{}", value);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && digits[i - 1] != '-' && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string rounded(double value) {
  return std::abs(value) < 1e18 ? grouped(std::llround(value)) : fmt::format("{:.0f}", value);
}

double megabytes(double bytes) {
  return bytes / 1e6;
}

std::string bar(double part) {
  constexpr size_t kWidth = 24;
  const auto filled = static_cast<size_t>(std::clamp(part, 0.0, 1.0) * static_cast<double>(kWidth));
  return "[" + std::string(filled, '#') + std::string(kWidth - filled, '.') + "]";
}

}  // namespace

// ---- Console ----

struct Console::State {
  State(std::FILE* stream, bool on_terminal, std::function<double()> given_clock)
      : sink(std::make_shared<StreamSink>(stream, on_terminal)),
        logger("palimpsest", sink),
        is_terminal(on_terminal),
        clock(std::move(given_clock)) {}

  void log(spdlog::level::level_enum level, std::string_view text) {
    logger.log(level, spdlog::string_view_t(text.data(), text.size()));  // as it is, not as a format
  }

  std::shared_ptr<StreamSink> sink;  // spdlog takes sinks in no other way
  spdlog::logger logger;
  bool is_terminal;
  std::function<double()> clock;
};

Console::Console(std::FILE* stream, ConsoleOptions options) {
  using Style = ConsoleOptions::Style;
  const bool is_terminal =
      options.style == Style::kTerminal || (options.style == Style::kAuto && isatty(fileno(stream)) == 1);
  if (!options.clock) options.clock = &steady_seconds;
  state_ = std::make_unique<State>(stream, is_terminal, std::move(options.clock));
  if (options.style == Style::kSilent) state_->logger.set_level(spdlog::level::off);
}

Console::~Console() {
  set_status("");
}

void Console::info(std::string_view text) {
  state_->log(spdlog::level::info, text);
}
void Console::warning(std::string_view text) {
  state_->log(spdlog::level::warn, text);
}
void Console::error(std::string_view text) {
  state_->log(spdlog::level::err, text);
}
bool Console::is_terminal() const {
  return state_->is_terminal;
}
double Console::seconds() const {
  return state_->clock();
}
void Console::set_status(std::string_view line) {
  state_->sink->set_status(line);
}

// ---- ProgressBar ----

ProgressBar::ProgressBar(Console& console, std::string what, int64_t total, std::string item, Unit unit)
    : console_(console),
      what_(std::move(what)),
      item_(std::move(item)),
      total_(total),
      unit_(unit),
      begin_(console.seconds()),
      last_line_(begin_),
      last_status_(begin_) {}

ProgressBar::~ProgressBar() {
  if (!shown_) return;
  const double seconds = console_.seconds() - begin_;
  console_.set_status("");
  console_.info(fmt::format("{}: {} in {}, {}", what_, amounts(), duration_text(seconds), rate(seconds)));
}

std::string ProgressBar::amounts() const {
  if (unit_ == Unit::kBytes) {
    if (total_ == 0) return fmt::format("{:.1f} MB", megabytes(static_cast<double>(done_)));
    return fmt::format("{:.1f}/{:.1f} MB", megabytes(static_cast<double>(done_)),
                       megabytes(static_cast<double>(total_)));
  }
  if (total_ == 0) return fmt::format("{} {}", grouped(done_), item_);
  return fmt::format("{}/{} {}", grouped(done_), grouped(total_), item_);
}

std::string ProgressBar::rate(double seconds) const {
  const double per_second = static_cast<double>(done_) / std::max(seconds, 1e-9);
  if (unit_ == Unit::kBytes) return fmt::format("{:.1f} MB/s", megabytes(per_second));
  if (per_second < 100) return fmt::format("{:.1f} {}/s", per_second, item_);
  return fmt::format("{} {}/s", rounded(per_second), item_);
}

void ProgressBar::update(int64_t done) {
  done_ = done;
  const double now = console_.seconds();
  const double seconds = now - begin_;
  if (seconds < kSecondsBeforeShown) return;
  const bool redraw = console_.is_terminal() && (!shown_ || now - last_status_ >= kSecondsBetweenRedraws);
  const bool line = !console_.is_terminal() && (!shown_ || now - last_line_ >= kSecondsBetweenLines);
  if (!redraw && !line) return;
  shown_ = true;
  std::string text = what_ + ": ";
  if (total_ > 0) {
    const double part = static_cast<double>(done_) / static_cast<double>(total_);
    if (redraw) text += bar(part) + " ";
    text += fmt::format("{:.0f}%  ", 100 * part);
  }
  text += fmt::format("{}  {}", amounts(), rate(seconds));
  if (total_ > 0 && done_ > 0) {
    const double left = seconds * static_cast<double>(total_ - done_) / static_cast<double>(done_);
    text += fmt::format("  {} left", duration_text(left));
  }
  if (redraw) {
    console_.set_status(text);
    last_status_ = now;
  } else {
    console_.info(text);
    last_line_ = now;
  }
}

// ---- TrainingProgress ----

TrainingProgress::TrainingProgress(Console& console, int64_t last_step, int64_t total_steps)
    : console_(console),
      first_step_(last_step),
      total_steps_(total_steps),
      printed_step_(last_step),
      begin_(console.seconds()),
      last_line_(begin_),
      last_status_(begin_) {}

TrainingProgress::~TrainingProgress() {
  console_.set_status("");
}

void TrainingProgress::update(const StepMetrics& metrics) {
  const double now = console_.seconds();
  const int64_t steps_since_line = metrics.step - printed_step_;
  const bool line = metrics.step == first_step_ + 1 || metrics.step == total_steps_ ||
                    now - last_line_ >= kSecondsBetweenLines || steps_since_line * kLinesPerRun >= total_steps_;
  const bool redraw = console_.is_terminal() && now - last_status_ >= kSecondsBetweenRedraws;
  if (!line && !redraw) return;
  const auto width = static_cast<int>(fmt::formatted_size("{}", total_steps_));
  std::string text = fmt::format("step {:{}}/{}  loss {:.4f}  lr {:.3e}  {} tokens/s", metrics.step, width,
                                 total_steps_, metrics.loss, metrics.lr, rounded(metrics.tokens_per_second));
  if (metrics.mfu) text += fmt::format("  mfu {:.1f}%", 100 * *metrics.mfu);
  if (metrics.skipped_steps > 0) text += fmt::format("  {} skipped", metrics.skipped_steps);
  const double left = (now - begin_) * static_cast<double>(total_steps_ - metrics.step) /
                      static_cast<double>(metrics.step - first_step_);
  text += fmt::format("  {} left", duration_text(left));
  if (line) {
    console_.info(text);
    printed_step_ = metrics.step;
    last_line_ = now;
  }
  if (redraw) {
    console_.set_status(text);
    last_status_ = now;
  }
}

std::string duration_text(double seconds) {
  const int64_t total = std::isfinite(seconds) ? std::llround(std::clamp(seconds, 0.0, 1e12)) : 0;
  if (total < 60) return fmt::format("{} s", total);
  if (total < 3600) return fmt::format("{}:{:02}", total / 60, total % 60);
  return fmt::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
}

}  // namespace palimpsest
