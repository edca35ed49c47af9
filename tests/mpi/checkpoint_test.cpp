// Checkpoints of many ranks: who writes and reads what, in every pair of layouts; what all ranks agree on.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "data/file_ops.h"
#include "tests/mpi/sharded_model.h"
#include "tests/mpi/shared_directory.h"
#include "tests/mpi/world.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_inspect.h"
#include "trainer/checkpoint_merge.h"
#include "trainer/checkpoint_reader.h"
#include "trainer/checkpoint_writer.h"

namespace palimpsest {
namespace {

using mpi_test::bytes_of;
using mpi_test::header_of;
using mpi_test::ShardedModel;
using mpi_test::SharedDirectory;

constexpr auto kAll = CheckpointContent::kWeightsAndOptimizer;

std::unique_ptr<Mesh> mesh_of(const MeshShape& shape) {
  return mpi_test::world().make_mesh(shape, mpi_test::world_watchdog());
}

bool too_few_ranks(int64_t ranks) {
  return mpi_test::world().world_size() < ranks;
}

// Saves `step` of a model on this mesh, blocking.
void save(const std::string& directory, int64_t step, const Mesh& mesh, int64_t zero = 1) {
  ShardedModel model(mesh, zero);
  model.fill(step);
  CheckpointWriter writer({directory, 2}, model.owned(), std::nullopt, mesh.world());
  writer.save(header_of(step, mesh));
  EXPECT_EQ(writer.finish().size(), 1U);
}

// Dataset records by name, block and all, of a checkpoint of one rank.
std::map<std::string, uint32_t> checksums_of(const std::string& folder) {
  std::map<std::string, uint32_t> checksums;
  const CheckpointReader reader(folder);
  for (const DatasetRecord& record : reader.manifest().datasets) {
    EXPECT_EQ(record.region, whole_region(record.global_shape));
    EXPECT_TRUE(checksums.emplace(record.name, record.crc32).second) << record.name;
  }
  return checksums;
}

struct Layout {
  MeshShape shape;
  int64_t zero = 1;
  std::unique_ptr<Mesh> mesh;  // of the ranks in it
};

std::vector<Layout> layouts() {
  const std::pair<MeshShape, int64_t> all[] = {{{1, 1, 1}, 1}, {{2, 1, 1}, 2}, {{1, 1, 2}, 1},
                                               {{3, 1, 1}, 3}, {{1, 1, 4}, 1}, {{2, 1, 2}, 3},
                                               {{3, 1, 2}, 1}, {{2, 1, 4}, 2}, {{8, 1, 1}, 3}};
  std::vector<Layout> layouts;
  for (const auto& [shape, zero] : all)
    if (!too_few_ranks(shape.ranks())) layouts.push_back({shape, zero, mesh_of(shape)});
  return layouts;
}

TEST(ShardedCheckpoint, EveryLayoutLoadsEveryOthersAndReadsOnlyWhatItHolds) {
  const auto everyone = mesh_of({.data = mpi_test::world().world_size()});
  const SharedDirectory root(everyone->world());
  const std::vector<Layout> all = layouts();
  std::map<std::string, uint32_t> straight;  // checksums of one rank's checkpoint
  for (size_t saved = 0; saved < all.size(); ++saved) {
    const auto& [shape, zero, mesh] = all[saved];
    const std::string directory = root / ("layout-" + std::to_string(saved)), folder = directory + "/step-000100";
    if (mesh) {
      save(directory, 100, *mesh, zero);
      const int64_t all_bytes = sum_over(mesh->world(), bytes_of(ShardedModel(*mesh, zero).owned()));
      EXPECT_EQ(all_bytes, bytes_of(ShardedModel(Mesh::single()).owned()));  // each element once
    }
    max_over(everyone->world(), 0);
    for (size_t loaded = 0; loaded < all.size(); ++loaded) {
      if (!all[loaded].mesh) continue;
      SCOPED_TRACE("saved in layout " + std::to_string(saved) + ", loaded in layout " + std::to_string(loaded));
      ShardedModel model(*all[loaded].mesh, all[loaded].zero);
      CheckpointReader reader(folder);
      reader.load(model.registry(), kAll);
      EXPECT_EQ(ShardedModel::num_wrong(model.wanted(), 100), 0);
      EXPECT_EQ(reader.bytes_read(), bytes_of(model.wanted()));
    }
    if (everyone->world().rank() == 0) {
      const CheckpointReader reader(folder);
      EXPECT_EQ(reader.manifest().header.world, header_of(100, *mesh).world);
      EXPECT_EQ(reader.manifest().files.size(), static_cast<size_t>(shape.ranks()));
      EXPECT_TRUE(inspect_checkpoint(folder).damage.empty());
      EXPECT_TRUE(merge_checkpoint(folder, directory + "/merged").empty());
      const CheckpointReader merged(directory + "/merged");
      EXPECT_EQ(merged.manifest().header.world, WorldLayout());
      if (saved == 0) straight = checksums_of(folder);
      EXPECT_EQ(checksums_of(directory + "/merged"), straight);
    }
    if (max_over(everyone->world(), testing::Test::HasFailure()) != 0) return;
  }
}

// Memory for one snapshot of what this rank saves.
Arena arena_for_snapshot(const ShardedModel& model) {
  Arena planning = Arena::planning("snapshot", Device::kCpu);
  allocate_snapshot(model.owned(), planning);
  return {"snapshot", Device::kCpu, planning.peak()};
}

TEST(ShardedCheckpoint, BackgroundAndBlockingSavesGiveIdenticalFiles) {
  if (too_few_ranks(4)) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = mesh_of({.data = 2, .tensor = 2});
  if (!mesh) return;
  const SharedDirectory root(mesh->world());
  ShardedModel model(*mesh);
  Arena arena = arena_for_snapshot(model);
  {
    CheckpointWriter blocking({root / "blocking", 3}, model.owned(), std::nullopt, mesh->world());
    CheckpointWriter background({root / "background", 3}, model.owned(), allocate_snapshot(model.owned(), arena),
                                mesh->world());
    for (const int64_t step : {10, 20, 30}) {
      model.fill(step);
      blocking.save(header_of(step, *mesh));
      background.save(header_of(step, *mesh));
      model.fill(999);  // training goes on
    }
    EXPECT_EQ(blocking.finish().size(), 3U);
    EXPECT_EQ(background.finish().size(), 3U);
  }
  if (mesh->world().rank() != 0) return;
  for (const char* step : {"step-000010", "step-000020", "step-000030"}) {
    const std::string folder = std::string(step) + "/";
    const std::vector<std::string> names = list_directory(root / ("blocking/" + folder));
    EXPECT_EQ(names.size(), 5U);
    for (const std::string& name : names)
      EXPECT_TRUE(support::read_file(root / ("blocking/" + folder + name)) ==
                  support::read_file(root / ("background/" + folder + name)))
          << folder << name;
  }
}

// A save of step 1 in the background that has begun, while the disk of rank 1 is slow.
struct SlowSave {
  explicit SlowSave(const Mesh& mesh)
      : root(mesh.world()),
        model(mesh),
        arena(arena_for_snapshot(model)),
        writer({root / "run", 2}, model.owned(), allocate_snapshot(model.owned(), arena), mesh.world()),
        folder(root / "run/step-000001") {
    if (mesh.world().rank() == 1) inject_file_delay(10);
    model.fill(1);
    writer.save(header_of(1, mesh));
  }
  ~SlowSave() { inject_file_delay(0); }
  // The weights as they were at the save.
  void expect_loads() {
    CheckpointReader(folder).load(model.registry(), kAll);
    EXPECT_EQ(ShardedModel::num_wrong(model.wanted(), 1), 0);
  }

