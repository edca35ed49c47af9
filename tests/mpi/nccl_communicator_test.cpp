// Every collective on the ranks' GPUs against the same on their hosts, which MPI does: with those sizes going as copies
// that do by default, and with all of them.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/elementwise.h"
#include "parallel/mesh.h"
#include "tests/mpi/world.h"
#include "tests/support/tensors.h"

namespace palimpsest {
namespace {

using support::OwnedTensor;

class NcclCommunicators : public testing::TestWithParam<int64_t> {
 protected:
  static constexpr int64_t kBytes = 256 << 20, kMostSummed = 1 << 20;

  void SetUp() override {
    if (!mpi_test::take_gpu()) GTEST_SKIP() << "there is no GPU";
    mesh_ = mpi_test::world().make_mesh({.data = mpi_test::world().world_size()}, mpi_test::world_watchdog(),
                                        Device::kCuda, mpi_test::gpu_links(GetParam()));
    rehearse_reduce_scatter(kMostSummed);
    memory_.emplace("tensors", Device::kCuda, kBytes);
    scratch_.emplace("scratch", Device::kCuda, 1 << 20);
    stream_.emplace(Device::kCuda, *scratch_);
    host_scratch_.emplace("scratch", Device::kCpu, 1 << 20);
    host_stream_.emplace(Device::kCpu, *host_scratch_);
    support::fill_with_nan(*stream_, *memory_);
    shared_memory_.emplace(*mesh_);
  }
  void TearDown() override { shared_memory_.reset(); }

  // Parts of this many f64.
  void rehearse_reduce_scatter(int64_t n) {
    Arena planned = Arena::planning("tensors", Device::kCuda), scratch = Arena::planning("scratch", Device::kCuda);
    Stream planning(Device::kCuda, scratch);
    world().reduce_scatter(planning, planned.allocate(DType::kF64, {n}),
                           planned.allocate(DType::kF64, {world().size() * n}));
  }

  Communicator& world() { return mesh_->world(); }
  // Different on every rank. Of more than two they are whole, so that the order of a sum does not matter.
  OwnedTensor numbers(DType dtype, Shape shape, uint64_t seed) {
    OwnedTensor x = support::random_tensor(dtype, shape, 100 * seed + static_cast<uint64_t>(world().rank()), 10.0);
    if (world().size() == 2) return x;
    std::vector<double> values = support::values_of(x);
    for (double& value : values) value = std::round(value) + 0.0;  // and of the zeros the one
    support::set_values(x, values);
    return x;
  }

  // Calls body(stream, x, y) on the host and on the GPU with the same x, and compares both results bit by bit.
  void expect_same(const OwnedTensor& x, const OwnedTensor& y,
                   const std::function<void(Stream&, const Tensor&, const Tensor&)>& body) {
    const Arena::Scope scope(*memory_);
    const OwnedTensor x_before = support::converted(x, x.tensor().dtype());
    const Tensor x_there = x.copy_to(*stream_, *memory_), y_there = y.copy_to(*stream_, *memory_);
    body(*host_stream_, x, y);
    body(*stream_, x_there, y_there);
    OwnedTensor x_back(x.tensor().dtype(), x.tensor().shape()), y_back(y.tensor().dtype(), y.tensor().shape());
    x_back.copy_from(*stream_, x_there);
    y_back.copy_from(*stream_, y_there);
    EXPECT_TRUE(support::is_bit_identical(x_back, x));
    EXPECT_TRUE(support::is_bit_identical(y_back, y));
    EXPECT_TRUE(x_back.surroundings_untouched());
    EXPECT_TRUE(y_back.surroundings_untouched());
  }

