#include "parallel/mesh.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace palimpsest {
namespace {

std::string error_of(const MeshShape& wanted, int64_t ranks) {
  try {
    resolve_mesh(wanted, ranks);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(Mesh, FillsTheOneOpenAxis) {
  EXPECT_EQ(resolve_mesh({.data = -1, .sequence = 2, .tensor = 2}, 12).data, 3);
  EXPECT_EQ(resolve_mesh({.data = 2, .sequence = 1, .tensor = -1}, 8).tensor, 4);
  EXPECT_EQ(resolve_mesh({.data = 1, .sequence = 1, .tensor = 1}, 1).ranks(), 1);
}

TEST(Mesh, AProductThatDoesNotFitPrintsEveryNumber) {
  EXPECT_EQ(
      error_of({.data = 2, .sequence = 2, .tensor = 2}, 6),
      "parallel: data = 2, sequence = 2, tensor = 2 on 6 ranks: the product of the three, 8, must be the number of "
      "ranks");
  EXPECT_EQ(
      error_of({.data = -1, .sequence = 4, .tensor = 1}, 6),
      "parallel: data = -1, sequence = 4, tensor = 1 on 6 ranks: the product of the other two, 4, must divide the "
      "number of ranks");
  EXPECT_NE(error_of({.data = -1, .sequence = -1, .tensor = 1}, 4), "");
  EXPECT_NE(error_of({.data = 0, .sequence = 1, .tensor = 1}, 1), "");
}

TEST(Communicator, AGroupOfOneCopiesAndSendsNothing) {
  Arena scratch("scratch", Device::kCpu, 1024);
  Stream stream(Device::kCpu, scratch);
  Communicator& alone = Mesh::single().world();
  std::vector<float> x = {1, 2}, y = {-1, -1};
  const Tensor in(x.data(), DType::kF32, {2}), out(y.data(), DType::kF32, {2});
  alone.all_gather(stream, out, in);
  EXPECT_EQ(y, x);
  alone.all_reduce(stream, in, ReduceOp::kSum);
  EXPECT_EQ(x, y);
  EXPECT_EQ(alone.bytes_sent(), 0);
  const Tensor wrong(y.data(), DType::kF32, {1});
  EXPECT_THROW(alone.all_gather(stream, wrong, in), Error);
}

// Says how much memory it needs, and notes what is asked of it.
class NotingCommunicator : public Communicator {
 public:
  NotingCommunicator(const char* axis, std::vector<std::string>& notes) : Communicator(axis, 0, 2), notes_(notes) {}
  void take_workspace() override { notes_.push_back(axis() + " takes " + std::to_string(workspace_bytes())); }
  void leave_others_memory() noexcept override { notes_.push_back(axis() + " leaves"); }

 protected:
  int64_t workspace_of_reduce_scatter(std::span<const Parts> tensors) const override {
    return tensors.front().part.bytes();
  }

 private:
  std::vector<std::string>& notes_;
};

class MemoryOfRanks : public testing::Test {
 protected:
  std::vector<std::string> notes_;
  Mesh mesh_ = Mesh({.data = 2}, std::make_unique<NotingCommunicator>("world", notes_),
                    std::make_unique<NotingCommunicator>("data", notes_), std::make_unique<Communicator>("sequence"),
                    std::make_unique<Communicator>("tensor"), std::make_unique<NotingCommunicator>("replica", notes_));
};

TEST_F(MemoryOfRanks, IsRehearsedAndTakenForTheLargestSum) {
  Arena scratch = Arena::planning("scratch", Device::kCpu), tensors = Arena::planning("tensors", Device::kCpu);
  Stream stream(Device::kCpu, scratch);
  const auto reduce = [&](Communicator& communicator, int64_t n) {
    communicator.reduce_scatter(stream, tensors.allocate(DType::kF32, {n}), tensors.allocate(DType::kF32, {2 * n}));
  };
  for (const int64_t n : {3, 11, 5, 0}) reduce(mesh_.replica(), n);
  reduce(mesh_.data(), 2);
  EXPECT_EQ(mesh_.workspace_bytes(), 44 + 8);
  {
    const SharedMemory memory(mesh_);
    EXPECT_EQ(notes_, (std::vector<std::string>{"world takes 0", "data takes 8", "replica takes 44"}));
    notes_.clear();
  }
  EXPECT_EQ(notes_, (std::vector<std::string>{"world leaves", "data leaves", "replica leaves"}));
}

TEST_F(MemoryOfRanks, IsNotWaitedForWhereSomethingFailed) {
  EXPECT_THROW(
      {
        const SharedMemory memory(mesh_);
        throw Error("a rank fails");
      },
      Error);
  EXPECT_EQ(notes_.size(), 3u);
}

}  // namespace
}  // namespace palimpsest
