// `palimpsest checkpoint merge`. That every layout gives the same file: tests/mpi/checkpoint_test.cpp.
#include "trainer/checkpoint_merge.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include "tests/support/program.h"
#include "tests/support/tensors.h"
#include "tests/trainer/checkpoint_fixture.h"
#include "trainer/console.h"
#include "trainer/memory_plan.h"

namespace palimpsest {
namespace {

using support::OwnedTensor;
using support::TempDirectory;
using support::user_error_of;

float value_at(int64_t row, int64_t column) {
  return static_cast<float>(row) * 4096.0F + static_cast<float>(column);
}

// [rows, columns], cut over four ranks in both dimensions.
void write_cut_tensor(const std::string& folder, int64_t rows, int64_t columns) {
  create_directories(folder + ".partial");
  Manifest manifest{header_of(9), {}, {}};
  manifest.header.world = {.ranks = 4, .data = 2, .tensor = 2};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const int64_t top = rows / 3, left = columns / 2 + 1;
    const Shape start = {rank / 2 * top, rank % 2 * left};
    const Shape shape = {rank / 2 == 0 ? top : rows - top, rank % 2 == 0 ? left : columns - left};
    const OwnedTensor memory(DType::kF32, shape);
    float* values = memory.tensor().data<float>();
    for (int64_t i = 0; i < shape.numel(); ++i) values[i] = value_at(start[0] + i / shape[1], start[1] + i % shape[1]);
    RankFileWriter writer(folder + ".partial", rank, 4);
    writer.add({"model/w", {rows, columns}, start, memory.tensor()});
    const RankFile file = writer.finish();
    manifest.files.push_back(file.file);
    manifest.datasets.insert(manifest.datasets.end(), file.datasets.begin(), file.datasets.end());
  }
  EXPECT_TRUE(publish_checkpoint(folder, manifest).empty());
}

TEST(CheckpointMerge, OfOneRankGivesTheSameFiles) {
  const TempDirectory root;
  SmallModel model(SmallModel::specs_with_large_tensors());
  model.fill(5);
  write_checkpoint(root / "in", header_of(20), model.blocks());
  EXPECT_TRUE(merge_checkpoint(root / "in", root / "out").empty());
  for (const char* name : {"manifest.json", "rank-00000-of-00001.h5"})
    EXPECT_TRUE(support::read_file(root / ("in/" + std::string(name))) ==
                support::read_file(root / ("out/" + std::string(name))))
        << name;
}

TEST(CheckpointMerge, PutsTensorsOfManyPiecesTogetherInBoundedMemory) {
  const TempDirectory root;
  constexpr int64_t kRows = 5003, kColumns = 2053;  // 39 MiB
  write_cut_tensor(root / "in", kRows, kColumns);
  const int status = support::run_in_child([&] {
    const int64_t before = peak_resident_bytes();
    int64_t bytes = 0;
    merge_checkpoint(root / "in", root / "out", [&](int64_t written) { bytes += written; });
    const int64_t grown = peak_resident_bytes() - before;
    std::printf("merging %lld bytes took %lld bytes of memory\n", static_cast<long long>(bytes),
                static_cast<long long>(grown));
    std::exit(bytes == kRows * kColumns * 4 && (support::kSanitized || grown < (int64_t{24} << 20)) ? 0 : 1);
  });
  EXPECT_EQ(status, 0);
  CheckpointReader merged(root / "out");
  EXPECT_EQ(merged.manifest().files.size(), 1U);
  const OwnedTensor whole(DType::kF32, {kRows, kColumns});
  merged.read({"model/w", {kRows, kColumns}, {0, 0}, whole.tensor()});
  const float* values = whole.tensor().data<float>();
  for (int64_t i = 0; i < kRows * kColumns; ++i) ASSERT_EQ(values[i], value_at(i / kColumns, i % kColumns)) << i;
}

TEST(CheckpointMerge, DamageAndAnExistingFolderAreErrors) {
  const TempDirectory root;
  write_cut_tensor(root / "in", 31, 17);
  create_directories(root / "there");
  EXPECT_NE(user_error_of([&] { merge_checkpoint(root / "in", root / "there"); }).find("already exists"),
            std::string::npos);
  const std::string victim = root / "in/rank-00003-of-00004.h5";
  const float last = value_at(30, 16);
  const size_t place = support::read_file(victim).find(std::string(reinterpret_cast<const char*>(&last), sizeof(last)));
  ASSERT_NE(place, std::string::npos);
  support::flip_bit(victim, place, 2);
  const std::string message = user_error_of([&] { merge_checkpoint(root / "in", root / "out"); });
  EXPECT_NE(message.find("rank-00003-of-00004.h5"), std::string::npos) << message;
  EXPECT_FALSE(path_exists(root / "out"));
  EXPECT_FALSE(path_exists(root / "out.partial"));
}

TEST(CheckpointMerge, IsACommand) {
  const TempDirectory root;
  write_cut_tensor(root / "checkpoints/step-000009", 31, 17);
  const support::ProgramResult result = support::run_palimpsest({"checkpoint", "merge", root.path(), root / "merged"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("merged " + root / "checkpoints/step-000009"), std::string::npos) << result.out;
  EXPECT_EQ(support::run_palimpsest({"inspect", "--verify", root / "merged"}).exit_code, 0);
  EXPECT_EQ(support::run_palimpsest({"inspect", "--verify", root.path()}).exit_code, 0);
  const support::ProgramResult again = support::run_palimpsest({"checkpoint", "merge", root.path(), root / "merged"});
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_TRUE(support::is_one_line(again.err)) << again.err;
}

}  // namespace
}  // namespace palimpsest
