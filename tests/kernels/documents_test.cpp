#include "kernels/documents.h"

#include <gtest/gtest.h>

namespace palimpsest {
namespace {

TEST(Documents, OwnTheTokensBetweenTheirOffsets) {
  const Documents documents({0, 0, 5, 5, 70});
  EXPECT_EQ(documents.count(), 4);
  EXPECT_EQ(documents.num_tokens(), 70);
  EXPECT_EQ(documents.length(0), 0);
  EXPECT_EQ(documents.begin(1), 0);
  EXPECT_EQ(documents.end(1), 5);
  EXPECT_EQ(documents.length(2), 0);
  EXPECT_EQ(documents.length(3), 65);
}

TEST(Documents, RowsOfABatchAreDocuments) {
  EXPECT_EQ(Documents::rows(3, 7).offsets(), (std::vector<int64_t>{0, 7, 14, 21}));
  EXPECT_EQ(Documents::rows(0, 7).count(), 0);
  EXPECT_EQ(Documents::single(9).offsets(), (std::vector<int64_t>{0, 9}));
  EXPECT_EQ(Documents::single(0).num_tokens(), 0);
}

TEST(Documents, KeepTheirStatesInRowsOfTheirOwn) {
  const Documents plain({0, 3, 5, 9});
  EXPECT_EQ(plain.num_states(), 3);
  EXPECT_EQ(plain.entering(2), 2);
  EXPECT_EQ(plain.leaving(1), 1);
  const Documents placed = plain.with_states(4, {-1, 3, 0}, {2, -1, 3});
  EXPECT_EQ(placed.offsets(), plain.offsets());
  EXPECT_EQ(placed.num_states(), 4);
  EXPECT_EQ(placed.entering(0), -1);
  EXPECT_EQ(placed.entering(1), 3);
  EXPECT_EQ(placed.leaving(2), 3);
  EXPECT_THROW(plain.with_states(4, {-1, 3}, {2, -1, 3}), Error);
  EXPECT_THROW(plain.with_states(3, {-1, 3, 0}, {2, -1, 0}), Error);
  EXPECT_THROW(plain.with_states(4, {0, 3, 0}, {2, -1, 3}), Error);
}

TEST(Documents, RefuseOffsetsThatDoNotStartAtZeroOrDecrease) {
  EXPECT_THROW(Documents({}), Error);
  EXPECT_THROW(Documents({1, 5}), Error);
  EXPECT_THROW(Documents({0, 5, 4}), Error);
}

}  // namespace
}  // namespace palimpsest
