#include "kernels/random.h"

#include <array>
#include <cmath>
#include <numbers>

namespace palimpsest {

namespace {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

std::array<uint64_t, 2> two_words(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto out = philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                               static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                              {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return {(uint64_t{out[1]} << 32) | out[0], (uint64_t{out[3]} << 32) | out[2]};
}

// The middle of one of 2^52 equal cells of (0, 1).
double to_unit(uint64_t bits) {
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

}  // namespace

uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3ull;
  return hash;
}

uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  return two_words(seed, stream, index)[0];
}

double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return to_unit(random_bits(seed, stream, index));
}

double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto words = two_words(seed, stream, index);
  return std::sqrt(-2.0 * std::log(to_unit(words[0]))) * std::cos(2.0 * std::numbers::pi * to_unit(words[1]));
}

}  // namespace palimpsest
