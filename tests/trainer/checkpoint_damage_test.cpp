// Damaged and hostile checkpoints: every change is reported in one line or changes nothing, and nothing crashes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "tests/support/files.h"
#include "tests/trainer/checkpoint_fixture.h"
#include "trainer/checkpoint_inspect.h"
#include "trainer/checkpoint_manifest.h"

namespace palimpsest {
namespace {

using support::read_file;
using support::TempDirectory;
using support::user_error_of;
using support::write_file;

constexpr auto kAll = CheckpointContent::kWeightsAndOptimizer;
constexpr const char* kRankFile = "/rank-00000-of-00001.h5";

const SmallModel::Specs kTwoTensors = {{"w", {5, 3}}, {"A_log", {2}}};

std::string save_two_tensors(const std::string& folder) {
  SmallModel model(kTwoTensors);
  model.fill(6);
  write_checkpoint(folder, header_of(6), model.blocks());
  return model.bytes();
}

enum class Outcome : uint8_t { kReported, kHarmless, kSilent };

Outcome outcome_of_loading(const std::string& folder, const std::string& expected) {
  SmallModel model(kTwoTensors);
  try {
    CheckpointReader reader(folder);
    reader.load(model.registry(), kAll);
    return model.bytes() == expected && reader.manifest().header.state == header_of(6).state ? Outcome::kHarmless
                                                                                             : Outcome::kSilent;
  } catch (const CheckpointDamage& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(folder), std::string::npos) << error.what();
    return Outcome::kReported;
  }
}

TEST(CheckpointDamage, NoFlippedBitOfTheTensorsIsSilent) {
  const TempDirectory directory;
  const std::string folder = directory / "step-000006";
  const std::string expected = save_two_tensors(folder);
  const std::string path = folder + kRankFile;
  const std::string content = read_file(path);
  // Prime to 8, so that all bit positions and all parts of the file are met; with 1 the test takes half a minute.
  constexpr size_t kStride = 23;
  int64_t counts[3] = {};
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  for (size_t bit = 0; bit < content.size() * 8; bit += kStride) {
    const auto put = [&](char value) {
      file.seekp(static_cast<std::streamoff>(bit / 8));
      file.put(value);
      file.flush();
      ASSERT_TRUE(file.good());
    };
    put(static_cast<char>(content[bit / 8] ^ (1 << (bit % 8))));
    const Outcome outcome = outcome_of_loading(folder, expected);
    ++counts[static_cast<int>(outcome)];
    EXPECT_NE(outcome, Outcome::kSilent) << "bit " << bit % 8 << " of byte " << bit / 8;
    put(content[bit / 8]);
  }
  EXPECT_EQ(outcome_of_loading(folder, expected), Outcome::kHarmless);
  EXPECT_GT(counts[0], counts[1] / 10);
  std::printf("%zu bytes, flipped bits: %lld reported, %lld harmless, %lld silent\n", content.size(),
              static_cast<long long>(counts[0]), static_cast<long long>(counts[1]), static_cast<long long>(counts[2]));
}

// Fletcher32, the file's own checksum, does not tell words of all zeros from words of all ones.
TEST(CheckpointDamage, WhatTheFileDoesNotNoticeTheManifestDoes) {
  const TempDirectory directory;
  const std::string folder = directory / "step-000006";
  SmallModel model(kTwoTensors);
  const Tensor& w = model.registry().find("w")->value;
  std::fill_n(w.data<float>(), w.numel(), 0.0F);
  w.data<float>()[0] = 12345.678F;
  write_checkpoint(folder, header_of(6), model.blocks());
  std::string content = read_file(folder + kRankFile);
  const size_t place = content.find(std::string(static_cast<const char*>(w.raw()), 8));
  ASSERT_NE(place, std::string::npos);
  content.replace(place + 8, 4, 4, '\xff');
  write_file(folder + kRankFile, content);
  SmallModel loaded(kTwoTensors);
  const std::string message = user_error_of([&] { CheckpointReader(folder).load(loaded.registry(), kAll); });
  EXPECT_NE(message.find("dataset 'model/w' does not have the checksum that the manifest gives"), std::string::npos)
      << message;
}

TEST(CheckpointDamage, EveryFlippedBitOfTheManifestIsReported) {
  const TempDirectory directory;
  save_two_tensors(directory / "step-000006");
  const std::string path = directory / "step-000006/manifest.json";
  std::string text = read_file(path);
  EXPECT_EQ(to_text(parse_manifest(text, path)), text);
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    const char mask = static_cast<char>(1 << (bit % 8));
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ mask);
    EXPECT_THROW(parse_manifest(text, path), CheckpointDamage) << "bit " << bit;
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ mask);
  }
}

