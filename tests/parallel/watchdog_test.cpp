#include "parallel/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace palimpsest {
namespace {

using namespace std::chrono_literals;

TEST(Watchdog, NamesRankOperationAxisAndStepWhenTheDeadlinePasses) {
  std::promise<std::string> line;
  Watchdog watchdog(3, 0.05, [&](const std::string& text) { line.set_value(text); });
  watchdog.set_step(17);
  const std::string axis = "data";
  const Watchdog::Guard guard(watchdog, "all_reduce", axis);
  auto text = line.get_future();
  ASSERT_EQ(text.wait_for(30s), std::future_status::ready);
  EXPECT_EQ(
      text.get(),
      "rank 3: all_reduce on axis data at step 17 did not finish within parallel.timeout_s = 0.05 s: another rank "
      "has failed, or is slower than that");
}

TEST(Watchdog, IsQuietWhenOperationsEndInTime) {
  bool expired = false;
  {
    Watchdog watchdog(0, 60.0, [&](const std::string&) { expired = true; });
    const std::string axis = "world";
    for (int i = 0; i < 100; ++i) {
      const Watchdog::Guard outer(watchdog, "barrier", axis);
      const Watchdog::Guard inner(watchdog, "all_gather", axis);
    }
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_FALSE(expired);
}

// A collective that began so long ago, or failed.
class FixedSource : public Watchdog::Source {
 public:
  FixedSource(std::chrono::milliseconds age, std::string failure) : age_(age), failure_(std::move(failure)) {}
  std::optional<Oldest> oldest() override { return Oldest{"reduce_scatter", Watchdog::Clock::now() - age_, failure_}; }
  const std::string& axis_name() const override { return axis_; }

 private:
  std::chrono::milliseconds age_;
  std::string failure_;
  std::string axis_ = "replica";
};

std::string line_about(Watchdog::Source& source) {
  std::promise<std::string> line;
  Watchdog watchdog(1, 60.0, [&](const std::string& text) { line.set_value(text); });
  watchdog.set_step(4);
  watchdog.add(source);
  auto text = line.get_future();
  return text.wait_for(30s) == std::future_status::ready ? text.get() : "nothing";
}

TEST(Watchdog, SeesWhatIsLateWithoutACallThatWaits) {
  FixedSource late(61s, "");
  EXPECT_EQ(line_about(late),
            "rank 1: reduce_scatter on axis replica at step 4 did not finish within parallel.timeout_s = 60 s: another "
            "rank has failed, or is slower than that");
}

TEST(Watchdog, TellsWhyACollectiveFailed) {
  FixedSource broken(0s, "remote process exited");
  EXPECT_EQ(line_about(broken), "rank 1: reduce_scatter on axis replica at step 4 failed: remote process exited");
}

TEST(Watchdog, ForgetsASourceThatIsRemoved) {
  std::atomic<bool> expired = false;
  Watchdog watchdog(0, 60.0, [&](const std::string&) { expired = true; });
  FixedSource fine(0s, ""), late(61s, "");
  watchdog.add(fine);
  std::this_thread::sleep_for(250ms);
  EXPECT_FALSE(expired);
  watchdog.remove(fine);
  std::this_thread::sleep_for(250ms);
  EXPECT_FALSE(expired);
  watchdog.add(late);
  std::this_thread::sleep_for(250ms);
  EXPECT_TRUE(expired);
}

}  // namespace
}  // namespace palimpsest
