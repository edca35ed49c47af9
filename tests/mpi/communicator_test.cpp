#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "parallel/mesh.h"
#include "tests/mpi/world.h"

namespace palimpsest {
namespace {

Tensor view(std::vector<float>& values) {
  return {values.data(), DType::kF32, {static_cast<int64_t>(values.size())}};
}

class MpiCommunicators : public testing::Test {
 protected:
  Arena scratch_ = Arena("scratch", Device::kCpu, 1 << 20);
  Stream stream_ = Stream(Device::kCpu, scratch_);
};

TEST_F(MpiCommunicators, CollectivesGiveWhatTheirNamesSay) {
  const auto mesh = mpi_test::world().make_mesh({.data = mpi_test::world().world_size()}, mpi_test::world_watchdog());
  Communicator& world = mesh->world();
  const int64_t size = world.size();
  const auto rank = static_cast<float>(world.rank());
  const auto ranks_sum = static_cast<float>(size * (size - 1) / 2);

  std::vector<float> x = {rank, 1.0f};
  world.all_reduce(stream_, view(x), ReduceOp::kSum);
  EXPECT_EQ(x, (std::vector<float>{ranks_sum, static_cast<float>(size)}));
  x = {rank, -rank};
  world.all_reduce(stream_, view(x), ReduceOp::kMax);
  EXPECT_EQ(x, (std::vector<float>{static_cast<float>(size - 1), -0.0f}));

  std::vector<float> mine = {rank, 10 * rank};
  std::vector<float> all(static_cast<size_t>(2 * size), -1.0f);
  world.all_gather(stream_, view(all), view(mine));
  for (int64_t r = 0; r < size; ++r) {
    EXPECT_EQ(all[static_cast<size_t>(2 * r)], static_cast<float>(r));
    EXPECT_EQ(all[static_cast<size_t>(2 * r + 1)], static_cast<float>(10 * r));
  }

  std::vector<float> parts(static_cast<size_t>(2 * size));
  std::iota(parts.begin(), parts.end(), rank);
  std::vector<float> sum(2, -1.0f);
  world.reduce_scatter(stream_, view(sum), view(parts));
  EXPECT_EQ(sum[0], ranks_sum + static_cast<float>(size) * 2 * rank);
  EXPECT_EQ(sum[1], ranks_sum + static_cast<float>(size) * (2 * rank + 1));

  std::vector<float> from_last = {rank};
  world.broadcast(stream_, view(from_last), size - 1);
  EXPECT_EQ(from_last[0], static_cast<float>(size - 1));

  for (int64_t by = 1; by < world.size(); ++by) {
    std::vector<float> mine = {rank}, from = {-1.0f};
    world.start_shift(stream_, view(mine), view(from), by)->wait();
    EXPECT_EQ(from[0], static_cast<float>((world.rank() + world.size() - by) % world.size()));
  }

  // Around the ring, with open ends.
  std::vector<float> out = {rank}, in = {-1.0f};
  world.send_receive(stream_, view(out), world.rank() + 1 < size ? world.rank() + 1 : -1, view(in), world.rank() - 1);
  EXPECT_EQ(in[0], rank - 1);
}

TEST_F(MpiCommunicators, AxesOfAMeshAreTheGroupsTheMapSays) {
  if (mpi_test::world().world_size() != 8) GTEST_SKIP() << "needs 8 ranks";
  const auto mesh = mpi_test::world().make_mesh({.data = 2, .sequence = 2, .tensor = 2}, mpi_test::world_watchdog());
  const auto rank = static_cast<float>(mesh->world().rank());
  const auto members = [&](Communicator& axis) {
    std::vector<float> mine = {rank}, all(static_cast<size_t>(axis.size()));
    axis.all_gather(stream_, view(all), view(mine));
    return all;
  };
  const int64_t r = mesh->world().rank();
  const auto f = [](int64_t x) { return static_cast<float>(x); };
  EXPECT_EQ(members(mesh->tensor()), (std::vector<float>{f(r / 2 * 2), f(r / 2 * 2 + 1)}));
  EXPECT_EQ(members(mesh->sequence()), (std::vector<float>{f(r / 4 * 4 + r % 2), f(r / 4 * 4 + r % 2 + 2)}));
  EXPECT_EQ(members(mesh->data()), (std::vector<float>{f(r % 4), f(r % 4 + 4)}));
  EXPECT_EQ(members(mesh->replica()), (std::vector<float>{f(r % 2), f(r % 2 + 2), f(r % 2 + 4), f(r % 2 + 6)}));
}

TEST_F(MpiCommunicators, CountsBytesAlsoWhenPlanning) {
  const auto mesh = mpi_test::world().make_mesh({.data = mpi_test::world().world_size()}, mpi_test::world_watchdog());
  Communicator& world = mesh->world();
  std::vector<float> mine(3), all(static_cast<size_t>(3 * world.size()));
  world.all_gather(stream_, view(all), view(mine));
  EXPECT_EQ(world.bytes_sent(), 12 * (world.size() - 1));
  world.reset_bytes_sent();
  Arena planned = Arena::planning("scratch", Device::kCpu);
  Stream planning(Device::kCpu, planned);
  world.all_gather(planning, view(all), view(mine));
  EXPECT_EQ(world.bytes_sent(), 12 * (world.size() - 1));
}

}  // namespace
}  // namespace palimpsest