  std::unique_ptr<Mesh> mesh_;
  std::optional<Arena> memory_, scratch_, host_scratch_;
  std::optional<Stream> stream_, host_stream_;
  std::optional<SharedMemory> shared_memory_;
};

std::string name_of_least_bytes(const testing::TestParamInfo<int64_t>& info) {
  return "CopiesFrom" + std::to_string(info.param);
}
INSTANTIATE_TEST_SUITE_P(Gpus, NcclCommunicators, testing::Values(GpuLinks().least_copied_bytes, 0),
                         name_of_least_bytes);

TEST_P(NcclCommunicators, CollectivesGiveWhatMpiGives) {
  const int64_t size = world().size(), last = size - 1;
  uint64_t seed = 1;
  // Within a host the largest go as copies, or all.
  for (const int64_t n : GetParam() > 0 ? std::vector<int64_t>{1, 1025, 262144, 600011}
                                        : std::vector<int64_t>{1, 3, 1025, 4096, 100003}) {
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kI64}) {
      const OwnedTensor none(dtype, {1});
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax})
        expect_same(numbers(dtype, {n}, ++seed), none,
                    [&](Stream& stream, const Tensor& x, const Tensor&) { world().all_reduce(stream, x, op); });
    }
    for (const DType dtype : {DType::kF32, DType::kF64})
      expect_same(numbers(dtype, {size * n}, ++seed), OwnedTensor(dtype, {n}),
                  [&](Stream& stream, const Tensor& x, const Tensor& y) { world().reduce_scatter(stream, y, x); });
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI32, DType::kU8}) {
      expect_same(numbers(dtype, {n}, ++seed), OwnedTensor(dtype, {size * n}),
                  [&](Stream& stream, const Tensor& x, const Tensor& y) { world().all_gather(stream, y, x); });
      expect_same(numbers(dtype, {size * n}, ++seed), OwnedTensor(dtype, {1}),
                  [&](Stream& stream, const Tensor& x, const Tensor&) {
                    world().all_gather(stream, x, x.rows(world().rank() * n, n));
                  });
      expect_same(numbers(dtype, {n}, ++seed), OwnedTensor(dtype, {1}),
                  [&](Stream& stream, const Tensor& x, const Tensor&) { world().broadcast(stream, x, last); });
      expect_same(numbers(dtype, {n}, ++seed), OwnedTensor(dtype, {n}),
                  [&](Stream& stream, const Tensor& x, const Tensor& y) {
                    for (int64_t by = 1; by < size; ++by) world().start_shift(stream, x, y, by)->wait();
                  });
      // Around the ring, with open ends.
      expect_same(numbers(dtype, {n}, ++seed), OwnedTensor(dtype, {n}),
                  [&](Stream& stream, const Tensor& x, const Tensor& y) {
                    const int64_t rank = world().rank();
                    world().send_receive(stream, x, rank < last ? rank + 1 : -1, y, rank - 1);
                  });
    }
  }
}

TEST_P(NcclCommunicators, SumsOfBF16AreRoundedOnceWithTwoRanksOrAsCopies) {
  const int64_t size = world().size();
  if (size > 2 && (GetParam() > 0 || !mesh_->notices().empty())) GTEST_SKIP() << "needs 2 ranks, or copies";
  const int64_t n = 777;
  const OwnedTensor x = support::random_tensor(DType::kBF16, {size * n}, static_cast<uint64_t>(world().rank()), 10.0);
  const Tensor there = x.copy_to(*stream_, *memory_), sum = memory_->allocate(DType::kBF16, {n});
  world().reduce_scatter(*stream_, sum, there);
  OwnedTensor expected = support::converted(x, DType::kF64);
  world().all_reduce(*host_stream_, expected, ReduceOp::kSum);
  const OwnedTensor rounded = support::converted(expected.tensor().rows(world().rank() * n, n), DType::kBF16);
  HostCopy got(sum);
  EXPECT_TRUE(support::is_bit_identical(got.fetch().tensor(), rounded));
}

// Large enough to go as copies: of several tensors at once, one after the other in the same memory.
TEST_P(NcclCommunicators, ManyLargeOnesInTurnGiveWhatMpiGives) {
  const int64_t size = world().size(), rank = world().rank();
  std::vector<int64_t> lengths = {200003, 1, 131072, 77};
  for (int64_t i = 0; i < 70; ++i) lengths.push_back(3 + i % 11);  // more than one launch sums
  uint64_t seed = 50;
  for (int turn = 0; turn < 5; ++turn) {
    std::vector<OwnedTensor> wholes;
    std::vector<Tensor> wholes_there, parts_there;
    std::vector<Parts> here, there;
    const Arena::Scope scope(*memory_);
    for (const int64_t n : lengths) {
      wholes.push_back(numbers(turn % 2 == 0 ? DType::kF32 : DType::kF64, {size * n}, ++seed));
      const Tensor whole = wholes.back(), whole_there = wholes.back().copy_to(*stream_, *memory_);
      here.push_back({.whole = whole, .part = whole.rows(rank * n, n)});
      there.push_back({.whole = whole_there, .part = whole_there.rows(rank * n, n)});
    }
    // The sum of the own parts, where they are, and then everybody's.
    std::vector<OwnedTensor> sums;
    std::vector<Parts> to_sums;
    for (const Parts& tensor : here) {
      sums.emplace_back(tensor.part.dtype(), tensor.part.shape());
      to_sums.push_back({.whole = tensor.whole, .part = sums.back()});
    }
    world().start_reduce_scatter(*host_stream_, to_sums)->wait();
    for (size_t i = 0; i < here.size(); ++i) copy(*host_stream_, here[i].part, sums[i]);
    world().start_all_gather(*host_stream_, here)->wait();
    const auto summing = world().start_reduce_scatter(*stream_, there);
    summing->wait();
    world().start_all_gather(*stream_, there)->wait();
    for (size_t i = 0; i < here.size(); ++i) {
      HostCopy got(there[i].whole);
      EXPECT_TRUE(support::is_bit_identical(got.fetch().tensor(), here[i].whole)) << turn << " " << i;
    }
  }
}

