// The folder of a run's checkpoints: which one is newest, what is kept, what is cleaned up, room and locks.
#include "trainer/checkpoint_folder.h"

#include <gtest/gtest.h>
#include <sys/mount.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/files.h"
#include "tests/trainer/checkpoint_fixture.h"

namespace palimpsest {
namespace {

using support::SmallFileSystem;
using support::TempDirectory;
using support::user_error_of;

using Names = std::vector<std::string>;

TEST(CheckpointFolder, NamesSortAndForeignNamesAreLeftAlone) {
  const TempDirectory folder;
  EXPECT_TRUE(list_checkpoints(folder / "none").empty());
  EXPECT_EQ(checkpoint_name(123), "step-000123");
  EXPECT_EQ(checkpoint_name(12345678), "step-12345678");
  for (const char* name : {"step-1000000", "step-000007", "step-999999", "step-7", "step-", "step--00001",
                           "step-000008x", "step-000009.partial", "notes", "step-99999999999999999999"})
    create_directories(folder / name);
  support::write_file(folder / "step-000003", "a file");
  std::vector<int64_t> steps;
  for (const CheckpointEntry& entry : list_checkpoints(folder.path())) steps.push_back(entry.step);
  EXPECT_EQ(steps, (std::vector<int64_t>{7, 999999, 1000000}));
  remove_leftovers(folder.path());
  EXPECT_EQ(names_in(folder.path()), (Names{"notes", "step-", "step--00001", "step-000003", "step-000008x", "step-7",
                                            "step-99999999999999999999"}));
}

TEST(CheckpointFolder, DamagedAndUnfinishedOnesAreSkippedWithTheReason) {
  const TempDirectory folder;
  for (const int64_t step : {10, 20, 30, 40, 50}) save_step(folder.path(), step);
  remove_file(folder / "step-000050/manifest.json");
  support::flip_bit(folder / "step-000040/manifest.json", 100, 4);
  const std::string cut = folder / "step-000030/rank-00000-of-00001.h5";
  support::write_file(cut, support::read_file(cut).substr(0, 5000));
  remove_file(folder / "step-000020/rank-00000-of-00001.h5");
  EXPECT_EQ(load_newest_exactly(folder.path()), 10);
  const NewestCheckpoint newest = use_newest_checkpoint(folder.path(), [](CheckpointReader&) {});
  EXPECT_EQ(newest.path, folder / "step-000010");
  ASSERT_EQ(newest.skipped.size(), 4U);
  const char* reasons[] = {"was not finished", "checksum does not match", "has 5000 bytes", "No such file"};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(newest.skipped[i].step, 50 - 10 * static_cast<int64_t>(i));
    EXPECT_NE(newest.skipped[i].reason.find(reasons[i]), std::string::npos) << newest.skipped[i].reason;
  }
}

TEST(CheckpointFolder, DamageFoundWhileLoadingFallsBackToo) {
  const TempDirectory folder;
  for (const int64_t step : {10, 20}) save_step(folder.path(), step);
  const std::string file = folder / "step-000020/rank-00000-of-00001.h5";
  const std::string content = support::read_file(file);
  const std::string values = bytes_of_step(20);
  const size_t place = content.find(values.substr(0, 64));  // the first tensor's values
  ASSERT_NE(place, std::string::npos);
  support::flip_bit(file, place + 20, 4);
  EXPECT_EQ(load_newest_exactly(folder.path()), 10);
}

TEST(CheckpointFolder, AllDamagedIsAnErrorAndNoneIsNot) {
  const TempDirectory folder;
  EXPECT_EQ(load_newest_exactly(folder.path()), -1);
  create_directories(folder / "step-000005");  // the first save ever was killed
  EXPECT_EQ(load_newest_exactly(folder.path()), -1);
  for (const int64_t step : {10, 20}) {
    save_step(folder.path(), step);
    support::flip_bit(folder / checkpoint_name(step) + "/manifest.json", 7, 4);
  }
  const std::string message = user_error_of([&] { load_newest_exactly(folder.path()); });
  EXPECT_NE(message.find("every checkpoint is damaged"), std::string::npos) << message;
  EXPECT_NE(message.find("step-000010"), std::string::npos) << message;
  EXPECT_NE(message.find("step-000020"), std::string::npos) << message;
}

TEST(CheckpointFolder, ErrorsThatAreNotDamageDoNotFallBack) {
  const TempDirectory folder;
  for (const int64_t step : {10, 20}) save_step(folder.path(), step);
  SmallModel::Specs other = SmallModel::specs();
  other[2].second = {7, 1, 3};
  SmallModel model(other);
  const std::string message = user_error_of([&] {
    use_newest_checkpoint(folder.path(), [&](CheckpointReader& reader) {
      reader.load(model.registry(), CheckpointContent::kWeightsAndOptimizer);
    });
  });
  EXPECT_NE(message.find("step-000020: does not fit the model"), std::string::npos) << message;
}

TEST(CheckpointFolder, APathMayBeACheckpointARunOrItsFolder) {
  const TempDirectory run;
  const std::string checkpoints = run / "checkpoints";
  for (const int64_t step : {10, 20}) save_step(checkpoints, step);
  for (const std::string& path : {run.path(), checkpoints, checkpoints + "/step-000020"}) {
    int64_t step = 0;
    use_checkpoint(path, [&](CheckpointReader& reader) { step = reader.manifest().header.state.step; });
    EXPECT_EQ(step, 20) << path;
  }
  for (const std::string& path : {run / "none", std::string("/dev/null")})
    EXPECT_NE(user_error_of([&] { use_checkpoint(path, [](CheckpointReader&) {}); }).find("no checkpoint here"),
              std::string::npos);
  create_directories(run / "empty/checkpoints");
  user_error_of([&] { use_checkpoint(run / "empty", [](CheckpointReader&) {}); });
}

// ---- what is kept ---------------------------------------------------------------------------------------------------

TEST(CheckpointFolder, KeepsTheLastAndTheMultiples) {
  const TempDirectory folder;
  const SmallModel model;
  CheckpointWriter writer({folder.path(), /*keep_last=*/2, /*keep_every=*/30}, model.blocks(), std::nullopt);
  for (int64_t step = 10; step <= 80; step += 10) writer.save(header_of(step));
  for (const FinishedSave& save : writer.finish()) EXPECT_TRUE(save.warnings.empty());
  EXPECT_EQ(names_in(folder.path()), (Names{"step-000030", "step-000060", "step-000070", "step-000080"}));
}

TEST(CheckpointFolder, DamagedAndNewerOnesAreNeitherCountedNorRemoved) {
  const TempDirectory folder;
  for (const int64_t step : {10, 20, 30, 90}) save_step(folder.path(), step);
  remove_old_checkpoints(folder.path(), /*newest=*/30, /*keep_last=*/2, 0, /*damaged=*/{20});
  EXPECT_EQ(names_in(folder.path()), (Names{"step-000010", "step-000020", "step-000030", "step-000090"}));
  remove_old_checkpoints(folder.path(), /*newest=*/30, /*keep_last=*/0, 0, {});  // the newest stays whatever is asked
  EXPECT_EQ(names_in(folder.path()), (Names{"step-000030", "step-000090"}));
}

TEST(CheckpointFolder, RemovingByHandDuringARunDoesNoHarm) {
  const TempDirectory folder;
  const SmallModel model;
  CheckpointWriter writer({folder.path(), 2}, model.blocks(), std::nullopt);
  writer.save(header_of(10));
  writer.save(header_of(20));
  remove_tree(folder / "step-000010");
  rename_path(folder / "step-000020", folder / "mine");
  writer.save(header_of(30));
  remove_tree(folder.path());
  writer.save(header_of(40));
  EXPECT_EQ(writer.finish().size(), 4U);
  EXPECT_EQ(names_in(folder.path()), (Names{"step-000040"}));
}

TEST(CheckpointFolder, FailureToCleanUpIsAWarning) {
  const TempDirectory folder;
  save_step(folder.path(), 10);
  create_directories(folder / "step-000010/in use");
  if (::mount("tmpfs", (folder / "step-000010/in use").c_str(), "tmpfs", 0, "size=4096") != 0)
    GTEST_SKIP() << "only root may mount a file system";
  const SmallModel model;
  CheckpointWriter writer({folder.path(), 1}, model.blocks(), std::nullopt);
  writer.save(header_of(20));
  const std::vector<FinishedSave> finished = writer.finish();
  ::umount2((folder / "step-000010/in use").c_str(), MNT_DETACH);
  ASSERT_EQ(finished.size(), 1U);
  ASSERT_EQ(finished[0].warnings.size(), 1U);
  EXPECT_NE(finished[0].warnings[0].find("step-000010/in use"), std::string::npos) << finished[0].warnings[0];
  EXPECT_TRUE(has_manifest(folder / "step-000020"));
  EXPECT_FALSE(has_manifest(folder / "step-000010"));  // half of it is not taken for a checkpoint
}

// ---- start of a run -------------------------------------------------------------------------------------------------

TEST(CheckpointFolder, LeftoversOfKilledSavesAreRemovedAtTheNextStart) {
  const TempDirectory folder;
  save_step(folder.path(), 10);
  save_step(folder.path(), 20);
  save_step(folder.path(), 40);
  create_directories(folder / "step-000030.partial");
  support::write_file(folder / "step-000030.partial/rank-00000-of-00001.h5", "half a file");
  rename_path(folder / "step-000020", folder / "step-000020.replaced");  // killed before the new one had its name
  create_directories(folder / "step-000040.replaced");                   // killed before the old one was removed
  create_directories(folder / "step-000050");                            // killed before the manifest
  const SmallModel model;
  const CheckpointWriter writer({folder.path(), 9}, model.blocks(), std::nullopt);
  EXPECT_EQ(writer.leftovers().size(), 4U);
  EXPECT_EQ(names_in(folder.path()), (Names{"step-000010", "step-000020", "step-000040"}));
  EXPECT_EQ(load_newest_exactly(folder.path()), 40);
}

TEST(CheckpointFolder, ASecondWriterIsRefused) {
  const TempDirectory folder;
  const SmallModel model;
  auto first = std::make_unique<CheckpointWriter>(SavePolicy{folder.path(), 2}, model.blocks(), std::nullopt);
  const auto start_another = [&] { const CheckpointWriter another({folder.path(), 2}, model.blocks(), std::nullopt); };
  EXPECT_NE(user_error_of(start_another).find("another process"), std::string::npos);
  first.reset();
  start_another();
}

TEST(CheckpointFolder, RoomIsCheckedBeforeTraining) {
  const SmallFileSystem disk(1 << 20);
  if (!disk.mounted()) GTEST_SKIP() << "only root may mount a file system";
  const std::string folder = disk / "run/checkpoints";
  check_room_for_checkpoints(folder, 300000, /*keep_last=*/2);
  EXPECT_TRUE(is_directory(folder));
  const std::string message = user_error_of([&] { check_room_for_checkpoints(folder, 400000, 2); });
  EXPECT_EQ(message.find(folder + ": 1200000 bytes are required (3 checkpoints of 400000) but 10"), 0U) << message;
  save_step(folder, 10);  // counts as one of the three
  check_room_for_checkpoints(folder, 400000, 2);
}

}  // namespace
}  // namespace palimpsest
