#include "parallel/gpu_places.h"

#include <gtest/gtest.h>

#include <string>

namespace palimpsest {
namespace {

std::string complaint_about(const std::vector<GpuPlace>& ranks) {
  try {
    check_one_gpu_each(ranks);
  } catch (const UserError& error) {
    return error.what();
  }
  return {};
}

TEST(GpuPlaces, EachRankHasAGpuOfItsOwnOnItsHost) {
  EXPECT_EQ(
      complaint_about(
          {{"a", "0000:1B:00.0", 2}, {"a", "0000:43:00.0", 2}, {"b", "0000:1B:00.0", 2}, {"b", "0000:43:00.0", 2}}),
      "");
  // Of a launcher that shows each rank only its own.
  EXPECT_EQ(complaint_about({{"a", "0000:1B:00.0", 1}, {"a", "0000:43:00.0", 1}}), "");
}

TEST(GpuPlaces, MoreRanksThanGpusAreCountedByHost) {
  EXPECT_EQ(complaint_about({{"a", "0000:1B:00.0", 1},
                             {"b", "0000:1B:00.0", 2},
                             {"b", "0000:43:00.0", 2},
                             {"b", "0000:1B:00.0", 2},
                             {"b", "0000:43:00.0", 2}}),
            "4 ranks on b but 2 GPUs visible, and ranks cannot share a GPU; start at most one rank a GPU, or take "
            "device=cpu");
}

}  // namespace
}  // namespace palimpsest
