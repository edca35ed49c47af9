#include "parallel/agreement.h"

#include <gtest/gtest.h>

#include "kernels/check.h"
#include "tests/mpi/world.h"

namespace palimpsest {
namespace {

class Agreement : public testing::Test {
 protected:
  Agreement()
      : mesh_(mpi_test::world().make_mesh({.data = mpi_test::world().world_size()}, mpi_test::world_watchdog())),
        world_(mesh_->world()) {}

  // What agree throws on this rank.
  RanksFailed failure_of(const std::function<void()>& body) {
    try {
      agree(world_, body);
    } catch (const RanksFailed& failure) {
      return failure;
    }
    return {"nothing was thrown", RanksFailed::Kind::kFaultOfAll};
  }

  std::unique_ptr<Mesh> mesh_;
  Communicator& world_;
};

TEST_F(Agreement, TextsOfUnlikeLengthsReachAllRanksInOrder) {
  const std::vector<std::string> texts = gather_texts(world_, std::string(static_cast<size_t>(world_.rank()), 'x'));
  ASSERT_EQ(texts.size(), static_cast<size_t>(world_.size()));
  for (size_t rank = 0; rank < texts.size(); ++rank) EXPECT_EQ(texts[rank], std::string(rank, 'x'));
  EXPECT_EQ(broadcast_text(world_, world_.rank() == 0 ? "of the first" : "of another"), "of the first");
  EXPECT_EQ(broadcast_text(world_, ""), "");
}

TEST_F(Agreement, NumbersAreReduced) {
  EXPECT_EQ(max_over(world_, -world_.rank()), 0);
  EXPECT_EQ(sum_over(world_, world_.rank()), world_.size() * (world_.size() - 1) / 2);
  EXPECT_EQ(first_rank_where(world_, world_.rank() >= 1), 1);
  EXPECT_EQ(first_rank_where(world_, false), std::nullopt);
}

TEST_F(Agreement, WhatOneRankThrowsIsThrownOnAllWithTheRank) {
  const RanksFailed failure = failure_of([&] {
    if (world_.rank() == 1) throw_user_error("the disk is full");
  });
  EXPECT_EQ(std::string(failure.what()), "rank 1 on " + host_name() + ": the disk is full");
  EXPECT_EQ(failure.kind(), RanksFailed::Kind::kUserError);
  EXPECT_EQ(failure_of([&] {
              if (world_.rank() == 1) throw Error("a fault");
              throw_user_error("no such file");
            }).kind(),
            RanksFailed::Kind::kFaultOfSome);
}

TEST_F(Agreement, WhatAllRanksThrowIsOneError) {
  const RanksFailed error = failure_of([] { throw_user_error("no such file"); });
  EXPECT_EQ(std::string(error.what()), "no such file");
  EXPECT_EQ(error.kind(), RanksFailed::Kind::kUserError);
  EXPECT_EQ(failure_of([] { throw Error("a fault"); }).kind(), RanksFailed::Kind::kFaultOfAll);
  // One that all know already passes as it is.
  const RanksFailed inner = failure_of([&] { agree(world_, [] { throw_user_error("inside"); }); });
  EXPECT_EQ(std::string(inner.what()), "inside");
  EXPECT_EQ(inner.kind(), RanksFailed::Kind::kUserError);
}

TEST_F(Agreement, AnItemThatDiffersIsNamedWithItsRanks) {
  const bool last = world_.rank() + 1 == world_.size();
  check_same_on_ranks(world_, {{"the build", "abc"}, {"a\nb", ""}});
  try {
    check_same_on_ranks(world_, {{"the build", last ? "def" : "abc"}, {"train.steps", last ? "1" : "2"}});
    FAIL() << "nothing was thrown";
  } catch (const RanksFailed& failure) {
    EXPECT_EQ(std::string(failure.what()), "the ranks differ in the build: abc on rank 0 on " + host_name() +
                                               ", but def on rank " + std::to_string(world_.size() - 1) + " on " +
                                               host_name());
  }
}

}  // namespace
}  // namespace palimpsest
