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

TEST(Documents, RefuseOffsetsThatDoNotStartAtZeroOrDecrease) {
  EXPECT_THROW(Documents({}), Error);
  EXPECT_THROW(Documents({1, 5}), Error);
  EXPECT_THROW(Documents({0, 5, 4}), Error);
}

}  // namespace
}  // namespace palimpsest