TEST(CheckpointDamage, FilesCutOffAnywhereAreReported) {
  const TempDirectory directory;
  const std::string folder = directory / "step-000006";
  const std::string expected = save_two_tensors(folder);
  for (const char* name : {kRankFile, "/manifest.json"}) {
    const std::string content = read_file(folder + name);
    for (size_t size = 0; size < content.size(); size = size * 9 / 8 + 7) {
      write_file(folder + name, content.substr(0, size));
      EXPECT_EQ(outcome_of_loading(folder, expected), Outcome::kReported) << name << " of " << size << " bytes";
    }
    write_file(folder + name, content + '\0');
    EXPECT_EQ(outcome_of_loading(folder, expected), Outcome::kReported) << name << " with a byte more";
    write_file(folder + name, content);
  }
  EXPECT_EQ(outcome_of_loading(folder, expected), Outcome::kHarmless);
}

// The manifest's list of sizes must not be what keeps a cut file from harm: it may be cut and filled again.
TEST(CheckpointDamage, FilesWithAHoleAreReported) {
  const TempDirectory directory;
  const std::string folder = directory / "step-000006";
  const std::string expected = save_two_tensors(folder);
  const std::string content = read_file(folder + kRankFile);
  int64_t num_reported = 0;
  for (size_t start = 0; start < content.size(); start = start * 9 / 8 + 5) {
    std::string holed = content;
    holed.replace(start, std::string::npos, content.size() - start, '\0');
    write_file(folder + kRankFile, holed);
    const Outcome outcome = outcome_of_loading(folder, expected);
    EXPECT_NE(outcome, Outcome::kSilent) << start;
    if (outcome == Outcome::kReported) ++num_reported;
  }
  EXPECT_GT(num_reported, 20);
}

TEST(CheckpointDamage, FilesOfAnotherCheckpointAreReported) {
  const TempDirectory directory;
  const std::string folder = directory / "step-000006";
  const std::string expected = save_two_tensors(folder);
  SmallModel other(kTwoTensors);
  other.fill(7);
  write_checkpoint(directory / "step-000007", header_of(7), other.blocks());
  const std::string other_file = read_file(directory / "step-000007" + std::string(kRankFile));
  ASSERT_EQ(other_file.size(), read_file(folder + kRankFile).size());  // a sound file, of the same size
  write_file(folder + kRankFile, other_file);
  EXPECT_EQ(outcome_of_loading(folder, expected), Outcome::kReported);
}

// ---- a manifest with a right checksum and wrong content -------------------------------------------------------------

class HostileManifest : public ::testing::Test {
 protected:
  HostileManifest() {
    save_two_tensors(folder_);
    good_ = parse_manifest(read_file(path_), path_);
  }

  // The error when the manifest's text is changed and signed again.
  std::string error_after_replacing(const std::string& from, const std::string& to) {
    const std::string good = to_text(good_);
    const size_t at = good.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    std::string text = good.substr(0, good.size() - kTrailer);
    text.replace(at, from.size(), to);
    char trailer[64];
    std::snprintf(trailer, sizeof(trailer), " \"manifest_crc32\": \"%08x\"\n}\n",
                  crc32_of(std::as_bytes(std::span(text))));
    return user_error_of([&] { parse_manifest(text + trailer, "manifest"); });
  }
  std::string error_after(const std::function<void(Manifest&)>& change) {
    Manifest manifest = good_;
    change(manifest);
    return user_error_of([&] { parse_manifest(to_text(manifest), "manifest"); });
  }

