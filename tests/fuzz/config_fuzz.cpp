// Any text as a config: it is read, or refused with a UserError, and what is read prints to text that reads the same.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kernels/check.h"
#include "trainer/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace palimpsest;
  try {
    const Config config = parse_config({reinterpret_cast<const char*>(data), size}, "fuzz.yaml");
    const std::string printed = to_yaml(config);
    if (to_yaml(parse_config(printed, "printed.yaml")) != printed) std::abort();
  } catch (const UserError&) {
  }
  return 0;
}
