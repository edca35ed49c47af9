// What an op does with what its result held before.
#pragma once

#include <cstdint>

namespace palimpsest {

enum class Write : uint8_t { kOverwrite, kAccumulate };

}  // namespace palimpsest
