#include "parallel/gpu_links.h"

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "kernels/check.h"

namespace palimpsest {

namespace {

// `value` stays where the variable is not set.
void read_variable(const char* name, int64_t largest, int64_t& value) {
  const char* set = std::getenv(name);
  if (set == nullptr || *set == '\0') return;
  const std::string_view text(set);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > largest)
    throw_user_error(name, " is ", text, ", must be a whole number from 0 to ", largest);
}

}  // namespace

GpuLinks gpu_links() {
  constexpr int64_t kMostBytes = int64_t{1} << 50;
  GpuLinks links;
  int64_t share = 0;
  read_variable("PALIMPSEST_SHARE_GPUS", 1, share);
  read_variable("PALIMPSEST_LEAST_COPIED_BYTES", kMostBytes, links.least_copied_bytes);
  links.share_gpus = share == 1;
  return links;
}

}  // namespace palimpsest