  static constexpr size_t kTrailer = sizeof(" \"manifest_crc32\": \"00000000\"\n}\n") - 1;
  TempDirectory directory_;
  std::string folder_ = directory_ / "step-000006";
  std::string path_ = folder_ + "/manifest.json";
  Manifest good_;
};

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST_F(HostileManifest, FieldsOfWrongTypesAreNamed) {
  EXPECT_SAYS(error_after_replacing("\"format\"", "\"formal\""), "field 'format' is missing");
  EXPECT_SAYS(error_after_replacing("palimpsest checkpoint", "another"),
              "field 'format' is not 'palimpsest checkpoint'");
  EXPECT_SAYS(error_after_replacing("\"format_version\": 1", "\"format_version\": 2"),
              "written in format version 2 by palimpsest test; this program reads version 1");
  EXPECT_SAYS(error_after_replacing("\"step\":6", "\"step\":-6"),
              "manifest: state: field 'step' is not a whole number");
  EXPECT_SAYS(error_after_replacing("\"step\":6", "\"step\":6.5"), "field 'step' is not a whole number");
  EXPECT_SAYS(error_after_replacing("\"step\":6", "\"step\":18446744073709551615"), "is not a whole number");
  EXPECT_SAYS(error_after_replacing("\"step\":6", "\"step\":\"6\""), "field 'step' is not a whole number");
  EXPECT_SAYS(error_after_replacing("\"eval_losses\":{", "\"eval_losses\":{\"x\":[],"), "field 'eval_losses'");
  EXPECT_SAYS(error_after_replacing("\"shape\":[5,3]", "\"shape\":[]"), "datasets[0]: field 'shape' is not a list");
  EXPECT_SAYS(error_after_replacing("\"shape\":[5,3]", "\"shape\":[1,1,1,1,1,1]"), "is not a list of 1 to 5");
  EXPECT_SAYS(error_after_replacing("\"dtype\":\"f32\"", "\"dtype\":\"f16\""), "is neither f32 nor f64");
  EXPECT_SAYS(error_after_replacing("\"crc32\":\"", "\"crc32\":\"-"), "is not 8 hexadecimal digits");
  EXPECT_SAYS(error_after_replacing("\"datasets\": [", "\"datasets\": 7, \"x\": ["), "field 'datasets' is not a list");
  EXPECT_SAYS(error_after_replacing("\"files\": [\n  {", "\"files\": [\n 5, {"), "files[0]: expected an object");
  EXPECT_SAYS(error_after_replacing("\"files\": [", "\"files\": [[[[[[[["), "not valid JSON");
  EXPECT_SAYS(error_after_replacing("\"name\":\"rank-", "\"name\":\"../rank-"), "is not a plain file name");
  EXPECT_SAYS(error_after_replacing("\"name\":\"rank-", "\"name\":\"\\u0000rank-"), "is not a plain file name");
}

TEST_F(HostileManifest, BlocksMustCoverEachTensorOnce) {
  EXPECT_SAYS(error_after([](Manifest& m) {
                m.datasets[0].global_shape = {6, 3};
              }),
              "dataset 'model/w' is not covered by its blocks");
  EXPECT_SAYS(error_after([](Manifest& m) { m.datasets[0].region.start = {1, 0}; }), "do not lie in global_shape");
  EXPECT_SAYS(error_after([](Manifest& m) {
                m.datasets[0].region.start = {int64_t{1} << 62, 0};
              }),
              "do not lie in global_shape");
  EXPECT_SAYS(error_after([](Manifest& m) { m.datasets[0].region.shape = {0, 3}; }), "do not lie in global_shape");
  EXPECT_SAYS(error_after([](Manifest& m) {
                m.datasets[0].global_shape = {int64_t{1} << 40, int64_t{1} << 40};
              }),
              "field 'global_shape' is not plausible");
  EXPECT_SAYS(error_after([](Manifest& m) {
                m.files.push_back({"b", 1});
                m.datasets.push_back(m.datasets[0]);
                m.datasets.back().file = "b";
              }),
              "has blocks that overlap");
  EXPECT_SAYS(error_after([](Manifest& m) {
                m.files.push_back({"b", 1});
                m.datasets.push_back(m.datasets[0]);
                m.datasets.back().file = "b";
                m.datasets.back().global_shape = {5, 4};
              }),
              "has blocks of different tensors");
  EXPECT_SAYS(error_after([](Manifest& m) { m.datasets.push_back(m.datasets[0]); }), "stands twice in");
  EXPECT_SAYS(error_after([](Manifest& m) { m.datasets[0].file = "b"; }), "stands in 'b', which is not listed");
  EXPECT_SAYS(error_after([](Manifest& m) { m.files.push_back(m.files[0]); }), "is listed twice");
}

