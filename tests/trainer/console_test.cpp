#include "trainer/console.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <vector>

namespace palimpsest {
namespace {

// A console that writes into memory, by a clock that the test moves.
class ConsoleTest : public ::testing::Test {
 protected:
  ~ConsoleTest() override {
    if (stream_ != nullptr) std::fclose(stream_);
    std::free(buffer_);
  }
  Console make(ConsoleOptions::Style style) {
    stream_ = open_memstream(&buffer_, &size_);
    return Console(stream_, {style, [this] { return now_; }});
  }
  std::string text() {
    std::fflush(stream_);
    return {buffer_, size_};
  }
  std::vector<std::string> lines() {
    std::vector<std::string> result;
    std::string line;
    for (const char c : text()) {
      line += c;
      if (c != '\n') continue;
      result.push_back(line.substr(0, line.size() - 1));
      line.clear();
    }
    EXPECT_EQ(line, "") << "text without a line's end";
    return result;
  }
  bool is_plain() {
    const std::string all = text();
    return std::all_of(all.begin(), all.end(), [](char c) { return c == '\n' || (c >= 0x20 && c < 0x7f); });
  }

  double now_ = 1000;

 private:
  char* buffer_ = nullptr;
  size_t size_ = 0;
  std::FILE* stream_ = nullptr;
};

constexpr auto kPlain = ConsoleOptions::Style::kPlain;
constexpr auto kTerminal = ConsoleOptions::Style::kTerminal;

TEST_F(ConsoleTest, LinesArePlainWithoutATerminal) {
  {
    Console console = make(kPlain);
    console.info("a {} line %s");
    console.warning("odd");
    console.error("wrong");
    console.set_status("status");
    EXPECT_FALSE(console.is_terminal());
  }
  EXPECT_EQ(text(), "a {} line %s\nwarning: odd\nerror: wrong\n");
}

TEST_F(ConsoleTest, AStreamInMemoryOrAFileIsNoTerminal) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  EXPECT_FALSE(Console(file).is_terminal());
  std::fclose(file);
}

TEST_F(ConsoleTest, TheStatusStaysBelowLogLinesOnATerminal) {
  {
    Console console = make(kTerminal);
    console.set_status("working");
    console.info("line");
    console.warning("odd");
  }
  const std::string erase = "\r\x1b[K";
  EXPECT_EQ(text(),
            erase + "working" + erase + "line\nworking" + erase + "\x1b[33mwarning:\x1b[0m odd\nworking" + erase);
}

TEST_F(ConsoleTest, LinesOfSeveralThreadsStayWhole) {
  {
    Console console = make(kPlain);
    constexpr int kThreads = 4;
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&console] {
        for (int line = 0; line < 200; ++line) console.info("0123456789012345678901234567890123456789");
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const auto all = lines();
  EXPECT_EQ(all.size(), 800u);
  for (const std::string& line : all) EXPECT_EQ(line, "0123456789012345678901234567890123456789");
}

TEST_F(ConsoleTest, ShortWorkLeavesNoTrace) {
  {
    Console console = make(kPlain);
    ProgressBar bar(console, "tokenize", 100, "files");
    for (int i = 0; i <= 100; ++i, now_ += 0.019) bar.update(i);
  }
  EXPECT_EQ(text(), "");
}

TEST_F(ConsoleTest, LongWorkGivesOccasionalPlainLines) {
  {
    Console console = make(kPlain);
    ProgressBar bar(console, "tokenize", 60000000, "", ProgressBar::Unit::kBytes);
    for (int64_t i = 1; i <= 600; ++i) {  // a minute
      now_ += 0.1;
      bar.add(100000);
    }
  }
  const auto all = lines();
  ASSERT_EQ(all.size(), 7u);  // at 2, 12, 22, ... 52 seconds, and the end
  EXPECT_EQ(all[0], "tokenize: 3%  2.0/60.0 MB  1.0 MB/s  58 s left");
  EXPECT_EQ(all[1], "tokenize: 20%  12.0/60.0 MB  1.0 MB/s  48 s left");
  EXPECT_EQ(all.back(), "tokenize: 60.0/60.0 MB in 1:00, 1.0 MB/s");
  EXPECT_TRUE(is_plain());
}

TEST_F(ConsoleTest, ABarIsRedrawnOnATerminal) {
  {
    Console console = make(kTerminal);
    ProgressBar bar(console, "read", 200, "rows");
    for (int64_t i = 1; i <= 200; ++i) {
      now_ += 0.0625;
      bar.update(i);
    }
  }
  const std::string all = text();
  EXPECT_NE(all.find("\r\x1b[Kread: [############............] 50%  100/200 rows  16.0 rows/s  6 s left"),
            std::string::npos);
  EXPECT_NE(all.find("\r\x1b[K"
                     "read: 200/200 rows in 13 s, 16.0 rows/s\n"),
            std::string::npos);
  // From 2 seconds on, at every other update: at most ten times a second.
  EXPECT_EQ(std::count(all.begin(), all.end(), '\r'), 87);
  EXPECT_EQ(std::count(all.begin(), all.end(), '\n'), 1);
}

TEST_F(ConsoleTest, WorkOfUnknownLengthIsCounted) {
  {
    Console console = make(kPlain);
    ProgressBar bar(console, "score", 0, "tokens");
    now_ += 4;
    bar.update(8000000);
  }
  EXPECT_EQ(text(),
            "score: 8,000,000 tokens  2,000,000 tokens/s\nscore: 8,000,000 tokens in 4 s, 2,000,000 tokens/s\n");
}

StepMetrics step_metrics(int64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = 2.34567;
  metrics.lr = 3e-4;
  metrics.tokens_per_second = 12345.6;
  return metrics;
}

TEST_F(ConsoleTest, TrainingSaysStepLossRateSpeedAndTimeLeft) {
  {
    Console console = make(kPlain);
    TrainingProgress progress(console, 40, 1000);
    now_ += 2;
    StepMetrics metrics = step_metrics(41);
    progress.update(metrics);
    now_ += 2;
    metrics.step = 42;
    progress.update(metrics);  // too soon
    now_ += 10;
    metrics.step = 47;
    metrics.mfu = 0.456;
    metrics.skipped_steps = 1;
    progress.update(metrics);
  }
  const auto all = lines();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0], "step   41/1000  loss 2.3457  lr 3.000e-04  12,346 tokens/s  31:58 left");
  EXPECT_EQ(all[1], "step   47/1000  loss 2.3457  lr 3.000e-04  12,346 tokens/s  mfu 45.6%  1 skipped  31:46 left");
}

