#include "kernels/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "tests/support/program.h"

namespace palimpsest {
namespace {

TEST(Arena, HandsOutAlignedDisjointTensors) {
  Arena arena("activations", Device::kCpu, 4096);
  const Tensor a = arena.allocate(DType::kF32, {3, 5});
  const Tensor b = arena.allocate(DType::kF64, {7});
  EXPECT_EQ(a.shape(), (Shape{3, 5}));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.raw()) % Arena::kAlignment, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.raw()) % Arena::kAlignment, 0u);
  EXPECT_EQ(static_cast<char*>(b.raw()) - static_cast<char*>(a.raw()), Arena::kAlignment);
  EXPECT_EQ(arena.used(), 512);
}

TEST(Arena, ScopeGivesBackAndPeakStays) {
  Arena arena("scratch", Device::kCpu, 4096);
  const Tensor kept = arena.allocate(DType::kU8, {256});
  void* inside = nullptr;
  {
    const Arena::Scope scope(arena);
    inside = arena.allocate(DType::kU8, {512}).raw();
    EXPECT_EQ(arena.used(), 768);
  }
  EXPECT_EQ(arena.used(), 256);
  EXPECT_EQ(arena.peak(), 768);
  EXPECT_EQ(arena.allocate(DType::kU8, {1}).raw(), inside);
  arena.release(0);
  EXPECT_EQ(arena.allocate(DType::kU8, {1}).raw(), kept.raw());
  EXPECT_THROW(arena.release(257), Error);
  EXPECT_THROW(arena.release(-1), Error);
}

TEST(Arena, FullRegionNamesItselfAndTheBytes) {
  Arena arena("gradients", Device::kCpu, 1000);  // rounded up to 1024
  EXPECT_EQ(arena.capacity(), 1024);
  arena.allocate(DType::kF32, {128});
  EXPECT_NO_THROW(arena.allocate(DType::kF32, {128}));
  try {
    arena.allocate(DType::kF32, {1});
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("'gradients' is full: 256 bytes requested, 0 of 1024 free"), std::string::npos) << message;
  }
  EXPECT_EQ(arena.used(), 1024);
}

TEST(Arena, RehearsalCountsWhatTheRealArenaNeeds) {
  auto fill = [](Arena& arena) {
    arena.allocate(DType::kF32, {100, 100});
    const Arena::Scope scope(arena);
    arena.allocate(DType::kF64, {1000});
    arena.allocate(DType::kI32, {1});
  };
  Arena plan = Arena::planning("activations", Device::kCpu);
  fill(plan);
  EXPECT_TRUE(plan.is_planning());
  EXPECT_EQ(plan.used(), 40192);
  EXPECT_EQ(plan.peak(), 40192 + 8192 + 256);
  Arena real("activations", Device::kCpu, plan.peak());
  EXPECT_NO_THROW(fill(real));
  EXPECT_EQ(real.peak(), real.capacity());
  Arena small("activations", Device::kCpu, plan.peak() - 1024);
  EXPECT_THROW(fill(small), Error);
}

TEST(Arena, MovedArenaOwnsTheMemory) {
  Arena first("parameters", Device::kCpu, 1024);
  const Tensor a = first.allocate(DType::kF32, {4});
  Arena second(std::move(first));
  a.data<float>()[3] = 5.0f;
  EXPECT_EQ(second.used(), 256);
  EXPECT_EQ(second.capacity(), 1024);
  EXPECT_EQ(second.name(), "parameters");
  EXPECT_NE(second.allocate(DType::kF32, {4}).raw(), a.raw());
}

TEST(Arena, RehearsalsOfMoreThanAnyMachineHasEndBeforeSizesOverflow) {
  Arena plan = Arena::planning("activations", Device::kCpu);
  EXPECT_THROW(plan.allocate(DType::kF32, {int64_t{1} << 40, int64_t{1} << 40}), UserError);
  EXPECT_THROW(plan.allocate(DType::kF64, {INT64_MAX, INT64_MAX, 2}), UserError);
  plan.allocate(DType::kF64, {int64_t{1} << 52});
  EXPECT_THROW(plan.allocate(DType::kF64, {int64_t{1} << 52}), UserError);
  EXPECT_EQ(plan.allocate(DType::kF64, {0, int64_t{1} << 40}).bytes(), 0);
}

TEST(Arena, MemoryThatDoesNotExistIsAUserError) {
#ifndef __SANITIZE_ADDRESS__  // whose allocator ends the program instead of returning nullptr
  EXPECT_THROW(Arena("activations", Device::kCpu, int64_t{1} << 60), UserError);
#endif
  EXPECT_THROW(Arena("activations", Device::kCuda, int64_t{1} << 60), std::runtime_error);  // with a GPU or without
}

TEST(Arena, MemoryThatThereIsNotIsAnErrorOfOneLine) {
  if (support::kSanitized) GTEST_SKIP() << "a sanitizer ends the process there";
  try {
    const Arena arena("activations", Device::kCpu, int64_t{1} << 55);
    FAIL();
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("out of memory: region 'activations' needs 34359738368 MiB; a smaller "), 0U) << text;
  }
}

}  // namespace
}  // namespace palimpsest
