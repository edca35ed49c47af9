// Saving and loading: exactness, layouts, what does not fit, background saves.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/tensors.h"
#include "tests/trainer/checkpoint_fixture.h"

namespace palimpsest {
namespace {

using support::OwnedTensor;
using support::TempDirectory;
using support::user_error_of;

constexpr auto kAll = CheckpointContent::kWeightsAndOptimizer;

TEST(Checkpoint, RoundTripIsBitExact) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const TempDirectory folder;
    const auto specs = dtype == DType::kF32 ? SmallModel::specs_with_large_tensors() : SmallModel::specs();
    SmallModel saved(specs, dtype);
    saved.fill(5);
    write_checkpoint(folder / "step-000020", header_of(20), saved.blocks());

    SmallModel loaded(specs, dtype);
    ASSERT_FALSE(loaded.bytes() == saved.bytes());
    CheckpointReader reader(folder / "step-000020");
    reader.load(loaded.registry(), kAll);
    EXPECT_TRUE(loaded.bytes() == saved.bytes()) << name_of(dtype);
    const Tensor& A_log = loaded.registry().find("model.layers.0.self_attn.A_log")->value;
    if (dtype == DType::kF32) {
      EXPECT_EQ(A_log.data<float>()[0], 0.001F);
    }
    EXPECT_EQ(reader.manifest().header.state, header_of(20).state);
    EXPECT_EQ(reader.manifest().header.config, header_of(20).config);
    EXPECT_EQ(reader.manifest().header.program, header_of(20).program);
    EXPECT_EQ(reader.manifest().header.world, WorldLayout());
    EXPECT_EQ(list_directory(folder / "step-000020"),
              (std::vector<std::string>{"manifest.json", "rank-00000-of-00001.h5"}));
    EXPECT_EQ(list_directory(folder.path()), (std::vector<std::string>{"step-000020"}));
  }
}

TEST(Checkpoint, KeepsEveryBitPattern) {
  const TempDirectory folder;
  SmallModel saved;
  auto* values = static_cast<uint32_t*>(saved.registry().find("model.embed_tokens.weight")->value.raw());
  const uint32_t patterns[] = {0x7fc00001, 0xffc12345, 0x7f800000, 0xff800000, 0x80000000, 1, 0x807fffff, 0x7f800001};
  for (const uint32_t pattern : patterns) *values++ = pattern;  // NaNs, infinities, -0, subnormal numbers
  write_checkpoint(folder / "step-000001", header_of(1), saved.blocks());
  SmallModel loaded;
  CheckpointReader(folder / "step-000001").load(loaded.registry(), kAll);
  EXPECT_TRUE(loaded.bytes() == saved.bytes());
}

TEST(Checkpoint, FileSizeIsPredicted) {
  for (const auto& specs : {SmallModel::specs(), SmallModel::specs_with_large_tensors()}) {
    const TempDirectory folder;
    const SmallModel model(specs);
    write_checkpoint(folder / "step-000001", header_of(1), model.blocks());
    const int64_t used =
        file_size(folder / "step-000001/rank-00000-of-00001.h5") + file_size(folder / "step-000001/manifest.json");
    EXPECT_LE(used, stored_bytes(model.blocks()));
    EXPECT_GE(used + (int64_t{1} << 20), stored_bytes(model.blocks()));
    // No more than the values, 1 % of them for chunks that reach over the edge, and some for names and places.
    EXPECT_LE(used, static_cast<int64_t>(1.01 * static_cast<double>(model.bytes().size())) + (int64_t{300} << 10));
  }
}

// ---- pieces and regions ---------------------------------------------------------------------------------------------

TEST(CheckpointBlock, PiecesFollowMemoryAndFitFourMebibytes) {
  const std::vector<Shape> shapes = {{1},
                                     {3},
                                     {7, 1, 4},
                                     {1031, 2053},
                                     {2, 3000001},
                                     {1, 1, 1100003},
                                     {5, 2, 600007},
                                     {1048577},
                                     {3, 5, 7, 11, 13000}};
  for (const Shape& shape : shapes) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      int64_t next = 0, largest = 0;
      for_each_piece(shape, dtype, [&](const Region& piece) {
        int64_t first = 0, last = 0;  // index of the piece's first and last element
        for (int i = 0; i < shape.num_dims(); ++i) {
          first = first * shape[i] + piece.start[i];
          last = last * shape[i] + piece.start[i] + piece.shape[i] - 1;
        }
        EXPECT_EQ(first, next) << shape.str();
        EXPECT_EQ(last - first + 1, piece.shape.numel()) << shape.str();  // contiguous
        next = last + 1;
        largest = std::max(largest, piece.shape.numel() * size_of(dtype));
      });
      EXPECT_EQ(next, shape.numel());
      EXPECT_LE(largest, int64_t{4} << 20);
      EXPECT_EQ(largest, piece_bytes(shape, dtype));
    }
  }
}