// Work on the stream before a collective is in it, and work after wait() sees it, in whatever order they are waited
// for.
TEST_P(NcclCommunicators, CollectivesRunBesideTheStreamAndInItsOrder) {
  constexpr int64_t kNumbers = 300007, kCollectives = 40;
  std::vector<Tensor> sums;
  std::vector<std::unique_ptr<Pending>> pending;
  const OwnedTensor ones = support::converted(OwnedTensor(DType::kF32, {kNumbers}), DType::kF32);
  support::fill(ones, 1.0);
  const Tensor one = ones.copy_to(*stream_, *memory_), x = memory_->allocate(DType::kF32, {kNumbers});
  fill_zero(*stream_, x);
  for (int64_t i = 0; i < kCollectives; ++i) {
    add(*stream_, x, x, one);
    sums.push_back(memory_->allocate(DType::kF32, {kNumbers}));
    copy(*stream_, sums.back(), x);
    pending.push_back(world().start_all_reduce(*stream_, sums.back(), ReduceOp::kSum));
  }
  for (int64_t i = kCollectives; i-- > 0;) {
    pending[static_cast<size_t>(i)]->wait();
    const Tensor& sum = sums[static_cast<size_t>(i)];
    add(*stream_, sum, sum, one);
    HostCopy got(sum);
    const auto expected = static_cast<double>((i + 1) * world().size() + 1);
    const std::vector<double> values = support::values_of(got.fetch().tensor());
    EXPECT_EQ(values, std::vector<double>(kNumbers, expected)) << i;
  }
}

// What does not fit is found before anything is sent, on all ranks.
TEST_P(NcclCommunicators, SumsThatWereNotRehearsedAreAFaultWhereTheyNeedMemory) {
  if (!mesh_->notices().empty()) GTEST_SKIP() << "needs copies";
  const int64_t n = 2 * kMostSummed;
  const Tensor x = memory_->allocate(DType::kF64, {world().size() * n});
  EXPECT_THROW(world().reduce_scatter(*stream_, x.rows(world().rank() * n, n), x), Error);
  shared_memory_.reset();
  shared_memory_.emplace(*mesh_);  // of all that was asked for so far
  fill_zero(*stream_, x);
  world().reduce_scatter(*stream_, x.rows(world().rank() * n, n), x);
}

// One rank's tensor lies in host memory, which no other can map.
TEST_P(NcclCommunicators, WhatOneRankCannotMapGoesByNcclOnAll) {
  const int64_t n = 200003, size = world().size(), rank = world().rank();
  const OwnedTensor part = numbers(DType::kF32, {n}, 7);
  const OwnedTensor pinned(DType::kF32, {size * n});
  std::optional<PinnedRange> range;
  Tensor whole_there = memory_->allocate(DType::kF32, {size * n});
  if (rank == size - 1) {
    range.emplace(pinned.tensor().raw(), pinned.tensor().bytes());
    whole_there = Tensor(pinned.tensor().raw(), DType::kF32, {size * n}, Device::kCuda);
  }
  const Tensor part_there = part.copy_to(*stream_, *memory_);
  const OwnedTensor expected(DType::kF32, {size * n});
  world().all_gather(*host_stream_, expected, part);
  for (int turn = 0; turn < 3; ++turn) {
    fill_zero(*stream_, whole_there);
    world().all_gather(*stream_, whole_there, part_there);
    synchronize(*stream_);
    HostCopy got(rank == size - 1 ? pinned.tensor() : whole_there);
    EXPECT_TRUE(support::is_bit_identical(got.fetch().tensor(), expected)) << turn;
  }
}

TEST_P(NcclCommunicators, CountBytesAsOnTheHost) {
  const Tensor mine = memory_->allocate(DType::kF32, {3}), all = memory_->allocate(DType::kF32, {3 * world().size()});
  world().reset_bytes_sent();
  world().all_gather(*stream_, all, mine);
  EXPECT_EQ(world().bytes_sent(), 12 * (world().size() - 1));
}

}  // namespace
}  // namespace palimpsest
