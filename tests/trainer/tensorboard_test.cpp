#include "trainer/tensorboard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>

#include "tests/support/files.h"

namespace palimpsest {
namespace {

TEST(Crc32c, MatchesPublishedVectors) {
  EXPECT_EQ(crc32c(""), 0x00000000u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);  // the check value of the polynomial
  // RFC 3720, appendix B.4.
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
  std::string rising, falling;
  for (int i = 0; i < 32; ++i) {
    rising += static_cast<char>(i);
    falling += static_cast<char>(31 - i);
  }
  EXPECT_EQ(crc32c(rising), 0x46DD794Eu);
  EXPECT_EQ(crc32c(falling), 0x113FDB5Cu);
}

// ---- a reader of its own, written from the format alone ----

uint64_t number(const std::string& bytes, size_t at, size_t size) {
  uint64_t value = 0;
  for (size_t i = 0; i < size; ++i)
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes.at(at + i))) << 8 * i;
  return value;
}

uint32_t masked(uint32_t crc) {
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

struct Field {
  uint64_t value = 0;  // varint or fixed
  std::string bytes;
};

// Fields of a message by number, in order.
std::multimap<uint64_t, Field> fields_of(const std::string& message) {
  std::multimap<uint64_t, Field> fields;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(at++));
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.size()) {
    const uint64_t key = varint();
    Field field;
    switch (key & 7) {
      case 0:
        field.value = varint();
        break;
      case 1:
        field.value = number(message, at, 8), at += 8;
        break;
      case 5:
        field.value = number(message, at, 4), at += 4;
        break;
      case 2: {
        const uint64_t length = varint();
        field.bytes = message.substr(at, length);
        EXPECT_EQ(field.bytes.size(), length);
        at += length;
        break;
      }
      default:
        ADD_FAILURE() << "wire type " << (key & 7);
        return fields;
    }
    fields.emplace(key >> 3, field);
  }
  return fields;
}

struct ReadEvent {
  double wall_time = 0;
  int64_t step = 0;
  std::string version;
  std::map<std::string, float> scalars;
  std::optional<uint64_t> session_status;
};

std::vector<ReadEvent> read_events(const std::string& path) {
  const std::string file = support::read_file(path);
  std::vector<ReadEvent> events;
  for (size_t at = 0; at < file.size();) {
    const uint64_t length = number(file, at, 8);
    EXPECT_EQ(number(file, at + 8, 4), masked(crc32c(file.substr(at, 8))));
    const std::string data = file.substr(at + 12, length);
    EXPECT_EQ(data.size(), length);
    EXPECT_EQ(number(file, at + 12 + length, 4), masked(crc32c(data)));
    at += length + 16;
    ReadEvent event;
    for (const auto& [id, field] : fields_of(data)) {
      if (id == 1) event.wall_time = std::bit_cast<double>(field.value);
      if (id == 2) event.step = static_cast<int64_t>(field.value);
      if (id == 3) event.version = field.bytes;
      if (id == 7) event.session_status = fields_of(field.bytes).find(1)->second.value;
      if (id != 5) continue;
      for (const auto& [value_id, value] : fields_of(field.bytes)) {
        EXPECT_EQ(value_id, 1u);
        const auto parts = fields_of(value.bytes);
        event.scalars[parts.find(1)->second.bytes] =
            std::bit_cast<float>(static_cast<uint32_t>(parts.find(2)->second.value));
      }
    }
    events.push_back(event);
  }
  return events;
}

StepMetrics step_metrics(int64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = 2.5;
  metrics.grad_norm = std::nan("");
  metrics.lr = 3e-4;
  metrics.tokens_per_second = 1e5;
  metrics.skipped_steps = 1;
  return metrics;
}