// A tensor cut over ranks in both dimensions, unevenly; rank 2 holds nothing of it.
struct Cut {
  int64_t rank;
  Region region;
};
const std::vector<Cut> kCuts = {
    {0, {{0, 0}, {13, 7}}}, {0, {{0, 7}, {13, 4}}}, {1, {{13, 0}, {1, 11}}}, {3, {{14, 0}, {17, 11}}}};
constexpr int64_t kRanks = 4;

float value_at(int64_t row, int64_t column) {
  return static_cast<float>(row * 100 + column) + 0.25F;
}

// Saves [31, 11] in the pieces of kCuts; datasets of one file have different names, so rank 0's second piece belongs to
// rank 4.
void write_cut_checkpoint(const std::string& folder) {
  create_directories(folder + ".partial");
  Manifest manifest;
  manifest.header = header_of(9);
  manifest.header.world = {kRanks + 1, 1, 1, kRanks + 1, 1};
  std::vector<OwnedTensor> memory;
  memory.reserve(kCuts.size());
  for (int64_t rank = 0; rank < kRanks + 1; ++rank) {
    std::vector<CheckpointBlock> blocks;
    for (size_t i = 0; i < kCuts.size(); ++i) {
      if ((i == 1 ? kRanks : kCuts[i].rank) != rank) continue;
      const auto& [start, shape] = kCuts[i].region;
      const Tensor block = memory.emplace_back(DType::kF32, shape).tensor();
      for (int64_t r = 0; r < shape[0]; ++r)
        for (int64_t c = 0; c < shape[1]; ++c)
          block.data<float>()[r * shape[1] + c] = value_at(start[0] + r, start[1] + c);
      blocks.push_back({"model/w", {31, 11}, start, block});
    }
    RankFileWriter writer(folder + ".partial", rank, kRanks + 1);
    for (const CheckpointBlock& block : blocks) writer.add(block);
    const RankFile file = writer.finish();
    manifest.files.push_back(file.file);
    manifest.datasets.insert(manifest.datasets.end(), file.datasets.begin(), file.datasets.end());
  }
  EXPECT_TRUE(publish_checkpoint(folder, manifest).empty());
}

TEST(CheckpointBlock, AnyRegionIsReadFromAnyLayout) {
  const TempDirectory folder;
  write_cut_checkpoint(folder / "step-000009");
  CheckpointReader reader(folder / "step-000009");
  const std::vector<Region> regions = {{{0, 0}, {31, 11}}, {{0, 0}, {1, 1}},  {{30, 10}, {1, 1}}, {{12, 5}, {5, 4}},
                                       {{0, 6}, {31, 2}},  {{13, 3}, {1, 5}}, {{5, 0}, {20, 11}}, {{14, 0}, {17, 11}}};
  for (const Region& region : regions) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      OwnedTensor out(dtype, region.shape);
      reader.read({"model/w", {31, 11}, region.start, out.tensor()});
      std::vector<double> expected;
      for (int64_t r = 0; r < region.shape[0]; ++r)
        for (int64_t c = 0; c < region.shape[1]; ++c)
          expected.push_back(value_at(region.start[0] + r, region.start[1] + c));
      EXPECT_EQ(support::values_of(out), expected) << region.start.str() << region.shape.str();
      EXPECT_TRUE(out.surroundings_untouched());
    }
  }
}

TEST(CheckpointBlock, OnlyOverlappingFilesAreRead) {
  const TempDirectory folder;
  write_cut_checkpoint(folder / "step-000009");
  CheckpointReader reader(folder / "step-000009");
  // Rank 3 holds rows 14 and later. Its bytes are destroyed after the sizes were checked.
  const std::string victim = folder / "step-000009/rank-00003-of-00005.h5";
  support::write_file(victim, std::string(static_cast<size_t>(file_size(victim)), '\0'));
  OwnedTensor above(DType::kF32, {14, 11}), below(DType::kF32, {15, 11});
  reader.read({"model/w", {31, 11}, {0, 0}, above.tensor()});
  EXPECT_EQ(support::values_of(above)[13 * 11 + 10], value_at(13, 10));
  EXPECT_THROW(reader.read({"model/w", {31, 11}, {0, 0}, below.tensor()}), CheckpointDamage);
}

// ---- what does not fit ----------------------------------------------------------------------------------------------

TEST(Checkpoint, MissingExtraAndMisshapenParametersAreNamed) {
  const TempDirectory folder;
  SmallModel::Specs other = SmallModel::specs();
  other[0].second = {67, 13};
  other[1].first = "model.layers.0.self_attn.B_log";
  for (int i = 0; i < 9; ++i) other.push_back({"model.extra." + std::to_string(i), {2}});
  write_checkpoint(folder / "step-000001", header_of(1), SmallModel(other).blocks());
  SmallModel model;
  const std::string before = model.bytes();
  CheckpointReader reader(folder / "step-000001");
  const std::string message = user_error_of([&] { reader.load(model.registry(), CheckpointContent::kWeights); });
  EXPECT_EQ(message,
            folder / "step-000001" +
                ": does not fit the model; missing model/model.layers.0.self_attn.A_log; not in the model: "
                "model/model.extra.0, model/model.extra.1, model/model.extra.2, model/model.extra.3, "
                "model/model.extra.4 and 5 more; of another shape: model/model.embed_tokens.weight is [67, 13] "
                "in the checkpoint and [67, 12] in the model");
  EXPECT_TRUE(model.bytes() == before);
}

