#include "data/hdf5_file.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <numeric>
#include <thread>

#include "data/file_ops.h"
#include "tests/support/files.h"

namespace palimpsest {
namespace {

using support::flip_bit;
using support::read_file;
using support::run_in_child;
using support::SmallFileSystem;
using support::TempDirectory;
using support::user_error_of;
using support::write_file;

template <class T>
std::vector<T> counting(int64_t count, T first = 0) {
  std::vector<T> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

template <class T>
std::span<const T> view(const std::vector<T>& values) {
  return values;
}

// Datasets of several chunks, small ones, attributes: a little of everything.
void write_sample(const std::string& path) {
  Hdf5File file = Hdf5File::create(path);
  file.create_dataset("model/weight", Hdf5Type::kF32, {5, 7}, 56);
  file.write("model/weight", view(counting<float>(35)));
  file.create_dataset("model/deep/bias", Hdf5Type::kF64, {3});
  file.write("model/deep/bias", view(counting<double>(3)));
  file.create_growing_dataset("tokens", Hdf5Type::kU16, 16);
  file.append("tokens", view(counting<uint16_t>(33)));
  file.set_string("/", "tokenizer", "bytes");
  file.set_ints("model/weight", "global_shape", {10, 7});
  file.set_double("/", "scale", 0.25);
  file.close();
}

struct Sample {
  std::vector<float> weight;
  std::vector<double> bias;
  std::vector<uint16_t> tokens;
  std::string tokenizer;
  std::vector<int64_t> global_shape;
  double scale;
  bool operator==(const Sample&) const = default;
};

Sample read_sample(const std::string& path) {
  const Hdf5File file = Hdf5File::open(path);
  return {
      file.read<float>("model/weight"),  file.read<double>("model/deep/bias"),          file.read<uint16_t>("tokens"),
      file.get_string("/", "tokenizer"), file.get_ints("model/weight", "global_shape"), file.get_double("/", "scale")};
}

bool is_open_here(const std::string& path) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.starts_with(path)) return true;
  }
  return false;
}

TEST(Hdf5File, KeepsDatasetsAndAttributes) {
  const TempDirectory folder;
  write_sample(folder / "a.h5");
  const Sample sample = read_sample(folder / "a.h5");
  EXPECT_EQ(sample, (Sample{counting<float>(35), counting<double>(3), counting<uint16_t>(33), "bytes", {10, 7}, 0.25}));
  const Hdf5File file = Hdf5File::open(folder / "a.h5");
  EXPECT_EQ(file.dataset_names(), (std::vector<std::string>{"model/deep/bias", "model/weight", "tokens"}));
  EXPECT_TRUE(file.has_dataset("model/weight"));
  EXPECT_FALSE(file.has_dataset("model"));
  EXPECT_FALSE(file.has_dataset("model/none/at/all"));
  EXPECT_TRUE(file.has_attribute("/", "scale"));
  EXPECT_FALSE(file.has_attribute("/", "none"));
  EXPECT_EQ(file.dataset("tokens").type, Hdf5Type::kU16);
  EXPECT_EQ(file.dataset("model/weight").shape, (std::vector<int64_t>{5, 7}));
}

TEST(Hdf5File, KeepsEveryElementType) {
  const TempDirectory folder;
  {
    Hdf5File file = Hdf5File::create(folder / "a.h5");
    const auto put = [&]<class T>(const char* name, T first) {
      file.create_dataset(name, Hdf5TypeOf<T>::value, {3});
      file.write(name, view(counting<T>(3, first)));
    };
    put("f32", 0.1f);
    put("f64", 0.1);
    put("u8", uint8_t{253});
    put("u16", uint16_t{65533});
    put("u32", uint32_t{4294967293});
    put("i32", int32_t{-2147483647});
    put("i64", int64_t{-9223372036854775807});
    file.close();
  }
  const Hdf5File file = Hdf5File::open(folder / "a.h5");
  EXPECT_EQ(file.read<float>("f32"), counting(3, 0.1f));
  EXPECT_EQ(file.read<double>("f64"), counting(3, 0.1));
  EXPECT_EQ(file.read<uint8_t>("u8"), counting(3, uint8_t{253}));
  EXPECT_EQ(file.read<uint16_t>("u16"), counting(3, uint16_t{65533}));
  EXPECT_EQ(file.read<uint32_t>("u32"), counting(3, uint32_t{4294967293}));
  EXPECT_EQ(file.read<int32_t>("i32"), counting(3, int32_t{-2147483647}));
  EXPECT_EQ(file.read<int64_t>("i64"), counting(3, int64_t{-9223372036854775807}));
}