TEST_F(ConsoleTest, AFastTrainingPrintsAboutTwentyLinesAndTheLastStep) {
  {
    Console console = make(kPlain);
    TrainingProgress progress(console, 0, 990);
    for (int64_t step = 1; step <= 990; ++step) {
      now_ += 0.001;
      progress.update(step_metrics(step));
    }
  }
  const auto all = lines();
  EXPECT_GE(all.size(), 20u);
  EXPECT_LE(all.size(), 22u);
  EXPECT_EQ(all.back().substr(0, 13), "step 990/990 ");
  EXPECT_TRUE(is_plain());
}

TEST_F(ConsoleTest, ASlowTrainingPrintsEveryTenSeconds) {
  {
    Console console = make(kPlain);
    TrainingProgress progress(console, 0, 100000);
    for (int64_t step = 1; step <= 600; ++step) {
      now_ += 0.1;
      progress.update(step_metrics(step));
    }
  }
  EXPECT_EQ(lines().size(), 6u);  // step 1, and then every 10 of 60 seconds
}

TEST_F(ConsoleTest, NonFiniteLossesPrint) {
  {
    Console console = make(kPlain);
    TrainingProgress progress(console, 0, 2);
    StepMetrics metrics = step_metrics(1);
    metrics.loss = std::nan("");
    metrics.tokens_per_second = INFINITY;
    progress.update(metrics);
  }
  EXPECT_NE(text().find("loss nan"), std::string::npos);
}

TEST(DurationText, ReadsAsPeopleWriteIt) {
  EXPECT_EQ(duration_text(0.4), "0 s");
  EXPECT_EQ(duration_text(59.4), "59 s");
  EXPECT_EQ(duration_text(60), "1:00");
  EXPECT_EQ(duration_text(3599), "59:59");
  EXPECT_EQ(duration_text(7265), "2:01:05");
  EXPECT_EQ(duration_text(-3), "0 s");
  EXPECT_EQ(duration_text(std::nan("")), "0 s");
}

}  // namespace
}  // namespace palimpsest
