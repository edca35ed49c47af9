#include "parallel/mesh.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace palimpsest
