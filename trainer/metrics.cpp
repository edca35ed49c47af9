#include "trainer/metrics.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "kernels/check.h"

namespace palimpsest {

namespace {

constexpr std::string_view kLineBegin = "{\"step\":";

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

[[noreturn]] void fail(const std::string& path, int error) {
  throw_user_error(path, ": cannot be written: ", std::strerror(error));
}

File open(const std::string& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode), &std::fclose);
  if (!file) fail(path, errno);
  return file;
}

void write_line(std::FILE* file, const std::string& path, std::string line) {
  line += '\n';
  if (std::fwrite(line.data(), 1, line.size(), file) != line.size()) fail(path, errno);
}

std::string number(double value) {
  return std::isfinite(value) ? fmt::format("{}", value) : "null";
}
std::string number(const std::optional<double>& value) {
  return value ? number(*value) : "null";
}

// The step of a whole line that to_json wrote; 0 for anything else.
int64_t step_of(std::string_view line) {
  const bool is_whole = line.starts_with(kLineBegin) && line.ends_with('}') &&
                        std::count(line.begin(), line.end(), '{') == std::count(line.begin(), line.end(), '}');
  if (!is_whole) return 0;
  line.remove_prefix(kLineBegin.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
  return error == std::errc() && *end == ',' ? step : 0;
}

// Rewrites the file with each step up to last_step once. The new file replaces the old one when it is complete.
void keep_steps(const std::string& path, int64_t last_step) {
  std::ifstream old_lines(path);
  if (!old_lines) return;  // the first start, or the metrics were deleted
  const std::string new_path = path + ".new";
  File new_file = open(new_path, "wb");
  int64_t newest = 0;
  for (std::string line; std::getline(old_lines, line);) {
    const int64_t step = step_of(line);
    if (step <= newest || step > last_step) continue;
    newest = step;
    write_line(new_file.get(), new_path, line);
  }
  if (old_lines.bad()) throw_user_error(path, ": cannot be read to its end");
  if (std::fflush(new_file.get()) != 0 || fsync(fileno(new_file.get())) != 0) fail(new_path, errno);
  if (std::fclose(new_file.release()) != 0) fail(new_path, errno);
  std::error_code error;
  std::filesystem::rename(new_path, path, error);
  if (error) fail(path, error.value());
}

}  // namespace

std::string to_json(const StepMetrics& metrics) {
  std::string line = fmt::format(
      R"({}{},"tokens":{},"loss":{},"grad_norm":{},"lr":{},"tokens_per_second":{},"mfu":{},"skipped_steps":{})",
      kLineBegin, metrics.step, metrics.tokens, number(metrics.loss), number(metrics.grad_norm), number(metrics.lr),
      number(metrics.tokens_per_second), number(metrics.mfu), metrics.skipped_steps);
  if (!metrics.experts.empty()) {
    std::string layers;
    for (const ExpertUse& layer : metrics.experts)
      layers += fmt::format(R"({}"{}":{{"fewest":{},"most":{},"mean":{}}})", layers.empty() ? "" : ",", layer.layer,
                            number(layer.fewest), number(layer.most), number(layer.mean));
    line += fmt::format(R"(,"experts":{{{}}})", layers);
  }
  std::string axes;
  metrics.bytes_sent.for_each_axis([&](const char* axis, int64_t bytes) {
    axes += fmt::format(R"({}"{}":{})", axes.empty() ? "" : ",", axis, bytes);
  });
  if (!axes.empty()) line += fmt::format(R"(,"bytes_sent":{{{}}})", axes);
  if (!metrics.eval.empty()) {
    std::string sets;
    for (const EvalMetrics& set : metrics.eval) {
      // The names are letters, digits, '_' and '-' (validate(Config)), so they need no escapes.
      sets += fmt::format(R"({}"{}":{{"loss":{},"perplexity":{},"bits_per_byte":{}}})", sets.empty() ? "" : ",",
                          set.name, number(set.loss), number(std::exp(set.loss)), number(set.bits_per_byte));
    }
    line += fmt::format(R"(,"eval":{{{}}})", sets);
  }
  return line + "}";
}

MetricsLog::MetricsLog(const std::string& path, int64_t last_step) : path_(path), file_(nullptr, &std::fclose) {
  if (last_step > 0) keep_steps(path, last_step);
  file_ = open(path, last_step > 0 ? "ab" : "wb");
}

void MetricsLog::write(const StepMetrics& metrics) {
  write_line(file_.get(), path_, to_json(metrics));
  if (std::fflush(file_.get()) != 0) fail(path_, errno);
}

}  // namespace palimpsest
