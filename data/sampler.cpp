#include "data/sampler.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

constexpr int64_t kPeriod = 4096;

// Slots of a period for each source: its share of kPeriod, at least one, the rounding going to the largest remainders.
std::vector<int64_t> shares_of(const std::vector<RowSource>& sources) {
  double sum = 0.0;
  for (const RowSource& source : sources) sum += source.weight;
  std::vector<int64_t> shares;
  std::vector<std::pair<double, size_t>> remainders;
  for (size_t i = 0; i < sources.size(); ++i) {
    const double exact = static_cast<double>(kPeriod) * sources[i].weight / sum;
    shares.push_back(std::max<int64_t>(1, static_cast<int64_t>(exact)));
    remainders.emplace_back(static_cast<double>(shares[i]) - exact, i);  // smallest first: those that lost most
  }
  std::sort(remainders.begin(), remainders.end());
  int64_t missing = kPeriod - std::accumulate(shares.begin(), shares.end(), int64_t{0});
  for (size_t i = 0; missing > 0; i = (i + 1) % remainders.size(), --missing) ++shares[remainders[i].second];
  for (; missing < 0; ++missing) --*std::max_element(shares.begin(), shares.end());
  return shares;
}

}  // namespace

int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t stream) {
  CHECK(index >= 0 && index < size, "index ", index, " of ", size);
  if (size <= 2) {  // too few bits for two halves
    return size == 1 ? 0 : index ^ static_cast<int64_t>(random_bits(seed, stream, 0) & 1);
  }
  constexpr uint64_t kRounds = 8;  // even, so that halves of unequal width end as they began
  const int bits = std::bit_width(static_cast<uint64_t>(size - 1));
  const int low_bits = bits / 2;
  uint64_t value = static_cast<uint64_t>(index);
  do {
    int right_bits = low_bits;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const int left_bits = bits - right_bits;
      const uint64_t left = value >> right_bits, right = value & ((uint64_t{1} << right_bits) - 1);
      const uint64_t mixed =
          (left ^ random_bits(seed, stream, right * kRounds + round)) & ((uint64_t{1} << left_bits) - 1);
      value = (right << left_bits) | mixed;  // the halves change places
      right_bits = left_bits;
    }
  } while (value >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(value);
}

Sampler::Sampler(std::vector<RowSource> sources, uint64_t seed) : sources_(std::move(sources)), seed_(seed) {
  CHECK(!sources_.empty() && static_cast<int64_t>(sources_.size()) <= kPeriod, sources_.size(), " sources");
  for (const RowSource& source : sources_)
    CHECK(source.num_rows > 0 && source.weight > 0.0, source.num_rows, " rows with weight ", source.weight);
  slots_of_ = shares_of(sources_);
  for (size_t source = 0; source < sources_.size(); ++source)
    for (int64_t ordinal = 0; ordinal < slots_of_[source]; ++ordinal)
      slots_.push_back({static_cast<int64_t>(source), ordinal});
}

Sample Sampler::at(int64_t index) const {
  CHECK(index >= 0, "sample ", index);
  int64_t source = 0, draw = index;  // draw: how many samples of this source come before
  if (sources_.size() > 1) {
    const int64_t period = index / kPeriod;
    const uint64_t stream = hash_of(detail::concatenate("mixture ", period));
    const Slot& slot = slots_[permuted(index % kPeriod, kPeriod, seed_, stream)];
    source = slot.source;
    draw = period * slots_of_[source] + slot.ordinal;
  }
  const int64_t num_rows = sources_[source].num_rows;
  const int64_t epoch = draw / num_rows;
  const uint64_t stream = hash_of(detail::concatenate("rows ", source, " ", epoch));
  return {source, permuted(draw % num_rows, num_rows, seed_, stream), epoch};
}

IndexRange split_range(int64_t total, int64_t parts, int64_t part) {
  CHECK(total >= 0 && parts > 0 && part >= 0 && part < parts, "part ", part, " of ", parts, ", total ", total);
  const int64_t size = total / parts, larger = total % parts;  // the first `larger` parts have one more
  const int64_t begin = part * size + std::min(part, larger);
  return {begin, begin + size + (part < larger ? 1 : 0)};
}

}  // namespace palimpsest