TEST(Hdf5File, WritesAndReadsBlocksOfFiveDimensions) {
  const TempDirectory folder;
  const std::vector<int64_t> shape = {3, 2, 5, 4, 7};
  const std::vector<float> values = counting<float>(3 * 2 * 5 * 4 * 7);
  {
    Hdf5File file = Hdf5File::create(folder / "a.h5");
    file.create_dataset("x", Hdf5Type::kF32, shape, 200);
    const int64_t half = 2 * 5 * 4 * 7;
    file.write<float>("x", std::span(values).first(half), {0, 0, 0, 0, 0}, {1, 2, 5, 4, 7});
    file.write<float>("x", std::span(values).subspan(half), {1, 0, 0, 0, 0}, {2, 2, 5, 4, 7});
    file.close();
  }
  const Hdf5File file = Hdf5File::open(folder / "a.h5");
  EXPECT_EQ(file.read<float>("x"), values);
  std::vector<float> block(2 * 1 * 3 * 2 * 4, -1.0f);
  file.read<float>("x", block, {1, 1, 2, 1, 3}, {2, 1, 3, 2, 4});
  size_t at = 0;
  for (int64_t a = 1; a < 3; ++a)
    for (int64_t c = 2; c < 5; ++c)
      for (int64_t d = 1; d < 3; ++d)
        for (int64_t e = 3; e < 7; ++e) EXPECT_EQ(block[at++], values[(((a * 2 + 1) * 5 + c) * 4 + d) * 7 + e]);
}

TEST(Hdf5File, MovesMoreThanOnePieceInEitherDirection) {
  const TempDirectory folder;
  const std::vector<int64_t> shape = {3, 1000003};  // a row is one chunk of just under 4 MiB; two rows do not fit
  const std::vector<float> values = counting<float>(3 * 1000003);
  const int64_t before = num_file_operations();
  {
    Hdf5File file = Hdf5File::create(folder / "a.h5");
    file.create_dataset("rows", Hdf5Type::kF32, shape);
    file.write("rows", view(values));
    file.create_dataset("row", Hdf5Type::kF32, {1, 3000009});  // a row longer than a piece
    file.write<float>("row", values, {0, 0}, {1, 3000009});
    file.close();
  }
  EXPECT_GE(num_file_operations() - before, 3 + 3);
  const Hdf5File file = Hdf5File::open(folder / "a.h5");
  EXPECT_EQ(file.read<float>("rows"), values);
  EXPECT_EQ(file.read<float>("row"), values);
  std::vector<float> part(2000000);
  file.read<float>("row", part, {0, 500000}, {1, 2000000});
  EXPECT_EQ(part, counting<float>(2000000, 500000.0f));
}

TEST(Hdf5File, HoldsDatasetsWithoutElements) {
  const TempDirectory folder;
  {
    Hdf5File file = Hdf5File::create(folder / "a.h5");
    file.create_dataset("nothing", Hdf5Type::kF32, {0, 7});
    file.write<float>("nothing", {});
    file.create_growing_dataset("never", Hdf5Type::kI64, 8);
    file.set_ints("nothing", "start", {4, 0});
    file.close();
  }
  const Hdf5File file = Hdf5File::open(folder / "a.h5");
  EXPECT_TRUE(file.read<float>("nothing").empty());
  EXPECT_EQ(file.dataset("nothing").shape, (std::vector<int64_t>{0, 7}));
  EXPECT_TRUE(file.read<int64_t>("never").empty());
}