TEST(TensorBoard, FileReadsBack) {
  const support::TempDirectory folder;
  TensorBoardLog log(folder / "a/tensorboard", 6);
  StepMetrics metrics = step_metrics(7);
  log.write(metrics);
  metrics = step_metrics(INT64_MAX);
  metrics.mfu = 0.25;
  metrics.eval = {{"bible", 1.5, 0.75}, {"other", 3.0, std::nullopt}};
  log.write(metrics);

  const auto events = read_events(log.path());
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_GT(events[0].wall_time, 1.6e9);
  EXPECT_EQ(events[1].session_status, 1u);
  EXPECT_EQ(events[1].step, 7);
  EXPECT_EQ(events[2].step, 7);
  EXPECT_EQ(events[2].scalars.size(), 5u);
  EXPECT_EQ(events[2].scalars.at("train/loss"), 2.5f);
  EXPECT_TRUE(std::isnan(events[2].scalars.at("train/grad_norm")));
  EXPECT_EQ(events[2].scalars.at("train/lr"), 3e-4f);
  EXPECT_EQ(events[2].scalars.at("train/tokens_per_second"), 1e5f);
  EXPECT_EQ(events[2].scalars.at("train/skipped_steps"), 1.0f);
  EXPECT_EQ(events[3].step, INT64_MAX);
  EXPECT_EQ(events[3].scalars.at("train/mfu"), 0.25f);
  EXPECT_EQ(events[3].scalars.at("eval/bible/loss"), 1.5f);
  EXPECT_EQ(events[3].scalars.at("eval/bible/bits_per_byte"), 0.75f);
  EXPECT_EQ(events[3].scalars.at("eval/other/loss"), 3.0f);
  EXPECT_EQ(events[3].scalars.count("eval/other/bits_per_byte"), 0u);
}

TEST(TensorBoard, EachStartHasAFileOfItsOwn) {
  const support::TempDirectory folder;
  const TensorBoardLog first(folder / "tb", 0);
  const TensorBoardLog second(folder / "tb", 0);
  EXPECT_NE(first.path(), second.path());
  EXPECT_NE(std::filesystem::path(first.path()).filename().string().find("tfevents"), std::string::npos);
}

TEST(TensorBoard, AFolderThatCannotBeIsAUserError) {
  const support::TempDirectory folder;
  support::write_file(folder / "file", "");
  EXPECT_EQ(support::user_error_of([&] { TensorBoardLog(folder / "file/tb", 0); }),
            folder / "file/tb" + ": cannot be written: Not a directory");
}

// The real reader, where the machine has it: two files of one run, the second resumed from step 2.
TEST(TensorBoard, TheRealReaderAgrees) {
  const char* python = std::getenv("PALIMPSEST_PYTHON");
  const std::string interpreter = python != nullptr ? python : "python3";
  if (std::system((interpreter + " -c 'import tensorboard' >/dev/null 2>&1").c_str()) != 0) {
    GTEST_SKIP() << interpreter << " has no module tensorboard (PALIMPSEST_PYTHON names another interpreter)";
  }
  const support::TempDirectory folder;
  {
    TensorBoardLog log(folder / "tb", 0);
    for (int64_t step = 1; step <= 4; ++step) log.write(step_metrics(step));
  }
  {
    TensorBoardLog log(folder / "tb", 2);
    StepMetrics metrics = step_metrics(3);
    metrics.loss = 1.5;
    log.write(metrics);
  }
  support::write_file(folder / "read.py",
                      "import sys\n"
                      "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
                      "events = EventAccumulator(sys.argv[1])\n"
                      "events.Reload()\n"
                      "print([(e.step, e.value) for e in events.Scalars('train/loss')])\n");
  ASSERT_EQ(std::system((interpreter + " " + folder / "read.py" + " " + folder / "tb" + " >" + folder / "out" + " 2>" +
                         folder / "err")
                            .c_str()),
            0)
      << support::read_file(folder / "err");
  EXPECT_EQ(support::read_file(folder / "out"), "[(1, 2.5), (2, 2.5), (3, 1.5)]\n");
}

}  // namespace
}  // namespace palimpsest