  SharedDirectory root;
  ShardedModel model;
  Arena arena;
  CheckpointWriter writer;
  std::string folder;
};

// One rank's disk is slow: the others train on, and the checkpoint comes to stand at the same step for all.
TEST(ShardedCheckpoint, RanksTrainOnWhileOneStillWrites) {
  if (too_few_ranks(2)) GTEST_SKIP() << "needs 2 ranks";
  const auto mesh = mesh_of({.data = 2});
  if (!mesh) return;
  SlowSave slow(*mesh);
  int64_t steps_while_writing = 0;
  std::vector<FinishedSave> finished;
  while ((finished = slow.writer.take_finished()).empty()) {
    slow.model.fill(2 + steps_while_writing++);
    EXPECT_EQ(max_over(mesh->world(), steps_while_writing), steps_while_writing);
  }
  inject_file_delay(0);
  EXPECT_GE(steps_while_writing, 3);
  ASSERT_EQ(finished.size(), 1U);
  EXPECT_EQ(finished[0].step, 1);
  EXPECT_EQ(finished[0].path, slow.folder);
  if (mesh->world().rank() == 0) {
    EXPECT_GE(finished[0].seconds, 0.1);
    EXPECT_GT(finished[0].bytes, bytes_of(ShardedModel(Mesh::single()).owned()));
  }
  slow.expect_loads();
}

// The job may die before its next step ends: a save that all ranks have written must not need it.
TEST(ShardedCheckpoint, ASaveBecomesACheckpointBeforeTheNextStepEnds) {
  if (too_few_ranks(2)) GTEST_SKIP() << "needs 2 ranks";
  const auto mesh = mesh_of({.data = 2});
  if (!mesh) return;
  SlowSave slow(*mesh);
  for (int i = 0; i < 600 && !has_manifest(slow.folder); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  inject_file_delay(0);
  EXPECT_TRUE(has_manifest(slow.folder));
  slow.expect_loads();
  EXPECT_EQ(slow.writer.finish().size(), 1U);
  max_over(mesh->world(), 0);
  EXPECT_EQ(list_directory(slow.folder).size(), 3U);  // two files and the manifest
}

// ---- failures -------------------------------------------------------------------------------------------------------

// What a call threw; empty when it did not.
template <class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names = list_directory(directory);
  std::erase(names, "lock");
  return names;
}

TEST(ShardedCheckpoint, FailureOnOneRankIsOneOfAllAndTheOlderCheckpointStays) {
  if (too_few_ranks(4)) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = mesh_of({.data = 2, .tensor = 2});
  if (!mesh) return;
  Communicator& world = mesh->world();
  ShardedModel model(*mesh);
  for (const int64_t failing_rank : {0, 2}) {
    int64_t num_errors = 0;
    // Every seventh operation, from another start for each rank; the last are those that find no operation to fail.
    for (int64_t operation = 1 + failing_rank;; operation += 7) {
      SCOPED_TRACE("rank " + std::to_string(failing_rank) + ", operation " + std::to_string(operation));
      const SharedDirectory root(world);
      save(root.path(), 10, *mesh);
      CheckpointWriter writer({root.path(), 2}, model.owned(), std::nullopt, world);
      model.fill(20);
      const int64_t before = num_file_operations();
      if (world.rank() == failing_rank) inject_file_fault(FileFault::kFail, operation);
      const std::string error = error_of([&] { writer.save(header_of(20, *mesh)); });
      inject_file_fault(FileFault::kNone);
      const bool struck = max_over(world, world.rank() == failing_rank && num_file_operations() - before >= operation);
      EXPECT_EQ(gather_texts(world, error), std::vector<std::string>(4, error));
      if (!error.empty()) {
        ++num_errors;
        EXPECT_NE(error.find("No space left on device"), std::string::npos) << error;
        EXPECT_NE(error.find("rank " + std::to_string(failing_rank)), std::string::npos) << error;
        EXPECT_EQ(names_in(root.path()), std::vector<std::string>{"step-000010"});
        CheckpointReader(root / "step-000010").load(model.registry(), kAll);
        EXPECT_EQ(ShardedModel::num_wrong(model.wanted(), 10), 0);
        // With room again, saving goes on.
        max_over(world, 0);
        model.fill(20);
        EXPECT_EQ(error_of([&] { writer.save(header_of(20, *mesh)); }), "");
      }
      CheckpointReader(root / "step-000020").load(model.registry(), kAll);
      EXPECT_EQ(ShardedModel::num_wrong(model.wanted(), 20), 0);
      if (max_over(world, testing::Test::HasFailure()) != 0) return;
      if (!struck) break;
    }
    EXPECT_GE(num_errors, 3);
  }
}

TEST(ShardedCheckpoint, DamageThatOneRankFindsCountsForAll) {
  if (too_few_ranks(4)) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = mesh_of({.data = 4});
  if (!mesh) return;
  Communicator& world = mesh->world();
  const SharedDirectory root(world);
  save(root.path(), 10, *mesh);
  save(root.path(), 20, *mesh);
  // In the same layout rank 2 alone reads this file.
  const std::string victim = root / "step-000020/rank-00002-of-00004.h5";
  if (world.rank() == 0) support::flip_bit(victim, static_cast<size_t>(file_size(victim)) / 2, 3);
  max_over(world, 0);
  ShardedModel model(*mesh);
  const NewestCheckpoint newest = use_newest_checkpoint(
      root.path(), [&](CheckpointReader& reader) { reader.load(model.registry(), kAll); }, world);
  EXPECT_EQ(newest.path, root / "step-000010");
  EXPECT_EQ(ShardedModel::num_wrong(model.wanted(), 10), 0);
  ASSERT_EQ(newest.skipped.size(), 1U);
  EXPECT_EQ(newest.skipped[0].step, 20);
  EXPECT_TRUE(newest.skipped[0].reason.starts_with("rank 2: " + victim)) << newest.skipped[0].reason;
  EXPECT_EQ(error_of([&] {
              use_checkpoint(
                  root / "step-000020", [&](CheckpointReader& reader) { reader.load(model.registry(), kAll); }, world);
            }),
            newest.skipped[0].reason);
  // Every file is verified.
  if (world.rank() == 0) {
    EXPECT_TRUE(inspect_checkpoint(root / "step-000010").damage.empty());
    const CheckpointReport report = inspect_checkpoint(root / "step-000020");
    ASSERT_FALSE(report.damage.empty());
    EXPECT_NE(report.damage[0].find("rank-00002-of-00004.h5"), std::string::npos) << report.damage[0];
    EXPECT_NE(report.text.find("  ranks             4\n"), std::string::npos) << report.text;
    EXPECT_NE(error_of([&] { merge_checkpoint(root / "step-000020", root / "merged"); }), "");
    EXPECT_FALSE(path_exists(root / "merged"));
  }
}

TEST(ShardedCheckpoint, RoomIsAskedForTheFilesOfAllRanks) {
  if (too_few_ranks(2)) GTEST_SKIP() << "needs 2 ranks";
  const auto mesh = mesh_of({.data = 2});
  if (!mesh) return;
  const SharedDirectory root(mesh->world());
  const int64_t free = mesh->world().rank() == 0 ? free_bytes(root.path()) : 0;
  const int64_t available = max_over(mesh->world(), free);
  EXPECT_EQ(error_of([&] { check_room_for_checkpoints(root.path(), 1000, 1, mesh->world()); }), "");
  const std::string error = error_of([&] { check_room_for_checkpoints(root.path(), available / 3, 1, mesh->world()); });
  EXPECT_NE(error.find("bytes are required (2 checkpoints of"), std::string::npos) << error;
}

}  // namespace
}  // namespace palimpsest