TEST(Hdf5File, ReadsAttributesOfOtherWriters) {
  const Hdf5File file = Hdf5File::open(PALIMPSEST_SOURCE_DIR "/tests/data/attributes.h5");
  EXPECT_EQ(file.get_string("/", "variable_text"), "héllo");
  EXPECT_EQ(file.get_string("/", "fixed_text"), "fixed");
  EXPECT_EQ(file.get_int("/", "boolean"), 1);
  EXPECT_EQ(file.get_int("/", "small"), -3);
  EXPECT_EQ(file.get_double("/", "single"), 0.5);
  EXPECT_EQ(file.get_double("/", "small"), -3.0);
  EXPECT_EQ(file.read<double>("scalar"), std::vector<double>{2.5});
  EXPECT_EQ(file.read<float>("compressed"), std::vector<float>(1000, 1.5f));
  EXPECT_NE(user_error_of([&] { file.get_int("/", "fixed_text"); }).find("'fixed_text' of '/' should be a whole"),
            std::string::npos);
  for (int twice = 0; twice < 2; ++twice) {
    EXPECT_NE(user_error_of([&] { file.read<double>("big_endian"); }).find("element type that is not read here"),
              std::string::npos);
  }
}

TEST(Hdf5File, EqualContentGivesEqualFiles) {
  const TempDirectory folder;
  write_sample(folder / "a.h5");
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // a recorded time would differ
  write_sample(folder / "b.h5");
  EXPECT_EQ(read_file(folder / "a.h5"), read_file(folder / "b.h5"));
}

TEST(Hdf5File, ErrorsNameFileAndDataset) {
  const TempDirectory folder;
  write_sample(folder / "a.h5");
  write_file(folder / "text.h5", std::string(5000, 'x'));
  const Hdf5File file = Hdf5File::open(folder / "a.h5");
  EXPECT_EQ(user_error_of([&] { Hdf5File::open(folder / "none.h5"); }),
            "cannot open " + (folder / "none.h5") + ": No such file or directory");
  EXPECT_EQ(user_error_of([&] { Hdf5File::open(folder.path()); }), "cannot read " + folder.path() + ": Is a directory");
  EXPECT_EQ(user_error_of([&] { Hdf5File::open(folder / "text.h5"); }),
            (folder / "text.h5") + ": cannot open as an HDF5 file: file signature not found");
  EXPECT_EQ(user_error_of([&] { file.read<float>("nothing"); }), (folder / "a.h5") + ": has no dataset 'nothing'");
  EXPECT_EQ(user_error_of([&] { file.read<float>("tokens"); }),
            (folder / "a.h5") + ": dataset 'tokens' is u16, expected f32");
  std::vector<uint16_t> out(4);
  EXPECT_EQ(user_error_of([&] { file.read<uint16_t>("tokens", out, {30}, {4}); }),
            (folder / "a.h5") + ": dataset 'tokens' of shape [33] has no block [4] at [30]");
  EXPECT_EQ(user_error_of([&] { Hdf5File::create(folder / "none/a.h5"); }),
            "cannot create " + (folder / "none/a.h5") + ": No such file or directory");
}

TEST(Hdf5File, AFileThatWasNotClosedIsRefused) {
  const TempDirectory folder;
  {
    Hdf5File file = Hdf5File::create(folder / "a.h5");
    file.create_dataset("x", Hdf5Type::kF32, {100});
    file.write("x", view(counting<float>(100)));
  }
  EXPECT_FALSE(is_open_here(folder.path()));
  user_error_of([&] { Hdf5File::open(folder / "a.h5"); });
}

TEST(Hdf5File, AFailureAtAnyOperationIsReportedAndLeavesNothingOpen) {
  const TempDirectory folder;
  const int64_t before = num_file_operations();
  write_sample(folder / "a.h5");
  const int64_t operations = num_file_operations() - before;
  EXPECT_GT(operations, 10);
  for (int64_t operation = 1; operation <= operations; ++operation) {
    inject_file_fault(FileFault::kFail, operation);
    const std::string message = user_error_of([&] { write_sample(folder / "a.h5"); });
    EXPECT_NE(message.find((folder / "a.h5") + ": No space left on device"), std::string::npos) << message;
    EXPECT_FALSE(is_open_here(folder.path())) << "operation " << operation;
  }
  inject_file_fault(FileFault::kNone);
  write_sample(folder / "a.h5");
  EXPECT_EQ(read_sample(folder / "a.h5").tokens, counting<uint16_t>(33));
}