TEST(Checkpoint, WeightsAloneDoNotResumeButLoad) {
  const TempDirectory folder;
  SmallModel saved(SmallModel::specs(), DType::kF32, ParameterUse::kInference);
  saved.fill(4);
  write_checkpoint(folder / "imported/", header_of(4), saved.blocks());
  SmallModel training;
  CheckpointReader reader(folder / "imported");
  EXPECT_NE(user_error_of([&] { reader.load(training.registry(), kAll); }).find("no optimizer state"),
            std::string::npos);
  SmallModel loaded(SmallModel::specs(), DType::kF32, ParameterUse::kInference);
  reader.load(loaded.registry(), CheckpointContent::kWeights);
  EXPECT_TRUE(loaded.bytes() == saved.bytes());
}

TEST(Checkpoint, PrecisionMustMatchForResumingButWeightsAreConverted) {
  const TempDirectory folder;
  SmallModel saved;
  saved.fill(4);
  write_checkpoint(folder / "step-000004", header_of(4), saved.blocks());
  SmallModel wide(SmallModel::specs(), DType::kF64);
  CheckpointReader reader(folder / "step-000004");
  EXPECT_NE(
      user_error_of([&] { reader.load(wide.registry(), kAll); }).find("holds f32 values but this run computes in f64"),
      std::string::npos);
  reader.load(wide.registry(), CheckpointContent::kWeights);
  for (const auto& [name, shape] : SmallModel::specs())
    EXPECT_EQ(support::values_of(wide.registry().find(name)->value),
              support::values_of(saved.registry().find(name)->value));
}

// ---- background saves -----------------------------------------------------------------------------------------------

TEST(CheckpointWriter, BackgroundAndBlockingSavesGiveIdenticalFiles) {
  const TempDirectory blocking, background;
  SmallModel::Specs specs = SmallModel::specs();
  specs.push_back({"lm_head.weight", {523, 2053}});  // more than a piece
  SmallModel model(specs);
  {
    CheckpointWriter blocking_writer({blocking.path(), 3}, model.blocks(), std::nullopt);
    BackgroundSetup setup(model, {background.path(), 3});
    for (const int64_t step : {10, 20, 30}) {
      model.fill(static_cast<uint64_t>(step));
      blocking_writer.save(header_of(step));
      setup.writer.save(header_of(step));
      model.fill(999);  // training goes on
    }
    EXPECT_EQ(blocking_writer.finish().size(), 3U);
    EXPECT_EQ(setup.writer.finish().size(), 3U);
  }
  std::map<std::string, std::string> by_step;
  for (const char* step : {"step-000010", "step-000020", "step-000030"}) {
    for (const char* file : {"manifest.json", "rank-00000-of-00001.h5"}) {
      const std::string name = std::string(step) + "/" + file;
      EXPECT_TRUE(support::read_file(blocking / name) == support::read_file(background / name)) << name;
      by_step[file + support::read_file(blocking / name)] = name;
    }
  }
  EXPECT_EQ(by_step.size(), 6U);  // the three steps differ from one another
}

TEST(CheckpointWriter, EverythingOfASlowSaveIsOfOneStep) {
  const TempDirectory folder;
  SmallModel model;
  BackgroundSetup setup(model, {folder.path(), 5});
  inject_file_delay(15);
  for (const int64_t step : {10, 20}) {
    model.fill(static_cast<uint64_t>(step));
    CheckpointHeader header = header_of(step);
    setup.writer.save(header);
    EXPECT_TRUE(setup.writer.take_finished().empty() || step > 10);  // still writing
    // Training goes on while the disk is slow: all that was given to save() changes.
    for (uint64_t later = 1; later <= 5; ++later) model.fill(static_cast<uint64_t>(step) + later);
    header = header_of(step + 5);
  }
  const std::vector<FinishedSave> finished = setup.writer.finish();
  inject_file_delay(0);
  ASSERT_FALSE(finished.empty());
  EXPECT_EQ(finished.back().step, 20);
  EXPECT_GE(finished.back().seconds, 0.3);
  EXPECT_EQ(load_newest_exactly(folder.path()), 20);
  remove_checkpoint(folder / "step-000020");
  EXPECT_EQ(load_newest_exactly(folder.path()), 10);
}

TEST(CheckpointWriter, PlansTheSnapshotToTheByte) {
  const SmallModel model(SmallModel::specs_with_large_tensors());
  Arena planning = Arena::planning("checkpoint", Device::kCpu);
  allocate_snapshot(model.blocks(), planning);
  const auto values = static_cast<int64_t>(model.bytes().size());
  EXPECT_GE(planning.peak(), values);
  EXPECT_LE(planning.peak(), values + 21 * Arena::kAlignment);
  const TempDirectory folder;
  BackgroundSetup setup(model, {folder.path(), 1});
  EXPECT_EQ(setup.arena.used(), setup.arena.capacity());
}

}  // namespace
}  // namespace palimpsest
