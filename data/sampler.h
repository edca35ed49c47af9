// Which row comes when: pure functions of (seed, index), so that the order does not depend on the number of ranks and a
// resumed run needs nothing but its step.
#pragma once

#include <cstdint>
#include <vector>

namespace palimpsest {

// The place of `index` in a pseudo-random permutation of 0 .. size - 1, chosen by (seed, stream). A Feistel network on
// the next power of two, walked until it lands inside (Black and Rogaway, "Ciphers with arbitrary finite domains",
// 2002).
int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t stream);

// A source of rows and its share of the samples relative to the other sources.
struct RowSource {
  int64_t num_rows = 0;
  double weight = 1.0;
};

struct Sample {
  int64_t source = 0;
  int64_t row = 0;
  int64_t epoch = 0;  // of that source
  bool operator==(const Sample&) const = default;
};

// Each source is gone through in epochs; every epoch is a full permutation of its rows and differs from the others.
// Several sources are mixed in periods of 4096 samples: of each period a source gets its share of the weights (rounded,
// at least one), at places that change from period to period.
class Sampler {
 public:
  Sampler(std::vector<RowSource> sources, uint64_t seed);

  Sample at(int64_t index) const;  // index counts samples from the start of the run

 private:
  struct Slot {
    int64_t source;
    int64_t ordinal;  // among the slots of its source
  };

  std::vector<RowSource> sources_;
  std::vector<int64_t> slots_of_;  // of each source, in a period
  std::vector<Slot> slots_;        // of a period
  uint64_t seed_;
};

// Part `part` of 0 .. total - 1 cut into `parts` contiguous ranges whose sizes differ by one at most; a range may be
// empty.
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};
IndexRange split_range(int64_t total, int64_t parts, int64_t part);

}  // namespace palimpsest