TEST(Hdf5File, AKillAtAnyOperationLeavesNoReadableHalf) {
  const TempDirectory folder;
  write_sample(folder / "whole.h5");
  const Sample whole = read_sample(folder / "whole.h5");
  int kills = 0;
  for (int operation = 1;; ++operation) {
    const int status = run_in_child([&] {
      inject_file_fault(FileFault::kKill, operation);
      write_sample(folder / "a.h5");
    });
    if (!WIFSIGNALED(status)) break;
    ++kills;
    if (!path_exists(folder / "a.h5")) continue;
    try {
      EXPECT_EQ(read_sample(folder / "a.h5"), whole);
    } catch (const UserError&) {
    }
    remove_file(folder / "a.h5");
  }
  EXPECT_GT(kills, 10);
}

TEST(Hdf5File, FullDiskIsReportedAndFreedAgain) {
  const SmallFileSystem disk(1 << 20);
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
  const int64_t empty = free_bytes(disk.path());
  const auto fill_with = [&](int64_t data_elements, int num_groups) {
    Hdf5File file = Hdf5File::create(disk / "a.h5");
    file.create_dataset("x", Hdf5Type::kF32, {data_elements}, 65536);
    file.write("x", view(counting<float>(data_elements)));
    for (int i = 0; i < num_groups; ++i) {
      file.create_dataset("group " + std::to_string(i) + "/y", Hdf5Type::kF32, {1});
      file.set_string("group " + std::to_string(i), "text", std::string(1000, 'x'));
    }
    file.close();
  };
  // Too much data; then data that fit and metadata that do not, which fails while the file is closed.
  for (const auto& [elements, groups] : {std::pair<int64_t, int>{1 << 20, 0}, {200000, 400}}) {
    EXPECT_EQ(user_error_of([&, elements = elements, groups = groups] { fill_with(elements, groups); }),
              "cannot write " + (disk / "a.h5") + ": No space left on device");
    remove_file(disk / "a.h5");
    EXPECT_EQ(free_bytes(disk.path()), empty);
  }
  fill_with(1000, 1);
}

TEST(Hdf5File, EveryFlippedBitIsSeenOrHarmless) {
  const TempDirectory folder;
  write_sample(folder / "whole.h5");
  const std::string bytes = read_file(folder / "whole.h5");
  const Sample whole = read_sample(folder / "whole.h5");
  write_file(folder / "a.h5", bytes);
  int seen = 0;
  for (size_t position = 0; position < bytes.size(); ++position) {
    const int bit = static_cast<int>(position * 5 % 8);
    flip_bit(folder / "a.h5", position, bit);
    try {
      EXPECT_EQ(read_sample(folder / "a.h5"), whole) << "silent damage at byte " << position;
    } catch (const UserError&) {
      ++seen;
    }
    flip_bit(folder / "a.h5", position, bit);
  }
  EXPECT_GT(seen, 500);
}

TEST(Hdf5File, EveryTruncationIsSeen) {
  const TempDirectory folder;
  write_sample(folder / "whole.h5");
  const std::string bytes = read_file(folder / "whole.h5");
  for (size_t length = 0; length < bytes.size(); length += 1 + length / 64) {
    write_file(folder / "a.h5", bytes.substr(0, length));
    user_error_of([&] { read_sample(folder / "a.h5"); });
  }
}

TEST(Hdf5File, ServesReadersWhileAnotherThreadWrites) {
  const TempDirectory folder;
  write_sample(folder / "data.h5");
  const std::vector<float> values = counting<float>(300000);
  std::thread writer([&] {
    for (int round = 0; round < 5; ++round) {
      Hdf5File file = Hdf5File::create(folder / "checkpoint.h5");
      file.create_dataset("x", Hdf5Type::kF32, {300000}, 65536);
      file.write("x", view(values));
      file.close();
    }
  });
  const Hdf5File shared = Hdf5File::open(folder / "data.h5");
  std::vector<std::thread> readers;
  readers.reserve(3);
  for (int reader = 0; reader < 3; ++reader)
    readers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        EXPECT_EQ(shared.read<float>("model/weight"), counting<float>(35));
        EXPECT_EQ(shared.read<uint16_t>("tokens"), counting<uint16_t>(33));
        EXPECT_EQ(user_error_of([&] { shared.read<float>("none"); }), shared.path() + ": has no dataset 'none'");
      }
    });
  for (std::thread& reader : readers) reader.join();
  writer.join();
  EXPECT_EQ(Hdf5File::open(folder / "checkpoint.h5").read<float>("x"), values);
}

}  // namespace
}  // namespace palimpsest