TEST_F(HostileManifest, DatasetsMustBeWhatTheManifestDescribes) {
  const auto error_of_loading = [&](const std::function<void(Manifest&)>& change) {
    Manifest manifest = good_;
    change(manifest);
    write_file(path_, to_text(manifest));
    SmallModel model(kTwoTensors);
    return user_error_of([&] { CheckpointReader(folder_).load(model.registry(), kAll); });
  };
  // All blocks of a parameter, its moments among them, become [3, 5]: the manifest agrees with itself, not with the
  // file.
  EXPECT_SAYS(error_of_loading([](Manifest& m) { m.datasets[0].crc32 ^= 1; }), "does not have the checksum");
  EXPECT_SAYS(error_of_loading([](Manifest& m) {
                for (DatasetRecord& dataset : m.datasets) dataset.dtype = DType::kF64;
              }),
              "holds f64 values but this run computes in f32");
  EXPECT_SAYS(error_of_loading([](Manifest& m) { m.datasets[1].dtype = DType::kF64; }), "f64 values");
  EXPECT_SAYS(error_of_loading([](Manifest& m) { std::swap(m.datasets[0].name, m.datasets[1].name); }),
              "does not have the checksum");
}

TEST_F(HostileManifest, NonFiniteLossesAndForeignTextSurvive) {
  Manifest manifest = good_;
  manifest.header.state.eval_losses["diverged"] = std::numeric_limits<double>::infinity();
  manifest.header.config = "tab\there, \"quotes\", \\, \x01, caf\xc3\xa9";
  const Manifest read = parse_manifest(to_text(manifest), "manifest");
  EXPECT_EQ(read.header.config, manifest.header.config);
  EXPECT_TRUE(std::isnan(read.header.state.eval_losses.at("diverged")));
  manifest.header.config = "not UTF-8: \xff";
  EXPECT_EQ(parse_manifest(to_text(manifest), "manifest").header.config, "not UTF-8: \xef\xbf\xbd");
}

// ---- inspect --------------------------------------------------------------------------------------------------------

TEST(CheckpointInspect, ShowsStateLayoutConfigNormsAndVerification) {
  const TempDirectory directory;
  const std::string folder = directory / "step-000006";
  SmallModel model({{"w", {2, 2}}, {"b", {3}}});
  for (const CheckpointBlock& block : model.blocks())
    for (int64_t i = 0; i < block.tensor.numel(); ++i)
      block.tensor.data<float>()[i] = block.name.starts_with("model/") ? 3.0F : 0.5F;
  write_checkpoint(folder, header_of(6), model.blocks());
  const CheckpointReport report = inspect_checkpoint(folder);
  EXPECT_TRUE(report.damage.empty());
  for (const char* part :
       {"checkpoint ", "step-000006", "written by palimpsest test, format version 1", "step              6",
        "sampler_position  42", "loss on books", "6.333333", "ranks             1", "rank-00000-of-00001.h5",
        "  run: {dir: \"r\\u00fcns\"}\n  model:\n    hidden_size: 12\n", "[2, 2]",
        "6             1             1",        // norms of w: 3 * sqrt(4), 0.5 * sqrt(4)
        "5.19615      0.866025      0.866025",  // of b: 3 * sqrt(3), 0.5 * sqrt(3)
        "7 elements", "7.93725       1.32288",  // of all: 3 * sqrt(7), 0.5 * sqrt(7)
        "all 6 datasets match their checksums"})
    EXPECT_NE(report.text.find(part), std::string::npos) << "'" << part << "' in\n" << report.text;
}

TEST(CheckpointInspect, NamesEveryDamagedDataset) {
  const TempDirectory directory;
  const std::string folder = directory / "step-000006";
  save_two_tensors(folder);
  const std::string path = folder + "/manifest.json";
  Manifest manifest = parse_manifest(read_file(path), path);
  manifest.datasets[1].crc32 ^= 1;
  manifest.datasets[5].crc32 ^= 1;
  write_file(path, to_text(manifest));
  const CheckpointReport report = inspect_checkpoint(folder);
  ASSERT_EQ(report.damage.size(), 2U);
  EXPECT_SAYS(report.damage[0], "dataset 'adam_m/w' does not have the checksum");
  EXPECT_SAYS(report.damage[1], "dataset 'adam_v/A_log' does not have the checksum");
  EXPECT_SAYS(report.text, "DAMAGED: " + report.damage[1]);
  EXPECT_EQ(report.text.find("match their checksums"), std::string::npos);

  const std::string file = folder + kRankFile;
  write_file(file, std::string(static_cast<size_t>(file_size(file)), '\0'));
  EXPECT_EQ(inspect_checkpoint(folder).damage.size(), 1U);  // the file, once
}

}  // namespace
}  // namespace palimpsest
