// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// A value is a pure function of (seed, stream, index), so weights and samples do not depend on the number of ranks or
// on the order in which they are drawn. There is no generator state to save.
#pragma once

#include <cstdint>
#include <string_view>

namespace palimpsest {

uint64_t hash_of(std::string_view text);  // 64-bit FNV-1a: names a stream after a parameter or a purpose

// The random number at `index` of the stream (seed, stream).
uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index);
double random_uniform(uint64_t seed, uint64_t stream, uint64_t index);  // in (0, 1), never 0 or 1
double random_normal(uint64_t seed, uint64_t stream, uint64_t index);   // mean 0, variance 1 (Box-Muller)

}  // namespace palimpsest
