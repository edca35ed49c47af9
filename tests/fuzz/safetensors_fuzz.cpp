// Any bytes as a safetensors header (up to the first 0xff) and its data: refused with a UserError, or every tensor can
// be read. The header alone is listed too.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "data/safetensors.h"
#include "kernels/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace palimpsest;
  const uint8_t* border = std::find(data, data + size, uint8_t{0xff});
  const std::span<const uint8_t> header(data, border), payload(border, data + size);
  try {
    for (const auto& [name, tensor] : parse_safetensors_header(std::as_bytes(header), std::as_bytes(payload), "fuzz")) {
      std::vector<float> values(static_cast<size_t>(tensor.numel()));
      read_as_f32(tensor, 0, values, name);
    }
  } catch (const UserError&) {
  }
  try {
    int64_t bytes = 0;
    for (const SafeEntry& entry : list_safetensors_header(std::as_bytes(header), "fuzz")) bytes += entry.bytes;
    if (bytes < 0) __builtin_trap();
  } catch (const UserError&) {
  }
  return 0;
}
